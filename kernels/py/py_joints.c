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
    fd_latent_t *latents; /* [n_layers] */
    fd_state_block_t *states;
    fd_states_t *memory; /* [n_states]: the states of the last step's pool, which all steps share */
    PyObject *products;  /* the layers and the last states as they were given */
    PyObject *reduction; /* the RankReduction, or None */
    bool has_parts;      /* some layer adds a part of the per-layer embedding */
    void *scratch;
    size_t scratch_bytes;
} joints_t;

static bool widen(fd_joints_t *j, size_t width) {
    j->widest = fd_max(j->widest, width);
    return true;
}

static bool read_mlp(fd_joints_t *j, PyObject *o, fd_feed_forward_t *f) {
    PyObject *up, *down;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "an MLP is a tuple");
    if (!PyArg_ParseTuple(o, "nOO", &f->inner, &up, &down)) return false;
    if (!f->inner || f->inner > MOST) return FD_PY_FAIL(PyExc_ValueError, "no such MLP");
    return fd_py_products(up, j->act_dtype, j->hidden, 2 * f->inner, &f->up) &&
           fd_py_products(down, j->act_dtype, f->inner, j->hidden, &f->down) && widen(j, 2 * f->inner);
}

static bool read_experts(const fd_joints_t *j, PyObject *o, fd_feed_forward_t *f) {
    f->experts = fd_py_experts(o);
    if (!f->experts) return false;
    return (f->experts->hidden == j->hidden && f->experts->act_dtype == j->act_dtype) ||
           FD_PY_FAIL(PyExc_ValueError, "the experts have other rows");
}

static bool read_feed_forward(fd_joints_t *j, PyObject *o, fd_feed_forward_t *f) {
    PyObject *mlp, *experts;
    fd_mixture_norms_t *n = &f->norms;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "an MLP and experts are a tuple");
    if (!PyArg_ParseTuple(o, "KKOOK(KKKK)", FD_ADDRESS(f->norm), FD_ADDRESS(f->post_norm), &mlp, &experts,
                          FD_ADDRESS(f->shared_gate), FD_ADDRESS(n->router), FD_ADDRESS(n->experts),
                          FD_ADDRESS(n->experts_post), FD_ADDRESS(n->shared_post)))
        return false;
    if ((mlp != Py_None && !read_mlp(j, mlp, f)) || (experts != Py_None && !read_experts(j, experts, f))) return false;
    if (!f->experts && (!f->inner || f->shared_gate)) return FD_PY_FAIL(PyExc_ValueError, "a block has no MLP");
    return !n->experts || (f->experts && f->inner && n->router) ||
           FD_PY_FAIL(PyExc_ValueError, "norms of a mixture without a shared expert");
}

static bool read_own_embedding(joints_t *self, PyObject *o, fd_own_embedding_t *own) {
    fd_joints_t *j = &self->joints;
    PyObject *gate, *out;
    self->has_parts = true;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "a part of the per-layer embedding is a tuple");
    if (!PyArg_ParseTuple(o, "nnOOK", &own->first, &own->size, &gate, &out, FD_ADDRESS(own->post_norm))) return false;
    if (!own->size || own->size > MOST) return FD_PY_FAIL(PyExc_ValueError, "no such part");
    return fd_py_products(gate, j->act_dtype, j->hidden, own->size, &own->gate) &&
           fd_py_products(out, j->act_dtype, own->size, j->hidden, &own->out) && widen(j, 2 * own->size);
}

static bool read_state(fd_joints_t *j, PyObject *o, fd_state_block_t *block) {
    PyObject *inputs, *out, *rule, *feed_forward;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "a block with a state is a tuple");
    if (!PyArg_ParseTuple(o, "KOOOO", FD_ADDRESS(block->norm), &inputs, &out, &rule, &feed_forward)) return false;
    block->rule = fd_py_delta(rule, j->act_dtype, &block->ops);
    if (!block->rule) return false;
    const size_t v_width = block->rule->v_heads * block->rule->v_size;
    const size_t width = fd_delta_channels(block->rule) + v_width + 2 * block->rule->v_heads;
    return fd_py_products(inputs, j->act_dtype, j->hidden, width, &block->inputs) &&
           fd_py_products(out, j->act_dtype, v_width, j->hidden, &block->out) && widen(j, width) &&
           read_feed_forward(j, feed_forward, &block->feed_forward);
}

/* Appends `blocks` to the joints' blocks with a state. The function returns false with an exception. */
static bool read_states(joints_t *self, PyObject *blocks) {
    const size_t n = (size_t)PyTuple_GET_SIZE(blocks);
    fd_joints_t *j = &self->joints;
    fd_state_block_t *states = n ? PyMem_Realloc(self->states, (j->n_states + n) * sizeof *states) : self->states;
    if (n && !states) return PyErr_NoMemory() != NULL;
    j->states = self->states = states;
    for (size_t i = 0; i < n; i++, j->n_states++) {
        states[j->n_states] = (fd_state_block_t){0};
        if (!read_state(j, PyTuple_GET_ITEM(blocks, i), &states[j->n_states])) return false;
    }
    return true;
}

/* Reads latent attention and the linears before and behind it. */
static bool read_latent(fd_joints_t *j, PyObject *o, PyObject *inputs, PyObject *out, fd_joint_layer_t *layer,
                        fd_latent_t *l) {
    PyObject *q, *k, *v;
    int interleaved;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "latent attention is a tuple");
    if (!PyArg_ParseTuple(o, "nnnnnpfKKOOO", &l->k_size, &l->rope_size, &l->rank, &l->v_size, &l->q_rank, &interleaved,
                          &l->eps, FD_ADDRESS(l->q_norm), FD_ADDRESS(l->kv_norm), &q, &k, &v))
        return false;
    l->heads = layer->q_heads, l->interleaved = interleaved, layer->latent = l;
    if (l->k_size > MOST || l->rope_size > MOST || l->rank > MOST || l->v_size > MOST || l->q_rank > MOST ||
        layer->kv_heads != 1 || layer->head_size != l->rank + l->rope_size)
        return FD_PY_FAIL(PyExc_ValueError, "no such latent attention");
    l->k = fd_py_head_products(k, j->act_dtype);
    if (!l->k || !(l->v = fd_py_head_products(v, j->act_dtype))) return false;
    if (l->k->heads != l->heads || l->k->ins != l->k_size || l->k->outs != l->rank || l->v->heads != l->heads ||
        l->v->ins != l->rank || l->v->outs != l->v_size)
        return FD_PY_FAIL(PyExc_ValueError, "the heads have other matrices");
    const size_t q_width = l->heads * (l->k_size + l->rope_size);
    return (!l->q_rank || fd_py_products(q, j->act_dtype, l->q_rank, q_width, &l->q)) &&
           fd_py_products(inputs, j->act_dtype, j->hidden, fd_latent_inputs(l), &l->inputs) &&
           fd_py_products(out, j->act_dtype, l->heads * l->v_size, j->hidden, &layer->o) &&
           widen(j, fd_latent_widest(l));
}

static bool read_heads(fd_joints_t *j, PyObject *qkv, PyObject *out, fd_joint_layer_t *layer) {
    const size_t q = layer->q_heads * layer->head_size, kv = layer->kv_heads * layer->head_size;
    const size_t width = (j->output_gate ? 2 * q : q) + (layer->k_as_v ? kv : 2 * kv);
    return fd_py_products(qkv, j->act_dtype, j->hidden, width, &layer->qkv) &&
           fd_py_products(out, j->act_dtype, q, j->hidden, &layer->o) && widen(j, width);
}

static bool read_layer(joints_t *self, PyObject *o, fd_joint_layer_t *layer, fd_latent_t *latent) {
    fd_joints_t *j = &self->joints;
    PyObject *of_latent, *qkv, *out, *feed_forward, *own, *states;
    int second_rope, k_as_v;
    if (!PyTuple_Check(o)) return FD_PY_FAIL(PyExc_TypeError, "a layer is a tuple");
    if (!PyArg_ParseTuple(o, "(nnn)KKKKKppOOOOOKO!", &layer->q_heads, &layer->kv_heads, &layer->head_size,
                          FD_ADDRESS(layer->attention_norm), FD_ADDRESS(layer->attention_post_norm),
                          FD_ADDRESS(layer->q_norm), FD_ADDRESS(layer->k_norm), FD_ADDRESS(layer->v_norm), &second_rope,
                          &k_as_v, &of_latent, &qkv, &out, &feed_forward, &own, FD_ADDRESS(layer->factor),
                          &PyTuple_Type, &states))
        return false;
    layer->second_rope = second_rope, layer->k_as_v = k_as_v, layer->n_states = (size_t)PyTuple_GET_SIZE(states);
    if (!layer->q_heads || !layer->head_size || layer->q_heads > MOST || layer->kv_heads > MOST ||
        layer->head_size > MOST)
        return FD_PY_FAIL(PyExc_ValueError, "a layer has no such heads");
    return (of_latent == Py_None ? read_heads(j, qkv, out, layer)
                                 : read_latent(j, of_latent, qkv, out, layer, latent)) &&
           read_feed_forward(j, feed_forward, &layer->feed_forward) &&
           (own == Py_None || read_own_embedding(self, own, &layer->own)) && read_states(self, states);
}

static bool read_blocks(joints_t *self, PyObject *layers, PyObject *last_states) {
    const size_t n = (size_t)PyTuple_GET_SIZE(layers);
    self->joints.layers = self->layers = PyMem_Calloc(n, sizeof *self->layers);
    self->latents = PyMem_Calloc(n, sizeof *self->latents);
    if (!self->layers || !self->latents) return PyErr_NoMemory() != NULL;
    self->joints.n_layers = n;
    for (size_t i = 0; i < n; i++)
        if (!read_layer(self, PyTuple_GET_ITEM(layers, i), &self->layers[i], &self->latents[i])) return false;
    if (!read_states(self, last_states)) return false;
    self->memory = PyMem_Calloc(self->joints.n_states, sizeof *self->memory);
    return self->memory || PyErr_NoMemory() != NULL;
}

static PyObject *joints_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype",   "hidden", "eps",         "residual_scale", "gelu", "whole_norms",
                           "output_gate", "layers", "last_states", "reduction",      NULL};
    fd_joints_t j = {0};
    PyObject *layers, *last_states, *reduction;
    fd_isa_t isa;
    int gelu, whole_norms, output_gate;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "InffpppO!O!O", keys, &j.act_dtype, &j.hidden, &j.eps, &j.scale,
                                     &gelu, &whole_norms, &output_gate, &PyTuple_Type, &layers, &PyTuple_Type,
                                     &last_states, &reduction) ||
        !fd_py_choose_isa(NULL, &isa) || (reduction != Py_None && !(j.reduction = fd_py_reduction(reduction))))
        return NULL;
    j.gelu = gelu, j.whole_norms = whole_norms, j.output_gate = output_gate;
    j.ops = fd_row_ops(isa, j.act_dtype);
    if (!j.ops) return PyErr_Format(PyExc_ValueError, "%s has no row operations for this dtype", fd_isa_name(isa));
    if (!j.hidden || j.hidden > MOST || !PyTuple_GET_SIZE(layers))
        return PyErr_Format(PyExc_ValueError, "no such model");
    joints_t *self = (joints_t *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    j.number_bytes = fd_act_bytes(j.act_dtype), j.widest = j.hidden;
    self->joints = j;
    self->products = PyTuple_Pack(2, layers, last_states);
    self->reduction = Py_NewRef(reduction);
    if (self->products && read_blocks(self, layers, last_states)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void joints_dealloc(joints_t *self) {
    PyMem_Free(self->layers);
    PyMem_Free(self->latents);
    PyMem_Free(self->states);
    PyMem_Free(self->memory);
    PyMem_RawFree(self->scratch);
    Py_XDECREF(self->products);
    Py_XDECREF(self->reduction);
    fd_py_free(self);
}

/* The rows of a step, the scratch that they need, and the threads that compute them. */
typedef struct {
    fd_joint_rows_t rows;
    size_t scratch_bytes;
    unsigned threads;
} step_t;

/* Reads the addresses of the states, a tuple of those of inputs and sums of each block. */
static bool read_memory(joints_t *self, PyObject *addresses) {
    const size_t n = self->joints.n_states;
    if ((size_t)PyTuple_GET_SIZE(addresses) != 2 * n)
        return FD_PY_FAIL(PyExc_ValueError, "%zd addresses of states for %zu blocks", PyTuple_GET_SIZE(addresses), n);
    for (size_t i = 0; i < n; i++) {
        self->memory[i].inputs = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, 2 * i));
        self->memory[i].sums = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, 2 * i + 1));
    }
    return !PyErr_Occurred();
}

/* Reads x, o, o_stride, parts, parts_stride, gate, q, q_stride, kv, kv_stride, angles and pairs, the second ones,
 * states, the rows that advance them, rows, threads, and makes room for the rows. */
static bool read_step(joints_t *self, PyObject *tuple, step_t *step) {
    fd_joint_rows_t *r = &step->rows;
    Py_ssize_t rows;
    PyObject *states;
    if (!PyArg_ParseTuple(tuple, "KKnKnKKnKn(KKKK)n(KKKK)nO!(KKKnKn)nI", FD_ADDRESS(r->x), FD_ADDRESS(r->o),
                          &r->o_stride, FD_ADDRESS(r->parts), &r->parts_stride, FD_ADDRESS(r->gate), FD_ADDRESS(r->q),
                          &r->q_stride, FD_ADDRESS(r->kv), &r->kv_stride, FD_ANGLES(r->angles), &r->pairs,
                          FD_ANGLES(r->second_angles), &r->second_pairs, &PyTuple_Type, &states, FD_ADDRESS(r->singles),
                          FD_ADDRESS(r->sources), FD_ADDRESS(r->targets), &r->n_singles, FD_ADDRESS(r->spans),
                          &r->n_spans, &rows, &step->threads) ||
        !read_memory(self, states))
        return false;
    r->states = self->memory;
    if (rows < 0) return FD_PY_FAIL(PyExc_ValueError, "%zd rows", rows);
    if (rows && self->has_parts && !r->parts) return FD_PY_FAIL(PyExc_ValueError, "rows without a per-layer embedding");
    r->rows = (size_t)rows;
    step->scratch_bytes = fd_joint_scratch(&self->joints, r);
    if (step->scratch_bytes > self->scratch_bytes) {
        PyMem_RawFree(self->scratch);
        self->scratch = PyMem_RawMalloc(step->scratch_bytes);
        self->scratch_bytes = self->scratch ? step->scratch_bytes : 0;
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
    if (layer > s->joints->joints.n_layers || s->step.scratch_bytes > s->joints->scratch_bytes) return -1;
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
