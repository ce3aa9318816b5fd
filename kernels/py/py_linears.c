/* QuantisedLinear: fd_linear_t for Python. It keeps the buffers that hold the weights. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linears/linear.h"
#include "py_isa.h"
#include "py_products.h"

enum { WEIGHTS, SCALES, UNITS, MINS, BIAS, TABLE, NEGATED_SUMS, BUFFERS };

typedef struct {
    PyObject_HEAD
    fd_linear_t linear;
    fd_isa_t isa;
    Py_buffer buffers[BUFFERS]; /* obj NULL: not given */
} linear_t;

/* Takes the bytes of `o` as buffer `which`, which must have `size` bytes. None is accepted if `optional`. */
static int take_buffer(linear_t *self, int which, PyObject *o, size_t size, int optional) {
    static const char *const names[BUFFERS] = {"weights", "scales", "units", "mins", "bias", "table", "negated_sums"};
    if (optional && o == Py_None) return 0;
    Py_buffer *buffer = &self->buffers[which];
    if (PyObject_GetBuffer(o, buffer, PyBUF_C_CONTIGUOUS) < 0) return -1;
    if ((size_t)buffer->len == size) return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, not %zu", names[which], buffer->len, size);
    return -1;
}

static PyObject *linear_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"outs",   "ins",   "bits", "group", "zero",  "passes",       "rotated", "weights",
                           "scales", "units", "mins", "bias",  "table", "negated_sums", NULL};
    unsigned outs, ins, bits, group, passes;
    int zero, rotated;
    PyObject *o[BUFFERS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIIIiIpOOOOOOO", keys, &outs, &ins, &bits, &group, &zero, &passes,
                                     &rotated, &o[WEIGHTS], &o[SCALES], &o[UNITS], &o[MINS], &o[BIAS], &o[TABLE],
                                     &o[NEGATED_SUMS]))
        return NULL;
    const unsigned most = 1u << 24;
    if (!outs || !ins || outs > most || ins > most || !group || group > most || group % FD_LINEAR_BLOCK ||
        (bits != 4 && bits != 8) || zero < 0 || zero > 255 || passes < 1 || passes > 2)
        return PyErr_Format(PyExc_ValueError, "no such linear: %u x %u, %u bits, groups of %u", outs, ins, bits, group);
    if (rotated && (passes != 1 || (bits == 8 && (zero != 128 || o[MINS] != Py_None)))) {
        PyErr_SetString(PyExc_ValueError, "a rotated matrix has one pass, and with 8 bits the zero 128 and no mins");
        return NULL;
    }
    linear_t *self = (linear_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    fd_linear_t *l = &self->linear;
    *l = (fd_linear_t){.outs = outs, .ins = ins, .bits = bits, .passes = passes, .rotated = rotated, .zero = zero};
    l->group_blocks = group / FD_LINEAR_BLOCK;
    l->groups = (ins + group - 1) / group;
    const size_t tiles = fd_linear_tiles(l), lanes = tiles * FD_LINEAR_LANES;
    if (!fd_py_choose_isa(NULL, &self->isa) ||
        take_buffer(self, WEIGHTS, o[WEIGHTS], tiles * fd_linear_tile_bytes(l), 0) < 0 ||
        take_buffer(self, SCALES, o[SCALES], lanes * l->groups * 2, 0) < 0 ||
        take_buffer(self, UNITS, o[UNITS], lanes * sizeof(float), 0) < 0 ||
        take_buffer(self, MINS, o[MINS], lanes * l->groups * 2, 1) < 0 ||
        take_buffer(self, BIAS, o[BIAS], lanes * sizeof(float), 1) < 0 ||
        take_buffer(self, TABLE, o[TABLE], FD_LINEAR_CODES, 1) < 0 ||
        take_buffer(self, NEGATED_SUMS, o[NEGATED_SUMS], lanes * fd_linear_blocks(l) * 2, 1) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    l->weights = self->buffers[WEIGHTS].buf;
    l->scales = self->buffers[SCALES].buf;
    l->units = self->buffers[UNITS].buf;
    l->mins = self->buffers[MINS].buf;
    l->bias = self->buffers[BIAS].buf;
    l->table = self->buffers[TABLE].buf;
    l->negated_sums = self->buffers[NEGATED_SUMS].buf;
    const int is_signed = rotated && bits == 8 && fd_linear_ops(self->isa)->wants_signed;
    if (is_signed != (l->negated_sums != NULL)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, is_signed ? "negated_sums are missing" : "negated_sums are not wanted");
    }
    int fits = !l->table || bits == 4; /* the kernels sum a table's numbers in few bits */
    for (int i = 0; l->table && i < FD_LINEAR_CODES; i++) fits &= l->table[i] <= FD_LINEAR_MOST_IN_TABLE;
    if (!fits) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "a table is for 4 bits and has numbers up to %d",
                            FD_LINEAR_MOST_IN_TABLE);
    }
    return (PyObject *)self;
}

static void linear_dealloc(linear_t *self) {
    for (int i = 0; i < BUFFERS; i++)
        if (self->buffers[i].obj) PyBuffer_Release(&self->buffers[i]);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *linear_run(linear_t *self, PyObject *args) {
    Py_buffer x, y;
    const fd_linear_t *l = &self->linear;
    unsigned threads, width = l->outs, first = 0;
    if (!PyArg_ParseTuple(args, "y*w*I|II", &x, &y, &threads, &width, &first)) return NULL;
    const size_t row = l->ins * sizeof(float), rows = (size_t)x.len / row;
    int error = 0;
    const int fits = (size_t)x.len == rows * row && rows >> 24 == 0 && width >= l->outs && first <= width - l->outs &&
                     (size_t)y.len == rows * width * sizeof(float);
    if (fits && rows) {
        Py_BEGIN_ALLOW_THREADS
        error =
            fd_linear_run(l, self->isa, x.buf, (uint32_t)rows, (float *)y.buf + first, width, threads ? threads : 1);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "x and y are not [rows, %u] and [rows, %u] fp32, or outputs %u to %u are not all "
                            "among the latter",
                            l->ins, width, first, first + l->outs);
    if (error) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *linear_isa(linear_t *self, void *unused) {
    return PyUnicode_FromString(fd_linear_ops(self->isa)->name);
}

static PyObject *linear_wants_signed(PyObject *type, PyObject *unused) {
    fd_isa_t isa;
    if (!fd_py_choose_isa(NULL, &isa)) return NULL;
    return PyBool_FromLong(fd_linear_ops(isa)->wants_signed);
}

static PyObject *linear_read_rows(linear_t *self, PyObject *args) {
    Py_buffer ids, y;
    long long first;
    const fd_linear_t *l = &self->linear;
    if (!PyArg_ParseTuple(args, "y*Lw*", &ids, &first, &y)) return NULL;
    const size_t n = (size_t)ids.len / sizeof(int64_t);
    const int fits = (size_t)ids.len == n * sizeof(int64_t) && (size_t)y.len == n * l->ins * sizeof(float);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < n; i++) {
            const int64_t id = ((const int64_t *)ids.buf)[i];
            if (id >= first && id - first < l->outs)
                fd_linear_row(l, (uint32_t)(id - first), (float *)y.buf + i * l->ins);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&ids);
    PyBuffer_Release(&y);
    if (!fits) return PyErr_Format(PyExc_ValueError, "ids and y are not int64 [n] and fp32 [n, %u]", l->ins);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"wants_signed", linear_wants_signed, METH_NOARGS | METH_STATIC,
     "wants_signed(): whether rotated matrices of 8 bits are stored as signed numbers, with negated sums."},
    {"run", (PyCFunction)linear_run, METH_VARARGS,
     "run(x, y, threads, width=outs, first=0): y [rows, first:first+outs of width] = x [rows, ins] W^T + b."},
    {"read_rows", (PyCFunction)linear_read_rows, METH_VARARGS,
     "read_rows(ids, first, y): y [n, ins] gets the rows ids [n] - first of W, as far as W has such rows."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getset[] = {
    {"isa", (getter)linear_isa, NULL, "The ISA of the kernels.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "A quantised matrix (fd_linear_t)."},
    {Py_tp_new, linear_new},
    {Py_tp_dealloc, linear_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "fastdecode.kernels._native.QuantisedLinear",
    .basicsize = sizeof(linear_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

static int multiply(const void *linear, const void *x, size_t rows, void *y, size_t stride, unsigned threads) {
    const linear_t *self = linear;
    return fd_linear_run(&self->linear, self->isa, x, (uint32_t)rows, y, (uint32_t)stride, threads);
}

int fd_py_quantised_product(PyObject *o, uint32_t act, fd_product_t *product) {
    if (act != FD_ACT_FP32 || Py_TYPE(o)->tp_dealloc != (destructor)linear_dealloc) return 0;
    const fd_linear_t *l = &((linear_t *)o)->linear;
    *product = (fd_product_t){l->ins, l->outs, multiply, o};
    return 1;
}

int fd_linears_add_types(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    const int error = type ? PyModule_AddObjectRef(module, "QuantisedLinear", type) : -1;
    Py_XDECREF(type);
    return error;
}
