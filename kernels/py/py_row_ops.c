/* RowOps: fd_row_ops_t for Python. Rows are given as addresses, which spares a buffer for each of the small operations
 * of a layer; fastdecode/spart/decoder/row_ops.py checks their tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_isa.h"
#include "decoder/row_ops.h"

typedef struct {
    PyObject_HEAD
    const fd_row_ops_t *ops;
    const char *isa;
} row_ops_t;

static PyObject *row_ops_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", NULL};
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", keys, &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    if (act_dtype >= FD_ACT_DTYPES) return PyErr_Format(PyExc_ValueError, "no such activation dtype: %u", act_dtype);
    const char *name = NULL;
    const fd_row_ops_t *ops = fd_row_ops(isa, act_dtype, &name);
    if (!ops) return PyErr_Format(PyExc_ValueError, "%s has no row operations", fd_isa_name(isa));
    row_ops_t *self = (row_ops_t *)type->tp_alloc(type, 0);
    if (self) self->ops = ops, self->isa = name;
    return (PyObject *)self;
}

static void row_ops_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define POINTER(address) ((void *)(uintptr_t)(address))

static PyObject *norm(row_ops_t *self, PyObject *args) {
    unsigned long long x, y, weight, out;
    fd_norm_rows_t o;
    Py_ssize_t rows, width;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKfKfKnnI", &x, &y, &o.scale, &weight, &o.eps, &out, &rows, &width, &threads))
        return NULL;
    o.x = POINTER(x), o.y = POINTER(y), o.weight = POINTER(weight), o.out = POINTER(out), o.width = (size_t)width;
    Py_BEGIN_ALLOW_THREADS
    fd_norm_rows(self->ops, &o, (size_t)rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gate(row_ops_t *self, PyObject *args) {
    unsigned long long x, out;
    Py_ssize_t rows, width;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKnnI", &x, &out, &rows, &width, &threads)) return NULL;
    const fd_gate_rows_t o = {POINTER(x), POINTER(out), (size_t)width};
    Py_BEGIN_ALLOW_THREADS
    fd_gate_rows(self->ops, &o, (size_t)rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *place(row_ops_t *self, PyObject *args) {
    unsigned long long qkv, q_norm, k_norm, cos, sin, q, kv;
    float eps;
    Py_ssize_t q_stride, kv_stride, rows, q_heads, kv_heads, head_size, pairs;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKKfKKKnKnnnnnnI", &qkv, &q_norm, &k_norm, &eps, &cos, &sin, &q, &q_stride, &kv,
                          &kv_stride, &rows, &q_heads, &kv_heads, &head_size, &pairs, &threads))
        return NULL;
    const fd_place_rows_t o = {
        .qkv = POINTER(qkv),
        .q_norm = POINTER(q_norm),
        .k_norm = POINTER(k_norm),
        .q = POINTER(q),
        .kv = POINTER(kv),
        .cos = POINTER(cos),
        .sin = POINTER(sin),
        .eps = eps,
        .q_stride = (size_t)q_stride,
        .kv_stride = (size_t)kv_stride,
        .q_heads = (size_t)q_heads,
        .kv_heads = (size_t)kv_heads,
        .head_size = (size_t)head_size,
        .pairs = (size_t)pairs,
    };
    Py_BEGIN_ALLOW_THREADS
    fd_place_rows(self->ops, &o, (size_t)rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *row_ops_isa(row_ops_t *self, void *unused) { return PyUnicode_FromString(self->isa); }

static PyMethodDef methods[] = {
    {"norm", (PyCFunction)norm, METH_VARARGS, "norm(x, y, scale, weight, eps, out, rows, width, threads)"},
    {"gate", (PyCFunction)gate, METH_VARARGS, "gate(x, out, rows, width, threads)"},
    {"place", (PyCFunction)place, METH_VARARGS,
     "place(qkv, q_norm, k_norm, eps, cos, sin, q, q_stride, kv, kv_stride, rows, q_heads, kv_heads, head_size, pairs, "
     "threads)"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getset[] = {
    {"isa", (getter)row_ops_isa, NULL, "The ISA of the functions.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "The S-Part's operations between products (row_ops.h)."},
    {Py_tp_new, row_ops_new},
    {Py_tp_dealloc, row_ops_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "fastdecode.kernels._native.RowOps",
    .basicsize = sizeof(row_ops_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int fd_row_ops_add_types(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    const int error = type ? PyModule_AddObjectRef(module, "RowOps", type) : -1;
    Py_XDECREF(type);
    return error;
}
