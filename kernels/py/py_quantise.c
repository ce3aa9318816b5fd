/* fd_quantise for Python. Arrays are given as addresses; spart/linears/quantised.py makes them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linears/quantise.h"
#include "py_object.h"

static PyObject *quantise(PyObject *module, PyObject *args) {
    fd_quantise_t o = {0};
    fd_isa_t isa;
    int hadamard, levels;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KIInnnppKnKKnKKKI", FD_ADDRESS(o.x), &o.dtype, &o.bits, &o.rows, &o.columns, &o.stride,
                          &hadamard, &levels, FD_ADDRESS(o.q), &o.q_stride, FD_ADDRESS(o.scales), FD_ADDRESS(o.mins),
                          &o.scales_stride, FD_ADDRESS(o.factor), FD_ADDRESS(o.errors), FD_ADDRESS(o.groups),
                          &threads) ||
        !fd_py_choose_isa(NULL, &isa))
        return NULL;
    o.hadamard = hadamard, o.levels = levels;
    FD_WITHOUT_GIL(fd_quantise(&o, isa, threads ? threads : 1));
    Py_RETURN_NONE;
}

PyMethodDef fd_quantise_methods[] = {
    {"quantise", quantise, METH_VARARGS, "Round a matrix to numbers of 4 or 8 bits (fd_quantise_t)."},
    {NULL, NULL, 0, NULL},
};
