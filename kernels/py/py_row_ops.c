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
    const fd_row_ops_t *ops = fd_row_ops(isa, act_dtype);
    if (!ops) return PyErr_Format(PyExc_ValueError, "%s has no row operations for this dtype", fd_isa_name(isa));
    row_ops_t *self = (row_ops_t *)type->tp_alloc(type, 0);
    if (self) self->ops = ops, self->head.isa = ops->isa;
    return (PyObject *)self;
}

static PyObject *supports(PyObject *type, PyObject *args) {
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTuple(args, "I", &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    return PyBool_FromLong(fd_row_ops(isa, act_dtype) != NULL);
}

static PyObject *norm(row_ops_t *self, PyObject *args) {
    fd_norm_rows_t o = {0};
    size_t rows;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKfKfKnnI", FD_ADDRESS(o.x), FD_ADDRESS(o.y), &o.scale, FD_ADDRESS(o.weight), &o.eps,
                          FD_ADDRESS(o.out), &rows, &o.width, &threads))
        return NULL;
    FD_WITHOUT_GIL(fd_norm_rows(self->ops, &o, rows, threads));
    Py_RETURN_NONE;
}

static PyObject *gate(row_ops_t *self, PyObject *args) {
    fd_gate_rows_t o = {0};
    size_t rows;
    unsigned threads;
    int gelu;
    if (!PyArg_ParseTuple(args, "KKnnpI", FD_ADDRESS(o.x), FD_ADDRESS(o.out), &rows, &o.width, &gelu, &threads))
        return NULL;
    o.gelu = gelu;
    FD_WITHOUT_GIL(fd_gate_rows(self->ops, &o, rows, threads));
    Py_RETURN_NONE;
}

static PyObject *rope(row_ops_t *self, PyObject *args) {
    fd_rope_rows_t o = {0};
    size_t rows;
    unsigned threads;
    int whole_norms;
    if (!PyArg_ParseTuple(args, "KKKKf(KKKK)KnKnnnnnpnI", FD_ADDRESS(o.qkv), FD_ADDRESS(o.q_norm), FD_ADDRESS(o.k_norm),
                          FD_ADDRESS(o.v_norm), &o.eps, FD_ANGLES(o.angles), FD_ADDRESS(o.q), &o.q_stride,
                          FD_ADDRESS(o.kv), &o.kv_stride, &rows, &o.q_heads, &o.kv_heads, &o.head_size, &whole_norms,
                          &o.pairs, &threads))
        return NULL;
    o.whole_norms = whole_norms;
    FD_WITHOUT_GIL(fd_rope_rows(self->ops, &o, rows, threads));
    Py_RETURN_NONE;
}

static PyObject *turn(row_ops_t *self, PyObject *args) {
    fd_turn_rows_t o = {0};
    size_t rows;
    unsigned threads;
    int interleaved;
    if (!PyArg_ParseTuple(args, "(Knn)(Knn)KKnnnpI", FD_ADDRESS(o.x), &o.x_row, &o.x_head, FD_ADDRESS(o.out),
                          &o.out_row, &o.out_head, FD_ADDRESS(o.cos), FD_ADDRESS(o.sin), &rows, &o.heads, &o.pairs,
                          &interleaved, &threads))
        return NULL;
    o.interleaved = interleaved;
    FD_WITHOUT_GIL(fd_turn_rows(self->ops, &o, rows, threads));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS | METH_STATIC, "Whether the ISA has operations for a dtype."},
    {"norm", (PyCFunction)norm, METH_VARARGS, "Add and normalise rows (fd_norm_rows_t)."},
    {"gate", (PyCFunction)gate, METH_VARARGS, "Gate rows (fd_gate_rows_t)."},
    {"turn", (PyCFunction)turn, METH_VARARGS, "Turn the heads of rows (fd_turn_rows_t)."},
    {"rope", (PyCFunction)rope, METH_VARARGS, "Normalise and turn the heads of rows (fd_rope_rows_t)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_row_ops_spec, "fastdecode.kernels._native.RowOps", row_ops_t,
           {Py_tp_doc, "The S-Part's operations between products (row_ops.h)."}, {Py_tp_new, row_ops_new},
           {Py_tp_methods, methods}, {Py_tp_members, fd_py_isa_member});
