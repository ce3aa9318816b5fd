/* RankReduction: fd_reduction_t for Python. Numbers are given by their address; their tensor is checked by
 * fastdecode/spart/ranks/reduction.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_object.h"
#include "py_reduction.h"

static PyObject *rank_error; /* RankError */

typedef struct {
    PyObject_HEAD
    fd_reduction_t reduction;
    Py_buffer segment;
} reduction_t;

fd_reduction_t *fd_py_reduction(PyObject *o) {
    if (Py_TYPE(o) == fd_py_reduction_type) return &((reduction_t *)o)->reduction;
    PyErr_SetString(PyExc_TypeError, "not a RankReduction");
    return NULL;
}

PyObject *fd_py_raise_broken(const fd_reduction_t *r) {
    char text[128] = "the reduction is broken";
    fd_reduction_error(r, text, sizeof text);
    PyErr_SetString(rank_error, text);
    return NULL;
}

static PyObject *segment_bytes(PyObject *type, PyObject *args) {
    unsigned n_ranks;
    if (!PyArg_ParseTuple(args, "I", &n_ranks)) return NULL;
    const size_t bytes = fd_reduction_segment_bytes(n_ranks);
    if (!bytes) return PyErr_Format(PyExc_ValueError, "%u ranks are not within 1..%u", n_ranks, FD_MOST_RANKS);
    return PyLong_FromSize_t(bytes);
}

static PyObject *reduction_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"segment", "rank", "n_ranks", "limit", NULL};
    PyObject *segment;
    unsigned rank, n_ranks;
    double limit;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIId", keys, &segment, &rank, &n_ranks, &limit) ||
        !fd_py_choose_isa(NULL, &isa))
        return NULL;
    const size_t bytes = fd_reduction_segment_bytes(n_ranks);
    if (rank >= n_ranks || !bytes) return PyErr_Format(PyExc_ValueError, "no rank %u of %u", rank, n_ranks);
    if (!(limit > 0 && limit < 1e9)) return PyErr_Format(PyExc_ValueError, "no such time limit");
    reduction_t *self = (reduction_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    if (!fd_py_bytes(segment, "the segment", PyBUF_WRITABLE, bytes, &self->segment)) {
        Py_DECREF(self);
        return NULL;
    }
    fd_reduction_open(&self->reduction, self->segment.buf, rank, n_ranks, (uint64_t)(limit * 1e9), isa);
    return (PyObject *)self;
}

static void reduction_dealloc(reduction_t *self) {
    PyBuffer_Release(&self->segment);
    fd_py_free(self);
}

static PyObject *sum(reduction_t *self, PyObject *args) {
    void *data;
    Py_ssize_t n;
    unsigned act_dtype, threads;
    if (!PyArg_ParseTuple(args, "KnII", FD_ADDRESS(data), &n, &act_dtype, &threads)) return NULL;
    if (n < 0 || act_dtype >= FD_ACT_DTYPES) return PyErr_Format(PyExc_ValueError, "no such numbers");
    fd_status_t status;
    FD_WITHOUT_GIL(status = fd_reduction_sum(&self->reduction, data, (size_t)n, act_dtype, threads ? threads : 1));
    if (status != FD_OK) return fd_py_raise_broken(&self->reduction);
    Py_RETURN_NONE;
}

static PyObject *look(reduction_t *self, PyObject *args) {
    unsigned rank;
    if (!PyArg_ParseTuple(args, "I", &rank)) return NULL;
    if (rank >= self->reduction.n_ranks) return PyErr_Format(PyExc_ValueError, "no rank %u", rank);
    if (!fd_reduction_look(&self->reduction, rank)) return fd_py_raise_broken(&self->reduction);
    Py_RETURN_NONE;
}

static PyObject *fault(reduction_t *self, PyObject *unused) {
    char text[128];
    if (!fd_reduction_error(&self->reduction, text, sizeof text)) Py_RETURN_NONE;
    return PyUnicode_FromString(text);
}

static PyObject *leave(reduction_t *self, PyObject *unused) {
    fd_reduction_leave(&self->reduction);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"segment_bytes", segment_bytes, METH_VARARGS | METH_STATIC, "Bytes of the segment of some ranks."},
    {"sum", (PyCFunction)sum, METH_VARARGS, "Sum numbers over all ranks (fd_reduction_sum)."},
    {"look", (PyCFunction)look, METH_VARARGS, "Look at a rank that is waited for (fd_reduction_look)."},
    {"fault", (PyCFunction)fault, METH_NOARGS, "Why the reduction is broken, or None (fd_reduction_error)."},
    {"leave", (PyCFunction)leave, METH_NOARGS, "Let all other ranks out (fd_reduction_leave)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_reduction_spec, "fastdecode.kernels._native.RankReduction", reduction_t,
           {Py_tp_doc, "A rank's end of the sums over a tensor-parallel S-Part's ranks (reduction.h)."},
           {Py_tp_new, reduction_new}, {Py_tp_dealloc, reduction_dealloc}, {Py_tp_methods, methods});

bool fd_reduction_add_names(PyObject *module) {
    rank_error = PyErr_NewExceptionWithDoc("fastdecode.kernels._native.RankError",
                                           "A rank of a tensor-parallel S-Part does not take part any more.",
                                           PyExc_RuntimeError, NULL);
    return rank_error && PyModule_AddObjectRef(module, "RankError", rank_error) == 0;
}
