/* The measurements of roofline.h for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <sched.h>

#include "attention/roofline.h"

/* Converts a sequence of CPU numbers to an array of *n. The caller frees it with PyMem_Free. NULL: exception set. */
static int *cpu_list(PyObject *o, Py_ssize_t *n) {
    PyObject *seq = PySequence_Fast(o, "cpus is not a sequence");
    if (!seq) return NULL;
    *n = PySequence_Fast_GET_SIZE(seq);
    int *cpus = *n ? PyMem_Calloc((size_t)*n, sizeof *cpus) : NULL;
    if (!cpus) {
        if (*n) PyErr_NoMemory();
        else PyErr_SetString(PyExc_ValueError, "no cpus");
    }
    for (Py_ssize_t i = 0; cpus && i < *n; i++) {
        const long cpu = PyLong_AsLong(PySequence_Fast_GET_ITEM(seq, i));
        if (cpu >= 0 && cpu < CPU_SETSIZE) {
            cpus[i] = (int)cpu;
            continue;
        }
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%ld is not a cpu", cpu);
        PyMem_Free(cpus);
        cpus = NULL;
    }
    Py_DECREF(seq);
    return cpus;
}

static PyObject *read_seconds(PyObject *self, PyObject *args) {
    PyObject *cpus_o;
    Py_buffer buffer;
    unsigned passes = 1, variant = 0;
    if (!PyArg_ParseTuple(args, "y*O|II", &buffer, &cpus_o, &passes, &variant)) return NULL;
    PyObject *result = NULL;
    Py_ssize_t n;
    int *cpus = cpu_list(cpus_o, &n);
    if (!cpus) goto out;
    if ((uintptr_t)buffer.buf % 64 || buffer.len / 64 < n) {
        PyErr_SetString(PyExc_ValueError, "the buffer is not 64-byte aligned, or shorter than a line a thread");
        goto out;
    }
    if (!fd_read_variant(variant)) {
        PyErr_Format(PyExc_ValueError, "there is no variant %u", variant);
        goto out;
    }
    double seconds;
    Py_BEGIN_ALLOW_THREADS
    seconds = fd_read_seconds(buffer.buf, (size_t)buffer.len, cpus, (uint32_t)n, passes, variant);
    Py_END_ALLOW_THREADS
    result = seconds < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyFloat_FromDouble(seconds);
out:
    PyMem_Free(cpus);
    PyBuffer_Release(&buffer);
    return result;
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
     "read_seconds(buffer, cpus, passes=1, variant=0) -> float: seconds to read the buffer `passes` times, one thread "
     "per "
     "CPU."},
    {"read_variants", read_variants, METH_NOARGS,
     "read_variants() -> list[str]: how each variant of read_seconds reads."},
    {NULL, NULL, 0, NULL},
};
