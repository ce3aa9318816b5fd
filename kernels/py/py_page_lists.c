/* PageLists: the page lists of a KV-cache whose arena is memory of a device, for Python. The GIL takes the place of a
 * link's mutex. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cache/kvcache.h"
#include "engine/engine.h"
#include "py_layers.h"
#include "region/py_geometry.h"

typedef struct {
    PyObject_HEAD
    fd_kvcache_t kv;
    uint32_t n_stored;
} page_lists_t;

/* Raises the exception for a refusal: ValueError if the arguments were wrong, else MemoryError. */
static PyObject *refused(const fd_error_t *error) {
    const bool wrong = error->status == FD_BAD_TABLE || error->status == FD_BAD_SEQUENCE;
    PyErr_SetString(wrong ? PyExc_ValueError : PyExc_MemoryError, error->text);
    return NULL;
}

static bool init(page_lists_t *self, const fd_geometry_t *g, unsigned kv_dtype, unsigned n_pages, unsigned max_seqs,
                 layer_args_t *a) {
    fd_layer_t layers[FD_MAX_LAYERS];
    fd_stored_t stored[FD_MAX_LAYERS];
    fd_error_t error;
    if (kv_dtype >= FD_KV_DTYPES || !n_pages || !max_seqs)
        return FD_PY_FAIL(PyExc_ValueError, "%u pages for %u sequences, KV-cache dtype %u", n_pages, max_seqs,
                          kv_dtype);
    if (!get_layers(a, g, layers)) return false;
    if (fd_layers_check(g, layers, kv_dtype, &error) != FD_OK) return refused(&error) != NULL;
    self->n_stored = fd_stored_layers(g, layers, stored);
    return fd_kvcache_init(&self->kv, stored, self->n_stored, (fd_kv_dtype_t)kv_dtype, n_pages, n_pages, max_seqs,
                           &error) == FD_OK ||
           refused(&error);
}

static PyObject *lists_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"geometry", "kv_dtype",  "n_pages", "max_seqs", "windows",
                            "segments", "kv_layers", "heads",   NULL};
    fd_geometry_t g;
    unsigned kv_dtype, n_pages, max_seqs;
    layer_args_t a = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&III|$OOOO", names, fd_py_geometry, &g, &kv_dtype, &n_pages,
                                     &max_seqs, &a.windows, &a.segments, &a.kv_layers, &a.heads))
        return NULL;
    page_lists_t *self = (page_lists_t *)type->tp_alloc(type, 0);
    if (self && !init(self, &g, kv_dtype, n_pages, max_seqs, &a)) Py_CLEAR(self);
    release_layer_args(&a);
    return (PyObject *)self;
}

static void lists_dealloc(page_lists_t *self) {
    fd_kvcache_destroy(&self->kv);
    fd_py_free(self);
}

/* A method that calls fd_kvcache_<name>. `format` has a unit for each of its numbers, which `...` names in order. */
#define LISTS_METHOD(name, format, ...)                                                                                \
    static PyObject *lists_##name(page_lists_t *self, PyObject *args) {                                                \
        unsigned n[5];                                                                                                 \
        fd_error_t error;                                                                                              \
        if (!PyArg_ParseTuple(args, format, &n[0], &n[1], &n[2], &n[3], &n[4])) return NULL;                           \
        if (fd_kvcache_##name(&self->kv, __VA_ARGS__, &error) != FD_OK) return refused(&error);                        \
        Py_RETURN_NONE;                                                                                                \
    }
LISTS_METHOD(free, "II", n[0], n[1])
LISTS_METHOD(trim, "III", n[0], n[1], n[2])
LISTS_METHOD(fork, "IIIII", n[0], n[1], n[2], n[3], n[4])
LISTS_METHOD(drop_blocks, "III", n[0], n[1], n[2])
LISTS_METHOD(restore_blocks, "IIII", n[0], n[1], n[2], n[3])
LISTS_METHOD(receive, "III", n[0], n[1], n[2])

static PyObject *lists_append(page_lists_t *self, PyObject *entries) {
    Py_buffer table;
    if (!fd_py_view(entries, "entries", 0, &table)) return NULL;
    const uint32_t n = (uint32_t)(table.len / sizeof(fd_row_t));
    uint32_t n_copies;
    fd_error_t error;
    PyObject *copies =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(n * self->kv.planes.n_sections * sizeof(fd_page_copy_t)));
    fd_page_copy_t *to = copies ? (fd_page_copy_t *)PyBytes_AS_STRING(copies) : NULL;
    if (copies && (fd_kvcache_check(&self->kv, table.buf, n, &error) != FD_OK ||
                   fd_kvcache_append(&self->kv, table.buf, n, to, &n_copies, &error) != FD_OK)) {
        Py_CLEAR(copies);
        refused(&error);
    }
    PyBuffer_Release(&table);
    if (copies) _PyBytes_Resize(&copies, (Py_ssize_t)(n_copies * sizeof(fd_page_copy_t)));
    return copies;
}

static PyObject *lists_end_copies(page_lists_t *self, PyObject *copies) {
    Py_buffer view;
    if (!fd_py_view(copies, "copies", 0, &view)) return NULL;
    fd_kvcache_end_copies(&self->kv, view.buf, (uint32_t)(view.len / sizeof(fd_page_copy_t)));
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* Writes the pages of each entry's sequence to pages[sections][n_entries][width]. */
static void write_tables(const page_lists_t *self, const fd_row_t *entries, uint32_t n_entries, uint32_t *pages,
                         uint32_t width) {
    const uint32_t n_sections = self->kv.planes.n_sections;
    for (uint32_t i = 0; i < n_entries; i++) {
        const fd_sequence_t *s = &self->kv.sequences[entries[i].seq_index];
        for (uint32_t section = 0; section < n_sections; section++)
            for (uint32_t block = 0; block < s->n_blocks && block < width; block++)
                pages[((size_t)section * n_entries + i) * width + block] = s->pages[block * n_sections + section];
    }
}

static PyObject *lists_tables(page_lists_t *self, PyObject *args) {
    PyObject *entries, *pages;
    unsigned width;
    Py_buffer table, out;
    if (!PyArg_ParseTuple(args, "OOI", &entries, &pages, &width) || !fd_py_view(entries, "entries", 0, &table))
        return NULL;
    const uint32_t n = (uint32_t)(table.len / sizeof(fd_row_t));
    const size_t size = (size_t)self->kv.planes.n_sections * n * width * sizeof(uint32_t);
    const bool ok = fd_py_view(pages, "pages", PyBUF_WRITABLE, &out);
    if (ok && (size_t)out.len == size) write_tables(self, table.buf, n, out.buf, width);
    else if (ok) PyErr_Format(PyExc_ValueError, "pages: %zd bytes given, %zu needed", out.len, size);
    if (ok) PyBuffer_Release(&out);
    PyBuffer_Release(&table);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *lists_get_stores(page_lists_t *self, void *unused) {
    PyObject *stores = PyTuple_New(self->n_stored);
    for (uint32_t i = 0; stores && i < self->n_stored; i++) {
        const fd_store_t *s = &self->kv.stores[i];
        PyObject *store =
            Py_BuildValue("(IInn)", s->section, s->plane, (Py_ssize_t)s->offset, (Py_ssize_t)s->chunk_bytes);
        if (!store) Py_CLEAR(stores);
        else PyTuple_SET_ITEM(stores, i, store);
    }
    return stores;
}

static PyMemberDef lists_members[] = {
    {"n_pages", T_UINT, offsetof(page_lists_t, kv.n_pages), READONLY, "pages of the arena"},
    {"n_free", T_UINT, offsetof(page_lists_t, kv.free.n_free), READONLY, "pages that no sequence and no copy holds"},
    {"n_sequences", T_UINT, offsetof(page_lists_t, kv.n_seqs), READONLY, "sequences that are not empty"},
    {"n_planes", T_UINT, offsetof(page_lists_t, kv.planes.n_planes), READONLY, "planes of the arena"},
    {"n_sections", T_UINT, offsetof(page_lists_t, kv.planes.n_sections), READONLY, "sections of the layers"},
    {"plane_bytes", T_PYSSIZET, offsetof(page_lists_t, kv.planes.plane_bytes), READONLY, "bytes of a page in a plane"},
    {0},
};

static PyGetSetDef lists_getset[] = {
    {"stores", (getter)lists_get_stores, NULL, "section, plane, offset and chunk_bytes of each layer that stores K, V",
     NULL},
    {0},
};

static PyMethodDef lists_methods[] = {
    {"free", (PyCFunction)lists_free, METH_VARARGS, "Free a sequence's pages."},
    {"trim", (PyCFunction)lists_trim, METH_VARARGS, "Keep only the first tokens of a sequence."},
    {"drop_blocks", (PyCFunction)lists_drop_blocks, METH_VARARGS, "Give back the pages of a sequence's first blocks."},
    {"receive", (PyCFunction)lists_receive, METH_VARARGS, "Take pages for an empty sequence."},
    {"restore_blocks", (PyCFunction)lists_restore_blocks, METH_VARARGS, "Put a sequence's pages before another's."},
    {"fork", (PyCFunction)lists_fork, METH_VARARGS, "Let an empty sequence share the first tokens of another."},
    {"append", (PyCFunction)lists_append, METH_O, "Take pages for the rows of a step."},
    {"end_copies", (PyCFunction)lists_end_copies, METH_O, "The copies that a step has begun with are complete."},
    {"tables", (PyCFunction)lists_tables, METH_VARARGS, "Write the pages of the sequences of a step."},
    {0},
};

FD_PY_TYPE(fd_py_lists_spec, "fastdecode.kernels._native.PageLists", page_lists_t,
           {Py_tp_doc, "The page lists of a KV-cache whose arena is memory of a device."}, {Py_tp_new, lists_new},
           {Py_tp_dealloc, lists_dealloc}, {Py_tp_methods, lists_methods}, {Py_tp_members, lists_members},
           {Py_tp_getset, lists_getset});
