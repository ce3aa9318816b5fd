/* RowOps: fd_row_ops_t for Python. Rows are given as addresses, which spares a buffer for each of the small operations
 * of a layer; fastdecode/spart/decoder/block_ops.py checks their tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_object.h"
#include "decoder/row_ops.h"

typedef struct {
    fd_py_kernels_t head;
    const fd_row_ops_t *ops;
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
    if (self) self->ops = ops, self->head.isa = name;
    return (PyObject *)self;
}

static PyObject *why_not(PyObject *type, PyObject *args) {
    unsigned act_dtype;
    fd_isa_t isa;
    const char *name;
    if (!PyArg_ParseTuple(args, "I", &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    if (act_dtype < FD_ACT_DTYPES && fd_row_ops(isa, act_dtype, &name)) Py_RETURN_NONE;
    return PyUnicode_FromFormat("%s has no row operations for the dtype", fd_isa_name(isa));
}

static PyObject *norm(row_ops_t *self, PyObject *args) {
    unsigned long long x, y, weight, out;
    fd_norm_rows_t o;
    Py_ssize_t rows, width;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKfKfKnnI", &x, &y, &o.scale, &weight, &o.eps, &out, &rows, &width, &threads))
        return NULL;
    o.x = FD_ADDRESS(x), o.y = FD_ADDRESS(y), o.weight = FD_ADDRESS(weight), o.out = FD_ADDRESS(out),
    o.width = (size_t)width;
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
    const fd_gate_rows_t o = {FD_ADDRESS(x), FD_ADDRESS(out), (size_t)width};
    Py_BEGIN_ALLOW_THREADS
    fd_gate_rows(self->ops, &o, (size_t)rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *rope(row_ops_t *self, PyObject *args) {
    unsigned long long qkv, q_norm, k_norm, cos, sin, q, kv;
    float eps;
    Py_ssize_t q_stride, kv_stride, rows, q_heads, kv_heads, head_size, pairs;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKKfKKKnKnnnnnnI", &qkv, &q_norm, &k_norm, &eps, &cos, &sin, &q, &q_stride, &kv,
                          &kv_stride, &rows, &q_heads, &kv_heads, &head_size, &pairs, &threads))
        return NULL;
    const fd_rope_rows_t o = {
        .qkv = FD_ADDRESS(qkv),
        .q_norm = FD_ADDRESS(q_norm),
        .k_norm = FD_ADDRESS(k_norm),
        .q = FD_ADDRESS(q),
        .kv = FD_ADDRESS(kv),
        .cos = FD_ADDRESS(cos),
        .sin = FD_ADDRESS(sin),
        .eps = eps,
        .q_stride = (size_t)q_stride,
        .kv_stride = (size_t)kv_stride,
        .q_heads = (size_t)q_heads,
        .kv_heads = (size_t)kv_heads,
        .head_size = (size_t)head_size,
        .pairs = (size_t)pairs,
    };
    Py_BEGIN_ALLOW_THREADS
    fd_rope_rows(self->ops, &o, (size_t)rows, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"why_not", why_not, METH_VARARGS | METH_STATIC, "why_not(act_dtype): why there are no such operations, or None."},
    {"norm", (PyCFunction)norm, METH_VARARGS, "norm(x, y, scale, weight, eps, out, rows, width, threads)"},
    {"gate", (PyCFunction)gate, METH_VARARGS, "gate(x, out, rows, width, threads)"},
    {"rope", (PyCFunction)rope, METH_VARARGS,
     "rope(qkv, q_norm, k_norm, eps, cos, sin, q, q_stride, kv, kv_stride, rows, q_heads, kv_heads, head_size, pairs, "
     "threads)"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "The S-Part's operations between products (row_ops.h)."},
    {Py_tp_new, row_ops_new},
    {Py_tp_methods, methods},
    {Py_tp_members, fd_py_isa_member},
    {0, NULL},
};
static PyType_Spec spec = FD_PY_TYPE("fastdecode.kernels._native.RowOps", row_ops_t, slots);

bool fd_row_ops_add_types(PyObject *module) { return fd_py_add_type(module, &spec, NULL); }
