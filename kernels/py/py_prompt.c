/* PromptAttention: fd_prompt_attend for Python. Rows are given as addresses; fastdecode/spart/prompt_attention.py
 * checks their tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "prompt.h"
#include "py_isa.h"

typedef struct {
    PyObject_HEAD
    fd_prompt_fn *attend;
    const char *isa;
} prompt_attention_t;

static PyObject *prompt_attention_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"act_dtype", NULL};
    unsigned act_dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I", keys, &act_dtype) || !fd_py_choose_isa(NULL, &isa)) return NULL;
    if (act_dtype >= FD_ACT_DTYPES) return PyErr_Format(PyExc_ValueError, "no such activation dtype: %u", act_dtype);
    const char *name = NULL;
    fd_prompt_fn *attend = fd_prompt_fn_of(isa, act_dtype, &name);
    if (!attend) return PyErr_Format(PyExc_ValueError, "%s has no attention of prompts", fd_isa_name(isa));
    prompt_attention_t *self = (prompt_attention_t *)type->tp_alloc(type, 0);
    if (self) self->attend = attend, self->isa = name;
    return (PyObject *)self;
}

static void prompt_attention_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define POINTER(address) ((void *)(uintptr_t)(address))

static PyObject *attend(prompt_attention_t *self, PyObject *args) {
    unsigned long long q, k, v, out, sinks;
    Py_ssize_t q_row, k_head, k_row, v_head, v_row, out_row, rows, pos, kv_heads, group, k_size, v_size, window,
        segment;
    float scale;
    unsigned threads;
    if (!PyArg_ParseTuple(args, "KKKKK(nnnnnn)(nnnnnn)nnfI", &q, &k, &v, &out, &sinks, &q_row, &k_head, &k_row, &v_head,
                          &v_row, &out_row, &rows, &pos, &kv_heads, &group, &k_size, &v_size, &window, &segment, &scale,
                          &threads))
        return NULL;
    const fd_prompt_t o = {
        .q = POINTER(q),
        .k = POINTER(k),
        .v = POINTER(v),
        .out = POINTER(out),
        .sinks = POINTER(sinks),
        .q_row = (size_t)q_row,
        .k_head = (size_t)k_head,
        .k_row = (size_t)k_row,
        .v_head = (size_t)v_head,
        .v_row = (size_t)v_row,
        .out_row = (size_t)out_row,
        .rows = (size_t)rows,
        .pos = (size_t)pos,
        .kv_heads = (size_t)kv_heads,
        .group = (size_t)group,
        .k_size = (size_t)k_size,
        .v_size = (size_t)v_size,
        .window = (size_t)window,
        .segment = (size_t)segment,
        .scale = scale,
    };
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = fd_prompt_attend(self->attend, &o, threads);
    Py_END_ALLOW_THREADS
    if (error) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *prompt_attention_isa(prompt_attention_t *self, void *unused) {
    return PyUnicode_FromString(self->isa);
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)attend, METH_VARARGS,
     "attend(q, k, v, out, sinks, (q_row, k_head, k_row, v_head, v_row, out_row), (rows, pos, kv_heads, group, k_size, "
     "v_size), window, segment, scale, threads)"},
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
