/* DeltaRows: fd_delta_t for Python. Tensors are given as addresses; fastdecode/spart/states/delta_rows.py checks them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "py_object.h"
#include "py_products.h"

typedef struct {
    fd_py_kernels_t head;
    const fd_delta_ops_t *ops;
    fd_delta_t block;
    uint32_t act_dtype;
} delta_t;

static PyObject *delta_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", "sizes", "kernel", "layout", "parameters", "eps", "unit_eps", NULL};
    unsigned act_dtype;
    fd_delta_t d;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I(nnnn)n((nn)(nn)(nn)(nn)(nn)(nn))(KKKK)ff", keys, &act_dtype,
                                     &d.k_heads, &d.v_heads, &d.k_size, &d.v_size, &d.kernel, &d.q.first, &d.q.step,
                                     &d.k.first, &d.k.step, &d.v.first, &d.v.step, &d.z.first, &d.z.step, &d.beta.first,
                                     &d.beta.step, &d.decay.first, &d.decay.step, FD_ADDRESS(d.conv),
                                     FD_ADDRESS(d.rate), FD_ADDRESS(d.bias), FD_ADDRESS(d.norm), &d.eps, &d.unit_eps) ||
        !fd_py_choose_isa(NULL, &isa))
        return NULL;
    const fd_delta_ops_t *ops = fd_delta_ops(isa, act_dtype);
    if (!ops) return PyErr_Format(PyExc_ValueError, "%s has no delta rule for this dtype", fd_isa_name(isa));
    delta_t *self = (delta_t *)type->tp_alloc(type, 0);
    if (self) self->ops = ops, self->head.isa = ops->isa, self->block = d, self->act_dtype = act_dtype;
    return (PyObject *)self;
}

const fd_delta_t *fd_py_delta(PyObject *o, uint32_t act, const fd_delta_ops_t **ops) {
    const delta_t *self = (delta_t *)o;
    if (Py_IS_TYPE(o, fd_py_delta_type) && self->act_dtype == act) {
        *ops = self->ops;
        return &self->block;
    }
    PyErr_SetString(PyExc_TypeError, "not DeltaRows of the activation dtype");
    return NULL;
}

static PyObject *advance(delta_t *self, PyObject *args) {
    fd_delta_rows_t r;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KnKKK(KKKnKn)I", FD_ADDRESS(r.y), &r.y_stride, FD_ADDRESS(r.out), FD_ADDRESS(r.inputs),
                          FD_ADDRESS(r.sums), FD_ADDRESS(r.rows), FD_ADDRESS(r.sources), FD_ADDRESS(r.targets), &r.n,
                          FD_ADDRESS(r.spans), &r.n_spans, &threads))
        return NULL;
    r.scratch = PyMem_RawMalloc(fd_delta_scratch(&self->block, r.n) * sizeof *r.scratch);
    if (!r.scratch) return PyErr_NoMemory();
    fd_status_t status;
    FD_WITHOUT_GIL(status = fd_delta_rows(self->ops, &self->block, &r, threads));
    PyMem_RawFree(r.scratch);
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"advance", (PyCFunction)advance, METH_VARARGS, "Advance states by rows (fd_delta_rows_t)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_delta_spec, "fastdecode.kernels._native.DeltaRows", delta_t,
           {Py_tp_doc, "The gated delta rule of a block (delta.h)."}, {Py_tp_new, delta_new}, {Py_tp_methods, methods},
           {Py_tp_members, fd_py_isa_member});
