/* Joints: fd_joints_t for Python. It keeps the objects of the products, and scratch for the rows of a step. Tensors are
 * given as addresses; fastdecode/spart/decoder/joints.py checks and keeps them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "region/spart_layers.h"
#include "decoder/joint.h"
#include "py_object.h"
#include "py_products.h"
#include "py_reduction.h"

enum { MOST = 1 << 24 }; /* of each size */

typedef struct {
    PyObject_HEAD
    fd_joints_t joints;
    fd_joint_layer_t *layers;
    PyObject *products;  /* the layers as they were given */
    PyObject *reduction; /* the RankReduction, or None */
    void *scratch;
    size_t scratch_rows;
} joints_t;

static bool read_mlp(const fd_joints_t *j, PyObject *o, fd_joint_layer_t *layer) {
    PyObject *up, *down;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "an MLP is a tuple");
    if (!PyArg_ParseTuple(o, "nOO", &layer->inner, &up, &down)) return false;
    if (!layer->inner || layer->inner > MOST) return FD_PY_FAIL(PyExc_ValueError, "no such MLP");
    return fd_py_products(up, j->act_dtype, j->hidden, 2 * layer->inner, &layer->up) &&
           fd_py_products(down, j->act_dtype, layer->inner, j->hidden, &layer->down);
}

static bool read_experts(const fd_joints_t *j, PyObject *o, fd_joint_layer_t *layer) {
    layer->experts = fd_py_experts(o);
    if (!layer->experts) return false;
    return (layer->experts->hidden == j->hidden && layer->experts->act_dtype == j->act_dtype) ||
           FD_PY_FAIL(PyExc_ValueError, "the experts have other rows");
}

static bool read_layer(const fd_joints_t *j, PyObject *o, fd_joint_layer_t *layer) {
    const uint32_t act = j->act_dtype;
    PyObject *qkv, *out, *mlp, *experts;
    int second_rope;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "a layer is a tuple");
    if (!PyArg_ParseTuple(o, "KKKKKKpOOOO", FD_ADDRESS(layer->attention_norm), FD_ADDRESS(layer->mlp_norm),
                          FD_ADDRESS(layer->q_norm), FD_ADDRESS(layer->k_norm), FD_ADDRESS(layer->attention_post_norm),
                          FD_ADDRESS(layer->mlp_post_norm), &second_rope, &qkv, &out, &mlp, &experts))
        return false;
    layer->second_rope = second_rope;
    const size_t q = j->q_heads * j->head_size, kv = j->kv_heads * j->head_size;
    return fd_py_products(qkv, act, j->hidden, q + 2 * kv, &layer->qkv) &&
           fd_py_products(out, act, q, j->hidden, &layer->o) && (mlp == Py_None || read_mlp(j, mlp, layer)) &&
           (experts == Py_None || read_experts(j, experts, layer)) &&
           (layer->inner || layer->experts || FD_PY_FAIL(PyExc_ValueError, "a layer has neither MLP nor experts"));
}

static PyObject *joints_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype",      "hidden", "q_heads",     "kv_heads", "head_size", "eps",
                           "residual_scale", "gelu",   "whole_norms", "layers",   "reduction", NULL};
    fd_joints_t j = {0};
    PyObject *layers, *reduction;
    fd_isa_t isa;
    int gelu, whole_norms;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "InnnnffppO!O", keys, &j.act_dtype, &j.hidden, &j.q_heads,
                                     &j.kv_heads, &j.head_size, &j.eps, &j.scale, &gelu, &whole_norms, &PyTuple_Type,
                                     &layers, &reduction) ||
        !fd_py_choose_isa(NULL, &isa) || (reduction != Py_None && !(j.reduction = fd_py_reduction(reduction))))
        return NULL;
    j.gelu = gelu, j.whole_norms = whole_norms;
    j.ops = fd_row_ops(isa, j.act_dtype);
    if (!j.ops) return PyErr_Format(PyExc_ValueError, "%s has no row operations for this dtype", fd_isa_name(isa));
    if (!j.hidden || !j.q_heads || !j.kv_heads || !j.head_size || j.hidden > MOST || j.q_heads > MOST ||
        j.kv_heads > MOST || j.head_size > MOST || !PyTuple_GET_SIZE(layers))
        return PyErr_Format(PyExc_ValueError, "no such model");
    joints_t *self = (joints_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    const size_t n = (size_t)PyTuple_GET_SIZE(layers);
    self->layers = PyMem_Calloc(n, sizeof *self->layers);
    j.number_bytes = fd_act_bytes(j.act_dtype), j.n_layers = n, j.layers = self->layers;
    self->joints = j;
    self->products = Py_NewRef(layers);
    self->reduction = Py_NewRef(reduction);
    if (!self->layers) PyErr_NoMemory();
    for (size_t i = 0; self->layers && i < n; i++) {
        if (!read_layer(&self->joints, PyTuple_GET_ITEM(layers, i), &self->layers[i])) break;
        self->joints.inner = fd_max(self->joints.inner, self->layers[i].inner);
    }
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void joints_dealloc(joints_t *self) {
    PyMem_Free(self->layers);
    PyMem_RawFree(self->scratch);
    Py_XDECREF(self->products);
    Py_XDECREF(self->reduction);
    fd_py_free(self);
}

/* The rows of a step, and the threads that compute them. */
typedef struct {
    fd_joint_rows_t rows;
    unsigned threads;
} step_t;

/* Reads x, o, q, q_stride, kv, kv_stride, angles, second angles, pairs, rows, threads, and makes room for
 * the rows. */
static bool read_step(joints_t *self, PyObject *tuple, step_t *step) {
    fd_joint_rows_t *r = &step->rows;
    Py_ssize_t rows;
    if (!PyArg_ParseTuple(tuple, "KKKnKn(KKKK)(KKKK)nnI", FD_ADDRESS(r->x), FD_ADDRESS(r->o), FD_ADDRESS(r->q),
                          &r->q_stride, FD_ADDRESS(r->kv), &r->kv_stride, FD_ANGLES(r->angles),
                          FD_ANGLES(r->second_angles), &r->pairs, &rows, &step->threads))
        return false;
    if (rows < 0) return FD_PY_FAIL(PyExc_ValueError, "%zd rows", rows);
    r->rows = (size_t)rows;
    if (r->rows > self->scratch_rows) {
        PyMem_RawFree(self->scratch);
        self->scratch = PyMem_RawMalloc(fd_joint_scratch(&self->joints, r->rows));
        self->scratch_rows = self->scratch ? r->rows : 0;
    }
    if (rows && !self->scratch) return PyErr_NoMemory() != NULL;
    if (!step->threads) step->threads = 1;
    return true;
}

static fd_status_t run_joint(const joints_t *self, size_t layer, const step_t *step) {
    if (!step->rows.rows) return FD_OK;
    return fd_joint_run(&self->joints, layer, &step->rows, self->scratch, step->threads);
}

/* Raises the exception of a joint that has failed; returns NULL. */
static PyObject *raise_failed(const joints_t *self, fd_status_t status) {
    return status == FD_LINK_CLOSED ? fd_py_raise_broken(self->joints.reduction) : PyErr_NoMemory();
}

static PyObject *joints_run(joints_t *self, PyObject *args) {
    Py_ssize_t layer;
    PyObject *tuple;
    step_t step;
    if (!PyArg_ParseTuple(args, "nO!", &layer, &PyTuple_Type, &tuple) || !read_step(self, tuple, &step)) return NULL;
    if (layer < 0 || (size_t)layer > self->joints.n_layers)
        return PyErr_Format(PyExc_ValueError, "no joint %zd", layer);
    fd_status_t status;
    FD_WITHOUT_GIL(status = run_joint(self, (size_t)layer, &step));
    if (status != FD_OK) return raise_failed(self, status);
    Py_RETURN_NONE;
}

/* The S-Part's layers of one step: its joints, and the attention of its prompts. */
typedef struct {
    fd_spart_layers_t contract; /* what the capsule points to */
    joints_t *joints;
    step_t step;
    fd_prompt_chunks_t *prompts; /* or NULL */
    fd_status_t status;          /* of the last function */
} spart_layers_t;

static int compute_rows(void *self, uint32_t layer) {
    spart_layers_t *s = self;
    s->status = FD_INTERNAL;
    if (layer > s->joints->joints.n_layers || s->step.rows.rows > s->joints->scratch_rows) return -1;
    s->status = run_joint(s->joints, layer, &s->step);
    return s->status == FD_OK ? 0 : -1;
}

static int attend_prompts(void *self, uint32_t layer) {
    spart_layers_t *s = self;
    s->status = FD_INTERNAL;
    if (layer >= s->prompts->n_layers) return -1;
    s->status = fd_prompt_chunks_attend(s->prompts, layer, &s->joints->joints, &s->step.rows, s->step.threads);
    return s->status == FD_OK ? 0 : -1;
}

static void raise_last(void *self) {
    const spart_layers_t *s = self;
    raise_failed(s->joints, s->status);
}

static void spart_layers_free(spart_layers_t *s) {
    Py_DECREF(s->joints);
    PyMem_Free(s->prompts);
    PyMem_Free(s);
}

static void capsule_free(PyObject *capsule) { spart_layers_free(PyCapsule_GetContext(capsule)); }

static PyObject *joints_spart_layers(joints_t *self, PyObject *args) {
    PyObject *step, *prompts, *capsule = NULL;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &step, &prompts)) return NULL;
    spart_layers_t *s = PyMem_Calloc(1, sizeof *s);
    if (!s) return PyErr_NoMemory();
    s->contract = (fd_spart_layers_t){compute_rows, NULL, raise_last, s};
    s->joints = (joints_t *)Py_NewRef(self);
    bool good = read_step(self, step, &s->step);
    if (good && prompts != Py_None) {
        s->prompts = fd_py_prompt_chunks(prompts, self->joints.act_dtype, &self->joints, s->step.rows.rows);
        s->contract.compute_meanwhile = attend_prompts;
        good = s->prompts != NULL;
    }
    if (good) capsule = PyCapsule_New(&s->contract, FD_SPART_LAYERS_CAPSULE, capsule_free);
    if (capsule) PyCapsule_SetContext(capsule, s);
    else spart_layers_free(s);
    return capsule;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)joints_run, METH_VARARGS,
     "Finish a block of a step's rows and project the next one (fd_joint_run)."},
    {"spart_layers", (PyCFunction)joints_spart_layers, METH_VARARGS,
     "The capsule of spart_layers.h for the rows of a step."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_joints_spec, "fastdecode.kernels._native.Joints", joints_t,
           {Py_tp_doc, "What an S-Part computes between the attention of two layers (joint.h)."},
           {Py_tp_new, joints_new}, {Py_tp_dealloc, joints_dealloc}, {Py_tp_methods, methods});
