/* ExpertOps: fd_experts_t for Python. It keeps the objects of the products. Tensors are given as addresses;
 * fastdecode/spart/decoder/experts.py checks and keeps them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decoder/experts.h"
#include "py_object.h"
#include "py_products.h"

typedef struct {
    PyObject_HEAD
    fd_experts_t experts;
    fd_expert_t *each;
    PyObject *products; /* the experts as they were given */
} experts_t;

static bool alike(const fd_products_t *p, const fd_products_t *q) {
    bool are = p->n == q->n;
    for (uint32_t i = 0; are && i < p->n; i++) are = p->parts[i].outs == q->parts[i].outs;
    return are;
}

static bool read_expert(const fd_experts_t *e, PyObject *o, fd_expert_t *expert) {
    PyObject *up, *down;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "an expert is a tuple");
    if (!PyArg_ParseTuple(o, "OO", &up, &down) ||
        !fd_py_products(up, e->act_dtype, e->hidden, 2 * e->inner, &expert->up) ||
        !fd_py_products(down, e->act_dtype, e->inner, e->hidden, &expert->down))
        return false;
    return (alike(&expert->up, &e->experts->up) && alike(&expert->down, &e->experts->down)) ||
           FD_PY_FAIL(PyExc_ValueError, "the experts' linears are not alike");
}

static bool can_choose(const fd_router_t *r) {
    const size_t most = FD_MOST_GROUPS;
    if (!r->groups || r->groups > most || r->n % r->groups || r->used_groups > r->groups) return false;
    const size_t size = r->n / r->groups;
    return r->group_best && r->group_best <= fd_min(most, size) && r->used && r->used <= size * r->used_groups;
}

static PyObject *experts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", "hidden", "inner",  "gelu", "alpha",   "limit",
                           "weights",   "choice", "scores", "load", "experts", NULL};
    fd_experts_t e = {0};
    fd_router_t *r = &e.router;
    PyObject *experts;
    fd_isa_t isa;
    int gelu, single, sigmoid;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Innpff(KKKK)(nnnn)(fffpp)KO!", keys, &e.act_dtype, &e.hidden,
                                     &e.inner, &gelu, &e.alpha, &e.limit, FD_ADDRESS(r->weight), FD_ADDRESS(r->bias),
                                     FD_ADDRESS(r->correction), FD_ADDRESS(r->expert_scale), &r->used, &r->groups,
                                     &r->used_groups, &r->group_best, &r->output_scale, &r->least_sum, &r->scale,
                                     &single, &sigmoid, FD_ADDRESS(e.load), &PyTuple_Type, &experts) ||
        !fd_py_choose_isa(NULL, &isa))
        return NULL;
    const size_t most = 1u << 24, n = (size_t)PyTuple_GET_SIZE(experts);
    e.gelu = gelu, r->single = single, r->sigmoid = sigmoid;
    r->n = n, r->width = e.hidden;
    e.ops = r->ops = fd_row_ops(isa, e.act_dtype);
    if (!e.ops) return PyErr_Format(PyExc_ValueError, "%s has no row operations for this dtype", fd_isa_name(isa));
    if (!e.hidden || !e.inner || e.hidden > most || e.inner > most || !can_choose(r))
        return PyErr_Format(PyExc_ValueError, "no such mixture");
    experts_t *self = (experts_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    e.experts = self->each = PyMem_Calloc(n, sizeof *self->each);
    self->experts = e;
    self->products = Py_NewRef(experts);
    if (!self->each) PyErr_NoMemory();
    for (size_t i = 0; self->each && i < n; i++)
        if (!read_expert(&e, PyTuple_GET_ITEM(experts, i), &self->each[i])) break;
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void experts_dealloc(experts_t *self) {
    PyMem_Free(self->each);
    Py_XDECREF(self->products);
    fd_py_free(self);
}

const fd_experts_t *fd_py_experts(PyObject *o) {
    if (Py_IS_TYPE(o, fd_py_experts_type)) return &((experts_t *)o)->experts;
    PyErr_SetString(PyExc_TypeError, "not an ExpertOps");
    return NULL;
}

static PyObject *experts_run(experts_t *self, PyObject *args) {
    fd_expert_rows_t r;
    unsigned threads;
    fd_status_t status = FD_INTERNAL;
    if (!PyArg_ParseTuple(args, "KKKnI", FD_ADDRESS(r.x), FD_ADDRESS(r.router_x), FD_ADDRESS(r.out), &r.rows, &threads))
        return NULL;
    void *scratch = PyMem_RawMalloc(fd_experts_scratch(&self->experts, r.rows));
    if (scratch) FD_WITHOUT_GIL(status = fd_experts_run(&self->experts, &r, scratch, threads ? threads : 1));
    PyMem_RawFree(scratch);
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)experts_run, METH_VARARGS, "The experts of a step's rows (fd_experts_run)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_experts_spec, "fastdecode.kernels._native.ExpertOps", experts_t,
           {Py_tp_doc, "The experts of a layer (experts.h)."}, {Py_tp_new, experts_new},
           {Py_tp_dealloc, experts_dealloc}, {Py_tp_methods, methods});
