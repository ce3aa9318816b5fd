/* RowDraws: fd_draw_rows for Python. Arrays are given as addresses; spart/sampler/host_sampling.py checks them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sampling/draw_rows.h"
#include "py_isa.h"

typedef struct {
    PyObject_HEAD
    fd_draw_rows_fn *draw;
    const char *isa;
} row_draws_t;

static PyObject *row_draws_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {NULL};
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", keys) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    row_draws_t *self = (row_draws_t *)type->tp_alloc(type, 0);
    if (self) self->draw = fd_draw_rows_of(isa, &self->isa);
    return (PyObject *)self;
}

static void row_draws_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define ADDRESS(address) ((void *)(uintptr_t)(address))

static PyObject *run(row_draws_t *self, PyObject *args) {
    unsigned long long logits, rows, masks, biased, bias, seen, penalty, tokens, flags, weights;
    fd_draw_t o;
    Py_ssize_t n, vocab, mask_words;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KIKnnKnKKKKKKKI", &logits, &o.dtype, &rows, &n, &vocab, &masks, &mask_words, &biased,
                          &bias, &seen, &penalty, &tokens, &flags, &weights, &threads))
        return NULL;
    o.logits = ADDRESS(logits), o.rows = ADDRESS(rows), o.vocab = (size_t)vocab;
    o.masks = ADDRESS(masks), o.mask_words = (size_t)mask_words;
    o.biased = ADDRESS(biased), o.bias = ADDRESS(bias), o.seen = ADDRESS(seen), o.penalty = ADDRESS(penalty);
    o.tokens = ADDRESS(tokens), o.flags = ADDRESS(flags), o.weights = ADDRESS(weights);
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = fd_draw_rows(self->draw, &o, (size_t)n, threads);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *row_draws_isa(row_draws_t *self, void *unused) { return PyUnicode_FromString(self->isa); }

static PyMethodDef methods[] = {
    {"run", (PyCFunction)run, METH_VARARGS,
     "run(logits, dtype, rows, n, vocab, masks, mask_words, biased, bias, seen, penalty, tokens, flags, weights, "
     "threads)"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getset[] = {
    {"isa", (getter)row_draws_isa, NULL, "The ISA that the function is compiled for.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Draws the next tokens of rows of logits (draw_rows.h)."},
    {Py_tp_new, row_draws_new},
    {Py_tp_dealloc, row_draws_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "fastdecode.kernels._native.RowDraws",
    .basicsize = sizeof(row_draws_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int fd_draw_rows_add_types(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    const int error = type ? PyModule_AddObjectRef(module, "RowDraws", type) : -1;
    Py_XDECREF(type);
    return error;
}
