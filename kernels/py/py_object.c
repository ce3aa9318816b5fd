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

bool fd_py_bytes(PyObject *o, const char *name, size_t size, Py_buffer *view) {
    if (!fd_py_view(o, name, 0, view)) return false;
    if ((size_t)view->len == size) return true;
    const Py_ssize_t len = view->len;
    PyBuffer_Release(view);
    return FD_PY_FAIL(PyExc_ValueError, "%s has %zd bytes, not %zu", name, len, size);
}
