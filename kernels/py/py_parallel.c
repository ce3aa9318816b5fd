/* The times of the loops that threads share (cpu/parallel.h) for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu/parallel.h"
#include "region/py_types.h"

static PyObject *time_loops(PyObject *self, PyObject *on) {
    const int wanted = PyObject_IsTrue(on);
    if (wanted < 0) return NULL;
    FD_WITHOUT_GIL(fd_time_loops(wanted));
    Py_RETURN_NONE;
}

static PyObject *loop_times(PyObject *self, PyObject *unused) {
    static const char *const names[FD_LOOP_KINDS] = {
        [FD_LOOP_OTHER] = "other", [FD_LOOP_QKV] = "qkv",   [FD_LOOP_O] = "o",         [FD_LOOP_UP] = "up",
        [FD_LOOP_DOWN] = "down",   [FD_LOOP_ROWS] = "rows", [FD_LOOP_DRAWS] = "draws",
    };
    fd_loop_times_t times[FD_LOOP_KINDS];
    FD_WITHOUT_GIL(fd_read_loop_times(times));
    PyObject *result = PyDict_New();
    for (size_t i = 0; result && i < FD_LOOP_KINDS; i++) {
        const fd_loop_times_t *t = &times[i];
        PyObject *value = Py_BuildValue("Kdddd", (unsigned long long)t->loops, (double)t->ns * 1e-9,
                                        (double)t->late_ns * 1e-9, (double)t->done_ns * 1e-9,
                                        (double)t->busy_ns * 1e-9);
        if (!value || PyDict_SetItemString(result, names[i], value) < 0) Py_CLEAR(result);
        Py_XDECREF(value);
    }
    return result;
}

PyMethodDef fd_parallel_methods[] = {
    {"time_loops", time_loops, METH_O, "time_loops(on): add up the times of loops from zero, or stop."},
    {"loop_times", loop_times, METH_NOARGS,
     "loop_times() -> dict[str, tuple[int, float, float, float, float]]: of each kind of loops fd_loop_times_t, in "
     "seconds."},
    {NULL, NULL, 0, NULL},
};
