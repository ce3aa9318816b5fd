#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "py_object.h"

PyMemberDef fd_py_isa_member[] = {
    {"isa", T_STRING, offsetof(fd_py_kernels_t, isa), READONLY, "The ISA of the kernels."},
    {0},
};

bool fd_py_choose_isa(const char *name, fd_isa_t *isa) {
    const char *what = "isa";
    if (!name) {
        what = "FASTDECODE_ISA";
        name = getenv(what);
    }
    *isa = fd_isa_best();
    if (!name || !*name) return true;
    if (fd_isa_from_name(name, isa) == 0 && fd_isa_supported(*isa)) return true;
    char has[64] = "";
    for (int i = 0; i < FD_ISAS; i++)
        if (fd_isa_supported((fd_isa_t)i)) {
            if (*has) strcat(has, ", ");
            strcat(has, fd_isa_name((fd_isa_t)i));
        }
    return FD_PY_FAIL(PyExc_ValueError, "%s '%s' cannot be used; this machine has %s", what, name, has);
}

bool fd_py_view(PyObject *o, const char *name, int flags, Py_buffer *view) {
    if (PyObject_GetBuffer(o, view, flags | PyBUF_C_CONTIGUOUS) == 0) return true;
    if (!PyErr_ExceptionMatches(PyExc_BufferError)) return false;
    return FD_PY_FAIL(PyExc_ValueError, "%s is not C-contiguous%s", name,
                      flags & PyBUF_WRITABLE ? " and writable" : "");
}

bool fd_py_bytes(PyObject *o, const char *name, int flags, size_t size, Py_buffer *view) {
    if (!fd_py_view(o, name, flags, view)) return false;
    if ((size_t)view->len == size) return true;
    const Py_ssize_t len = view->len;
    PyBuffer_Release(view);
    return FD_PY_FAIL(PyExc_ValueError, "%s has %zd bytes, not %zu", name, len, size);
}

PyObject *fd_py_sequence(PyObject *o, const char *what, Py_ssize_t n) {
    PyObject *seq = PySequence_Fast(o, what);
    if (!seq || PySequence_Fast_GET_SIZE(seq) == n) return seq;
    PyErr_Format(PyExc_ValueError, "%s: %zd given, %zd needed", what, PySequence_Fast_GET_SIZE(seq), n);
    Py_DECREF(seq);
    return NULL;
}

bool fd_py_ints(PyObject *o, const char *what, Py_ssize_t n, long long max, void *fields, size_t stride) {
    PyObject *seq = fd_py_sequence(o, what, n);
    if (!seq) return false;
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        const long long v = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(seq, i));
        if (v == -1 && PyErr_Occurred()) ok = false;
        else if (v < 0 || v > max) ok = FD_PY_FAIL(PyExc_ValueError, "%s: %lld is not within 0..%lld", what, v, max);
        else *(uint32_t *)((uint8_t *)fields + (size_t)i * stride) = (uint32_t)v;
    }
    Py_DECREF(seq);
    return ok;
}

void *fd_py_new_ints(PyObject *o, const char *what, long long max, Py_ssize_t *n) {
    if ((*n = PyObject_Length(o)) < 0) return NULL;
    uint32_t *ints = PyMem_New(uint32_t, *n);
    if (!ints) return PyErr_NoMemory();
    if (fd_py_ints(o, what, *n, max, ints, sizeof *ints)) return ints;
    PyMem_Free(ints);
    return NULL;
}
