/* The measurements of roofline.h for Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <sched.h>

#include "roofline.h"

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
    unsigned passes = 1;
    if (!PyArg_ParseTuple(args, "y*O|I", &buffer, &cpus_o, &passes)) return NULL;
    PyObject *result = NULL;
    Py_ssize_t n;
    int *cpus = cpu_list(cpus_o, &n);
    if (!cpus) goto out;
    if ((uintptr_t)buffer.buf % 64 || buffer.len / 64 < n) {
        PyErr_SetString(PyExc_ValueError, "the buffer is not 64-byte aligned, or shorter than a line a thread");
        goto out;
    }
    double seconds;
    Py_BEGIN_ALLOW_THREADS
    seconds = fd_read_seconds(buffer.buf, (size_t)buffer.len, cpus, (uint32_t)n, passes);
    Py_END_ALLOW_THREADS
    result = seconds < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyFloat_FromDouble(seconds);
out:
    PyMem_Free(cpus);
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *multiply_rate(PyObject *self, PyObject *args) {
    const char *instruction;
    unsigned long rounds;
    if (!PyArg_ParseTuple(args, "sk", &instruction, &rounds)) return NULL;
    double rate;
    Py_BEGIN_ALLOW_THREADS
    rate = fd_multiply_rate(instruction, rounds ? rounds : 1);
    Py_END_ALLOW_THREADS
    return rate < 0 ? PyErr_Format(PyExc_ValueError, "this machine has no %s of 64 bytes", instruction)
                    : PyFloat_FromDouble(rate);
}

PyMethodDef fd_roofline_methods[] = {
    {"read_seconds", read_seconds, METH_VARARGS,
     "read_seconds(buffer, cpus, passes=1) -> float: seconds to read the buffer `passes` times, one thread per CPU."},
    {"multiply_rate", multiply_rate, METH_VARARGS,
     "multiply_rate(instruction, rounds) -> float: instructions per second of this core."},
    {NULL, NULL, 0, NULL},
};
