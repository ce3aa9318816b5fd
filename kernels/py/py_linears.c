/* QuantisedLinear: fd_linear_t for Python. It keeps the buffers that hold the weights. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linears/linear.h"
#include "py_object.h"
#include "py_products.h"

enum { WEIGHTS, SCALES, UNITS, MINS, BIAS, TABLE, NEGATED_SUMS, BUFFERS };

typedef struct {
    fd_py_kernels_t head;
    fd_linear_t linear;
    const fd_linear_ops_t *ops;
    Py_buffer buffers[BUFFERS]; /* obj NULL: not given */
} linear_t;

/* Takes the buffers of a matrix. Those from MINS on may be None. */
static bool take_buffers(linear_t *self, PyObject *const *o) {
    static const char *const names[BUFFERS] = {"weights", "scales", "units", "mins", "bias", "table", "negated_sums"};
    const fd_linear_t *l = &self->linear;
    const size_t tiles = fd_linear_tiles(l), lanes = tiles * FD_LINEAR_LANES;
    const size_t sizes[BUFFERS] = {
        [WEIGHTS] = tiles * fd_linear_tile_bytes(l),
        [SCALES] = lanes * l->groups * 2,
        [UNITS] = lanes * sizeof(float),
        [MINS] = lanes * l->groups * 2,
        [BIAS] = lanes * sizeof(float),
        [TABLE] = FD_LINEAR_CODES,
        [NEGATED_SUMS] = lanes * fd_linear_blocks(l) * 2,
    };
    for (int i = 0; i < BUFFERS; i++)
        if ((i < MINS || o[i] != Py_None) && !fd_py_bytes(o[i], names[i], 0, sizes[i], &self->buffers[i])) return false;
    return true;
}

/* Whether the given buffers are what the kernels take. */
static bool check_buffers(const linear_t *self) {
    const fd_linear_t *l = &self->linear;
    const bool is_signed = l->hadamard && l->bits == 8 && self->ops->wants_signed;
    if (is_signed != (l->negated_sums != NULL))
        return FD_PY_FAIL(PyExc_ValueError, "negated_sums are %s", is_signed ? "missing" : "not wanted");
    bool fits = !l->table || l->bits == 4; /* the kernels sum a table's numbers in few bits */
    for (int i = 0; l->table && i < FD_LINEAR_CODES; i++) fits &= l->table[i] <= FD_LINEAR_MOST_IN_TABLE;
    return fits ||
           FD_PY_FAIL(PyExc_ValueError, "a table is for 4 bits and has numbers up to %d", FD_LINEAR_MOST_IN_TABLE);
}

static PyObject *linear_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"outs",   "ins",   "bits", "group", "zero",  "passes",       "hadamard", "weights",
                           "scales", "units", "mins", "bias",  "table", "negated_sums", NULL};
    unsigned outs, ins, bits, group, passes;
    int zero, hadamard;
    PyObject *o[BUFFERS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIIIiIpOOOOOOO", keys, &outs, &ins, &bits, &group, &zero, &passes,
                                     &hadamard, &o[WEIGHTS], &o[SCALES], &o[UNITS], &o[MINS], &o[BIAS], &o[TABLE],
                                     &o[NEGATED_SUMS]))
        return NULL;
    const unsigned most = 1u << 24;
    if (!outs || !ins || outs > most || ins > most || !group || group > most || group % FD_LINEAR_BLOCK ||
        (bits != 4 && bits != 8) || zero < 0 || zero > 255 || passes < 1 || passes > 2)
        return PyErr_Format(PyExc_ValueError, "no such linear: %u x %u, %u bits, groups of %u", outs, ins, bits, group);
    if (hadamard && (passes != 1 || (bits == 8 && (zero != 128 || o[MINS] != Py_None))))
        return PyErr_Format(PyExc_ValueError,
                            "a Hadamard transform has one pass, and with 8 bits the zero 128 and no mins");
    fd_isa_t isa;
    if (!fd_py_choose_isa(NULL, &isa)) return NULL;
    linear_t *self = (linear_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->ops = fd_linear_ops(isa), self->head.isa = self->ops->isa;
    fd_linear_t *l = &self->linear;
    *l = (fd_linear_t){.outs = outs, .ins = ins, .bits = bits, .passes = passes, .hadamard = hadamard, .zero = zero};
    l->group_blocks = group / FD_LINEAR_BLOCK;
    l->groups = (ins + group - 1) / group;
    const bool taken = take_buffers(self, o);
    l->weights = self->buffers[WEIGHTS].buf;
    l->scales = self->buffers[SCALES].buf;
    l->units = self->buffers[UNITS].buf;
    l->mins = self->buffers[MINS].buf;
    l->bias = self->buffers[BIAS].buf;
    l->table = self->buffers[TABLE].buf;
    l->negated_sums = self->buffers[NEGATED_SUMS].buf;
    if (taken && check_buffers(self)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void linear_dealloc(linear_t *self) {
    for (int i = 0; i < BUFFERS; i++) PyBuffer_Release(&self->buffers[i]);
    fd_py_free(self);
}

static PyObject *linear_run(linear_t *self, PyObject *args) {
    Py_buffer x, y;
    const fd_linear_t *l = &self->linear;
    unsigned threads, width = l->outs, first = 0;
    if (!PyArg_ParseTuple(args, "y*w*I|II", &x, &y, &threads, &width, &first)) return NULL;
    const size_t row = l->ins * sizeof(float), rows = (size_t)x.len / row;
    fd_status_t status = FD_OK;
    const int fits = (size_t)x.len == rows * row && rows >> 24 == 0 && width >= l->outs && first <= width - l->outs &&
                     (size_t)y.len == rows * width * sizeof(float);
    if (fits && rows) {
        const fd_linear_task_t task = {l, x.buf, (float *)y.buf + first, rows};
        FD_WITHOUT_GIL(status = fd_linear_run(self->ops, &task, 1, width, threads ? threads : 1));
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "x and y are not [rows, %u] and [rows, %u] fp32, or outputs %u to %u are not all "
                            "among the latter",
                            l->ins, width, first, first + l->outs);
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
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
     "Whether transformed matrices of 8 bits are stored as signed numbers, with negated sums."},
    {"run", (PyCFunction)linear_run, METH_VARARGS, "Columns of y [rows, width] = x [rows, ins] W^T + b."},
    {"read_rows", (PyCFunction)linear_read_rows, METH_VARARGS, "Copy rows of W, as far as W has them."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_linear_spec, "fastdecode.kernels._native.QuantisedLinear", linear_t,
           {Py_tp_doc, "A quantised matrix (fd_linear_t)."}, {Py_tp_new, linear_new}, {Py_tp_dealloc, linear_dealloc},
           {Py_tp_methods, methods}, {Py_tp_members, fd_py_isa_member});

static fd_status_t multiply(const void *ops, const fd_linear_task_t *tasks, size_t n, size_t stride, unsigned threads) {
    return fd_linear_run(ops, tasks, n, (uint32_t)stride, threads);
}

bool fd_py_quantised_product(PyObject *o, uint32_t act, fd_product_t *product) {
    if (act != FD_ACT_FP32 || !Py_IS_TYPE(o, fd_py_linear_type)) return false;
    const linear_t *self = (linear_t *)o;
    *product = (fd_product_t){self->linear.ins, self->linear.outs, multiply, self->ops, &self->linear};
    return true;
}
