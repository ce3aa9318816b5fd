/* Dense16Linear: fd_dense16_t for Python. It keeps the buffers that hold the weights. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linears/dense16.h"
#include "py_object.h"
#include "py_products.h"

enum { WEIGHTS, BIAS, BUFFERS };

typedef struct {
    fd_py_kernels_t head;
    fd_dense16_t linear;
    const fd_dense16_ops_t *ops;
    unsigned act;               /* the rows' dtype */
    Py_buffer buffers[BUFFERS]; /* obj NULL: not given */
} dense16_t;

static const fd_dense16_ops_t *choose(unsigned dtype, unsigned act) {
    fd_isa_t isa;
    if (!fd_py_choose_isa(NULL, &isa)) return NULL;
    const fd_dense16_ops_t *ops = fd_dense16_ops(isa, dtype, act);
    if (!ops)
        PyErr_Format(PyExc_ValueError, "%s has no products with 16-bit weights of these dtypes", fd_isa_name(isa));
    return ops;
}

static PyObject *supports(PyObject *type, PyObject *args) {
    unsigned dtype, act;
    fd_isa_t isa;
    if (!PyArg_ParseTuple(args, "II", &dtype, &act) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    return PyBool_FromLong(fd_dense16_ops(isa, dtype, act) != NULL);
}

static PyObject *dense16_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"dtype", "act", "outs", "ins", "weights", "bias", NULL};
    unsigned dtype, act, outs, ins;
    PyObject *weights, *bias;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIIIOO", keys, &dtype, &act, &outs, &ins, &weights, &bias))
        return NULL;
    const fd_dense16_ops_t *ops = choose(dtype, act);
    if (!ops) return NULL;
    dense16_t *self = (dense16_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->ops = ops, self->head.isa = ops->isa, self->act = act;
    Py_buffer *w = &self->buffers[WEIGHTS], *b = &self->buffers[BIAS];
    if (!outs || !ins || ins % ops->per_word) PyErr_Format(PyExc_ValueError, "no such linear: %u x %u", outs, ins);
    else if (fd_py_bytes(weights, "weights", 0, fd_dense16_packed_bytes(ops, outs, ins), w) && bias != Py_None)
        fd_py_bytes(bias, "bias", 0, outs * sizeof(float), b);
    self->linear = (fd_dense16_t){outs, ins, w->buf, b->buf};
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void dense16_dealloc(dense16_t *self) {
    for (int i = 0; i < BUFFERS; i++) PyBuffer_Release(&self->buffers[i]);
    fd_py_free(self);
}

static PyObject *dense16_run(dense16_t *self, PyObject *args) {
    Py_buffer x, y;
    unsigned threads;
    const fd_dense16_t *l = &self->linear;
    if (!PyArg_ParseTuple(args, "y*w*I", &x, &y, &threads)) return NULL;
    const size_t row = l->ins * self->ops->number_bytes, rows = (size_t)x.len / row;
    const int fits = (size_t)x.len == rows * row && (size_t)y.len == rows * l->outs * self->ops->number_bytes;
    fd_status_t status = FD_OK;
    if (fits && rows) {
        const fd_linear_task_t task = {l, x.buf, y.buf, rows};
        FD_WITHOUT_GIL(status = fd_dense16_multiply(self->ops, &task, 1, threads ? threads : 1));
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    if (!fits) return PyErr_Format(PyExc_ValueError, "x and y are not [rows, %zu] and [rows, %zu]", l->ins, l->outs);
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *dense16_packed_bytes(PyObject *type, PyObject *args) {
    unsigned dtype, act, outs, ins;
    if (!PyArg_ParseTuple(args, "IIII", &dtype, &act, &outs, &ins)) return NULL;
    const fd_dense16_ops_t *ops = choose(dtype, act);
    return ops ? PyLong_FromSize_t(fd_dense16_packed_bytes(ops, outs, ins)) : NULL;
}

static PyObject *dense16_pack(PyObject *type, PyObject *args) {
    unsigned dtype, act, outs, ins, threads;
    Py_buffer from, to;
    if (!PyArg_ParseTuple(args, "IIIIy*w*I", &dtype, &act, &outs, &ins, &from, &to, &threads)) return NULL;
    const fd_dense16_ops_t *ops = choose(dtype, act);
    if (ops && ins % ops->per_word)
        PyErr_Format(PyExc_ValueError, "%u inputs are not a multiple of %zu", ins, ops->per_word);
    else if (ops && ((size_t)from.len != (size_t)outs * ins * sizeof(uint16_t) ||
                     (size_t)to.len != fd_dense16_packed_bytes(ops, outs, ins)))
        PyErr_Format(PyExc_ValueError, "weights do not have the bytes of %u x %u", outs, ins);
    else if (ops) {
        FD_WITHOUT_GIL(fd_dense16_pack(ops, outs, ins, from.buf, to.buf, threads));
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS | METH_STATIC, "Whether the ISA has products for two dtypes."},
    {"run", (PyCFunction)dense16_run, METH_VARARGS, "y [rows, outs] = x [rows, ins] W^T + b."},
    {"pack", dense16_pack, METH_VARARGS | METH_STATIC, "Copy weights into the order of the kernels."},
    {"packed_bytes", dense16_packed_bytes, METH_VARARGS | METH_STATIC, "The bytes of packed weights."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_dense16_spec, "fastdecode.kernels._native.Dense16Linear", dense16_t,
           {Py_tp_doc, "A matrix of 16-bit numbers (fd_dense16_t)."}, {Py_tp_new, dense16_new},
           {Py_tp_dealloc, dense16_dealloc}, {Py_tp_methods, methods}, {Py_tp_members, fd_py_isa_member});

/* Outputs have no room between rows: such a product is the only one of its rows. */
static fd_status_t multiply(const void *ops, const fd_linear_task_t *tasks, size_t n, size_t stride, unsigned threads) {
    (void)stride;
    return fd_dense16_multiply(ops, tasks, n, threads);
}

bool fd_py_dense16_product(PyObject *o, uint32_t act, fd_product_t *product) {
    if (!Py_IS_TYPE(o, fd_py_dense16_type) || ((dense16_t *)o)->act != act) return false;
    const dense16_t *self = (dense16_t *)o;
    *product = (fd_product_t){self->linear.ins, self->linear.outs, multiply, self->ops, &self->linear};
    return true;
}
