/* PromptAttention: fd_prompt_ops_t for Python. Rows are given as addresses; fastdecode/spart/prompt_attention.py
 * checks their tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "prompt.h"
#include "py_isa.h"

typedef struct {
    PyObject_HEAD
    const fd_prompt_ops_t *ops;
    const char *isa;
} prompt_attention_t;

static PyObject *prompt_attention_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", NULL};
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", keys, &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    if (act_dtype >= FD_ACT_DTYPES) return PyErr_Format(PyExc_ValueError, "no such activation dtype: %u", act_dtype);
    const char *name = NULL;
    const fd_prompt_ops_t *ops = fd_prompt_ops(isa, act_dtype, &name);
    if (!ops) return PyErr_Format(PyExc_ValueError, "%s has no attention of prompts", fd_isa_name(isa));
    prompt_attention_t *self = (prompt_attention_t *)type->tp_alloc(type, 0);
    if (self) self->ops = ops, self->isa = name;
    return (PyObject *)self;
}

static void prompt_attention_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define POINTER(address) ((void *)(uintptr_t)(address))

/* (words, head_words, kv_heads, k_size, v_size) */
#define BLOCKS "(Knnnn)"

static fd_prompt_blocks_t blocks_of(unsigned long long words, const Py_ssize_t sizes[4]) {
    return (fd_prompt_blocks_t){POINTER(words), (size_t)sizes[0], (size_t)sizes[1], (size_t)sizes[2], (size_t)sizes[3]};
}

static PyObject *block_words(prompt_attention_t *self, PyObject *args) {
    Py_ssize_t k_size, v_size;
    if (!PyArg_ParseTuple(args, "nn", &k_size, &v_size)) return NULL;
    return PyLong_FromSize_t(self->ops->block_words((size_t)k_size, (size_t)v_size));
}

static PyObject *pack(prompt_attention_t *self, PyObject *args) {
    unsigned long long words, k, v;
    Py_ssize_t sizes[4], pos, n, k_head, k_row, v_head, v_row;
    unsigned threads;
    if (!PyArg_ParseTuple(args, BLOCKS "KKnnnnnnI", &words, &sizes[0], &sizes[1], &sizes[2], &sizes[3], &k, &v, &pos,
                          &n, &k_head, &k_row, &v_head, &v_row, &threads))
        return NULL;
    const fd_prompt_blocks_t blocks = blocks_of(words, sizes);
    const fd_prompt_pack_t o = {&blocks,        POINTER(k),    POINTER(v),     (size_t)pos,  (size_t)n,
                                (size_t)k_head, (size_t)k_row, (size_t)v_head, (size_t)v_row};
    Py_BEGIN_ALLOW_THREADS
    fd_prompt_pack(self->ops, &o, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *attend(prompt_attention_t *self, PyObject *args) {
    unsigned long long words, q, out, sinks;
    Py_ssize_t sizes[4], q_row, out_row, rows, pos, group, window, segment;
    float scale;
    unsigned threads;
    if (!PyArg_ParseTuple(args, BLOCKS "KKKnnnnnnnfI", &words, &sizes[0], &sizes[1], &sizes[2], &sizes[3], &q, &out,
                          &sinks, &q_row, &out_row, &rows, &pos, &group, &window, &segment, &scale, &threads))
        return NULL;
    const fd_prompt_blocks_t blocks = blocks_of(words, sizes);
    const fd_prompt_t o = {
        .blocks = &blocks,
        .q = POINTER(q),
        .out = POINTER(out),
        .sinks = POINTER(sinks),
        .q_row = (size_t)q_row,
        .out_row = (size_t)out_row,
        .rows = (size_t)rows,
        .pos = (size_t)pos,
        .group = (size_t)group,
        .window = (size_t)window,
        .segment = (size_t)segment,
        .scale = scale,
    };
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = fd_prompt_attend(self->ops, &o, threads);
    Py_END_ALLOW_THREADS
    if (error) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *prompt_attention_isa(prompt_attention_t *self, void *unused) {
    return PyUnicode_FromString(self->isa);
}

static PyMethodDef methods[] = {
    {"block_words", (PyCFunction)block_words, METH_VARARGS, "block_words(k_size, v_size)"},
    {"pack", (PyCFunction)pack, METH_VARARGS,
     "pack((words, head_words, kv_heads, k_size, v_size), k, v, pos, n, k_head, k_row, v_head, v_row, threads)"},
    {"attend", (PyCFunction)attend, METH_VARARGS,
     "attend((words, head_words, kv_heads, k_size, v_size), q, out, sinks, q_row, out_row, rows, pos, group, window, "
     "segment, scale, threads)"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getset[] = {
    {"isa", (getter)prompt_attention_isa, NULL, "The ISA of the function.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_doc, "Attention of a prompt's rows on the S-node's CPU (prompt.h)."},
    {Py_tp_new, prompt_attention_new},
    {Py_tp_dealloc, prompt_attention_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};
static PyType_Spec spec = {
    .name = "fastdecode.kernels._native.PromptAttention",
    .basicsize = sizeof(prompt_attention_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int fd_prompt_add_types(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    const int error = type ? PyModule_AddObjectRef(module, "PromptAttention", type) : -1;
    Py_XDECREF(type);
    return error;
}
