/* The measurements of roofline.h for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>

#include "attention/roofline.h"
#include "py_object.h"

static PyObject *read_seconds(PyObject *self, PyObject *args) {
    PyObject *cpus_o;
    Py_buffer buffer;
    unsigned passes = 1, variant = 0;
    int cold = 0;
    if (!PyArg_ParseTuple(args, "y*O|IIp", &buffer, &cpus_o, &passes, &variant, &cold)) return NULL;
    Py_ssize_t n;
    double seconds = 0;
    int *cpus = fd_py_new_ints(cpus_o, "cpus", CPU_SETSIZE - 1, &n);
    if (cpus && !n) PyErr_SetString(PyExc_ValueError, "no cpus");
    else if (cpus && ((uintptr_t)buffer.buf % 64 || buffer.len / 64 < n))
        PyErr_SetString(PyExc_ValueError, "the buffer is not 64-byte aligned, or shorter than a line a thread");
    else if (cpus && !fd_read_variant(variant)) PyErr_Format(PyExc_ValueError, "there is no variant %u", variant);
    else if (cpus)
        FD_WITHOUT_GIL(
            seconds = fd_read_seconds(buffer.buf, (size_t)buffer.len, cpus, (uint32_t)n, passes, variant, cold));
    if (seconds < 0) PyErr_SetFromErrno(PyExc_OSError);
    PyMem_Free(cpus);
    PyBuffer_Release(&buffer);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(seconds);
}

static PyObject *read_variants(PyObject *self, PyObject *unused) {
    PyObject *names = PyList_New(0);
    for (uint32_t i = 0; names && fd_read_variant(i); i++) {
        PyObject *name = PyUnicode_FromString(fd_read_variant(i));
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyMethodDef fd_roofline_methods[] = {
    {"read_seconds", read_seconds, METH_VARARGS,
     "read_seconds(buffer, cpus, passes=1, variant=0, cold=False) -> float: seconds to read the buffer `passes` times, "
     "one thread per CPU, at first from memory if cold."},
    {"read_variants", read_variants, METH_NOARGS,
     "read_variants() -> list[str]: how each variant of read_seconds reads."},
    {NULL, NULL, 0, NULL},
};
