/* PromptAttention: fd_prompt_ops_t for Python. Rows are given as addresses; spart/prefill/prompt_attention.py
 * checks their tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decoder/prompt.h"
#include "py_object.h"
#include "py_products.h"

typedef struct {
    fd_py_kernels_t head;
    const fd_prompt_ops_t *ops;
    uint32_t act; /* fd_act_dtype_t of the rows */
} prompt_attention_t;

static PyObject *prompt_attention_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", NULL};
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", keys, &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    const fd_prompt_ops_t *ops = fd_prompt_ops(isa, act_dtype);
    if (!ops) return PyErr_Format(PyExc_ValueError, "%s has no attention of prompts for this dtype", fd_isa_name(isa));
    prompt_attention_t *self = (prompt_attention_t *)type->tp_alloc(type, 0);
    if (self) self->ops = ops, self->act = act_dtype, self->head.isa = ops->isa;
    return (PyObject *)self;
}

static PyObject *supports(PyObject *type, PyObject *args) {
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTuple(args, "I", &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    return PyBool_FromLong(fd_prompt_ops(isa, act_dtype) != NULL);
}

static PyObject *block_words(prompt_attention_t *self, PyObject *args) {
    size_t k_size, v_size;
    if (!PyArg_ParseTuple(args, "nn", &k_size, &v_size)) return NULL;
    return PyLong_FromSize_t(self->ops->block_words(k_size, v_size));
}

static PyObject *pack(prompt_attention_t *self, PyObject *args) {
    fd_prompt_blocks_t b;
    fd_prompt_pack_t o = {.blocks = &b};
    unsigned threads;
    if (!PyArg_ParseTuple(args, "(Knnnn)KKnnnnnnI", FD_ADDRESS(b.words), &b.head_words, &b.kv_heads, &b.k_size,
                          &b.v_size, FD_ADDRESS(o.k), FD_ADDRESS(o.v), &o.pos, &o.n, &o.k_head, &o.k_row, &o.v_head,
                          &o.v_row, &threads))
        return NULL;
    FD_WITHOUT_GIL(fd_prompt_pack(self->ops, &o, threads));
    Py_RETURN_NONE;
}

static PyObject *attend(prompt_attention_t *self, PyObject *args) {
    fd_prompt_blocks_t b;
    fd_prompt_t o = {.blocks = &b};
    unsigned threads;
    if (!PyArg_ParseTuple(args, "(Knnnn)KKKnnnnnnnfI", FD_ADDRESS(b.words), &b.head_words, &b.kv_heads, &b.k_size,
                          &b.v_size, FD_ADDRESS(o.q), FD_ADDRESS(o.out), FD_ADDRESS(o.sinks), &o.q_row, &o.out_row,
                          &o.rows, &o.pos, &o.group, &o.window, &o.segment, &o.scale, &threads))
        return NULL;
    fd_status_t status;
    FD_WITHOUT_GIL(status = fd_prompt_attend(self->ops, &o, threads));
    if (status != FD_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- the prompts of a step ---- */

/* Why a chunk's tokens are not in the step or not in the blocks of a layer, or NULL. */
static const char *chunk_error(const fd_prompt_ops_t *ops, const fd_prompt_chunk_t *chunk, size_t rows,
                               const fd_prompt_layer_t *layer) {
    const fd_prompt_blocks_t *b = &layer->blocks;
    if (chunk->rows > rows || chunk->first > rows - chunk->rows) return "a chunk's rows are beyond the step's";
    const size_t tokens = b->head_words / ops->block_words(b->k_size, b->v_size) * FD_PROMPT_KEYS;
    if (chunk->rows > tokens || chunk->pos > tokens - chunk->rows) return "a chunk's tokens are beyond its blocks";
    return NULL;
}

static bool is_tuple(PyObject *o) {
    return PyTuple_Check(o) || FD_PY_FAIL(PyExc_TypeError, "prompts, their chunks and a chunk's layers are tuples");
}

static bool read_chunk(const fd_prompt_ops_t *ops, PyObject *o, const fd_joints_t *j, size_t rows,
                       fd_prompt_chunk_t *chunk, fd_prompt_layer_t *layers) {
    Py_ssize_t first, n, pos;
    PyObject *list;
    if (!is_tuple(o) ||
        !PyArg_ParseTuple(o, "nnnO!;a chunk is (first, rows, pos, layers)", &first, &n, &pos, &PyList_Type, &list))
        return false;
    *chunk = (fd_prompt_chunk_t){(size_t)first, (size_t)n, (size_t)pos, layers};
    const char *wrong = first < 0 || n < 1 || pos < 0 ? "a chunk has no rows, or begins before 0" : NULL;
    if ((size_t)PyList_GET_SIZE(list) != j->n_layers) wrong = "a chunk does not have the model's layers";
    for (size_t i = 0; i < j->n_layers && !wrong; i++) {
        uint32_t *words;
        Py_ssize_t head_words, window, segment;
        const fd_joint_layer_t *heads = &j->layers[i];
        PyObject *layer = PyList_GET_ITEM(list, (Py_ssize_t)i);
        if (!is_tuple(layer) || !PyArg_ParseTuple(layer, "Knnn;a chunk's layer is (words, head_words, window, segment)",
                                                  FD_ADDRESS(words), &head_words, &window, &segment))
            return false;
        layers[i] = (fd_prompt_layer_t){
            .blocks = {words, (size_t)head_words, heads->kv_heads, heads->head_size,
                       heads->latent ? heads->latent->rank : heads->head_size},
            .window = (size_t)window,
            .segment = (size_t)segment,
        };
        if (head_words < 0 || window < 0 || segment < 0) wrong = "a chunk's layer has a negative size";
        else if (!heads->kv_heads) wrong = "a chunk's layer has no K and V";
        else wrong = chunk_error(ops, chunk, rows, &layers[i]);
    }
    return !wrong || FD_PY_FAIL(PyExc_ValueError, "%s", wrong);
}

fd_prompt_chunks_t *fd_py_prompt_chunks(PyObject *o, uint32_t act, const fd_joints_t *j, size_t rows) {
    PyObject *attention, *list;
    float scale;
    if (!is_tuple(o) ||
        !PyArg_ParseTuple(o, "OfO!;prompts are (attention, scale, chunks)", &attention, &scale, &PyList_Type, &list))
        return NULL;
    if (!Py_IS_TYPE(attention, fd_py_prompt_type) || ((prompt_attention_t *)attention)->act != act)
        return (fd_prompt_chunks_t *)PyErr_Format(PyExc_TypeError,
                                                  "prompts need a PromptAttention of the joints' dtype");
    const size_t n = (size_t)PyList_GET_SIZE(list);
    fd_prompt_chunks_t *c =
        PyMem_Calloc(1, sizeof *c + n * (sizeof *c->chunks + j->n_layers * sizeof *c->chunks->layers));
    if (!c) return (fd_prompt_chunks_t *)PyErr_NoMemory();
    fd_prompt_chunk_t *chunks = (fd_prompt_chunk_t *)(c + 1);
    fd_prompt_layer_t *layers = (fd_prompt_layer_t *)(chunks + n);
    *c = (fd_prompt_chunks_t){((prompt_attention_t *)attention)->ops, scale, n, j->n_layers, chunks};
    for (size_t i = 0; i < n; i++)
        if (!read_chunk(c->ops, PyList_GET_ITEM(list, (Py_ssize_t)i), j, rows, &chunks[i], layers + i * j->n_layers)) {
            PyMem_Free(c);
            return NULL;
        }
    return c;
}

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS | METH_STATIC, "Whether the ISA has functions for a dtype."},
    {"block_words", (PyCFunction)block_words, METH_VARARGS, "32-bit words of a block."},
    {"pack", (PyCFunction)pack, METH_VARARGS, "Pack tokens (fd_prompt_pack_t)."},
    {"attend", (PyCFunction)attend, METH_VARARGS, "Attend rows (fd_prompt_t)."},
    {NULL, NULL, 0, NULL},
};
FD_PY_TYPE(fd_py_prompt_spec, "fastdecode.kernels._native.PromptAttention", prompt_attention_t,
           {Py_tp_doc, "Attention of a prompt's rows on the S-node's CPU (prompt.h)."},
           {Py_tp_new, prompt_attention_new}, {Py_tp_methods, methods}, {Py_tp_members, fd_py_isa_member});
