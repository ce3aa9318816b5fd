/* RowDraws: fd_draw_rows for Python. Arrays are given as addresses; spart/sampler/host_sampling.py checks them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sampling/draw_rows.h"
#include "py_object.h"

typedef struct {
    fd_py_kernels_t head;
    const fd_draw_ops_t *ops;
} row_draws_t;

static PyObject *row_draws_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {NULL};
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", keys) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    row_draws_t *self = (row_draws_t *)type->tp_alloc(type, 0);
    if (self) self->ops = fd_draw_ops(isa), self->head.isa = self->ops->isa;
    return (PyObject *)self;
}

static PyObject *run(row_draws_t *self, PyObject *args) {
    fd_draw_t o;
    size_t n;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KIKnnKnKKKKKKKI", FD_ADDRESS(o.logits), &o.dtype, FD_ADDRESS(o.rows), &n, &o.vocab,
                          FD_ADDRESS(o.masks), &o.mask_words, FD_ADDRESS(o.biased), FD_ADDRESS(o.bias),
                          FD_ADDRESS(o.seen), FD_ADDRESS(o.penalty), FD_ADDRESS(o.tokens), FD_ADDRESS(o.flags),
                          FD_ADDRESS(o.weights), &threads))
        return NULL;
    fd_status_t status;
    FD_WITHOUT_GIL(status = fd_draw_rows(self->ops, &o, n, threads));
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)run, METH_VARARGS, "Draw the next tokens of rows (fd_draw_t)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_draw_rows_spec, "fastdecode.kernels._native.RowDraws", row_draws_t,
           {Py_tp_doc, "Draws the next tokens of rows of logits (draw_rows.h)."}, {Py_tp_new, row_draws_new},
           {Py_tp_methods, methods}, {Py_tp_members, fd_py_isa_member});
