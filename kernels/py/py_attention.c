/* The attention kernels for Python: for tests and benchmarks only, no link is served through them.
 *
 * The arguments are C-contiguous buffers (NumPy arrays, memoryviews), float32 unless they hold chunks or activations.
 * A wrong dtype, shape or size raises ValueError before any memory is written. The GIL is released while a kernel
 * appends or attends. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention/attention.h"
#include "py_object.h"
#include "region/region.h"

/* "O&" converters and checks. */

static int to_kv_dtype(PyObject *o, void *out) {
    return fd_py_index(o, fd_kv_dtype_names, FD_KV_DTYPES, "KV dtype", out);
}

static int to_act_dtype(PyObject *o, void *out) {
    return fd_py_index(o, fd_act_dtype_names, FD_ACT_DTYPES, "activation dtype", out);
}

static int to_isa(PyObject *o, void *out) {
    const char *name = PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : NULL;
    fd_isa_t isa;
    if (name && !fd_isa_from_name(name, &isa) && fd_isa_supported(isa)) {
        *(fd_isa_t *)out = isa;
        return 1;
    }
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "ISA %R is unknown or not supported by this CPU", o);
    return 0;
}

static int to_u32(PyObject *o, void *out) {
    const unsigned long value = PyLong_AsUnsignedLong(o);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return 0;
        PyErr_Clear();
    } else if (value <= UINT32_MAX) {
        *(uint32_t *)out = (uint32_t)value;
        return 1;
    }
    PyErr_Format(PyExc_ValueError, "%R is not within 0..2^32-1", o);
    return 0;
}

static bool check(bool ok, const char *message) {
    if (!ok) PyErr_SetString(PyExc_ValueError, message);
    return ok;
}

static bool check_head_size(Py_ssize_t head_size) {
    const char *error = fd_head_size_error(head_size < 0 ? 0 : (uint64_t)head_size);
    return check(!error, error);
}

/* The buffers of one call, which are released together. Initialise `n` with 0. */
enum { MAX_BUFFERS = 8 };
typedef struct {
    Py_buffer view[MAX_BUFFERS];
    int n;
} buffers_t;

static void release(buffers_t *b) {
    while (b->n) PyBuffer_Release(&b->view[--b->n]);
}

static Py_buffer *get(buffers_t *b, PyObject *o, const char *name, int flags) {
    Py_buffer *view = &b->view[b->n];
    return fd_py_view(o, name, flags | PyBUF_FORMAT, view) ? &b->view[b->n++] : NULL;
}

static Py_buffer *get_floats(buffers_t *b, PyObject *o, const char *name, int flags, int ndim) {
    Py_buffer *view = get(b, o, name, flags);
    if (!view || (view->ndim == ndim && view->format && !strcmp(view->format, "f"))) return view;
    PyErr_Format(PyExc_ValueError, "%s is not float32 with %d dimensions", name, ndim);
    return NULL;
}

/* Checks that the first `ndim` dimensions are the same. */
static bool check_same_shape(const Py_buffer *x, const Py_buffer *y, int ndim) {
    for (int i = 0; i < ndim; i++)
        if (!check(x->shape[i] == y->shape[i], "shapes do not agree")) return 0;
    return 1;
}

/* Gets a buffer of whole chunks, aligned as in the KV-cache. */
static Py_buffer *get_chunks(buffers_t *b, PyObject *o, int flags, size_t chunk_bytes) {
    Py_buffer *view = get(b, o, "chunks", flags);
    if (!view || !check((uintptr_t)view->buf % 64 == 0, "chunks are not 64-byte aligned")) return NULL;
    return check(view->len % chunk_bytes == 0, "the buffer of chunks does not end at the end of a chunk") ? view : NULL;
}

static PyObject *isa_best(PyObject *self, PyObject *unused) { return PyUnicode_FromString(fd_isa_name(fd_isa_best())); }

static PyObject *isa_supported(PyObject *self, PyObject *unused) {
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < FD_ISAS; i++) {
        if (!fd_isa_supported((fd_isa_t)i)) continue;
        PyObject *name = PyUnicode_FromString(fd_isa_name((fd_isa_t)i));
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *isa_of_kernels(PyObject *self, PyObject *args) {
    unsigned dtype;
    fd_isa_t isa;
    if (!PyArg_ParseTuple(args, "O&O&", to_isa, &isa, to_kv_dtype, &dtype)) return NULL;
    return PyUnicode_FromString(fd_kv_ops((fd_kv_dtype_t)dtype, isa)->isa);
}

static PyObject *chunk_bytes(PyObject *self, PyObject *args) {
    unsigned dtype;
    uint32_t head_size, v_size = 0;
    if (!PyArg_ParseTuple(args, "O&O&|O&", to_kv_dtype, &dtype, to_u32, &head_size, to_u32, &v_size)) return NULL;
    if (PyTuple_GET_SIZE(args) < 3) v_size = head_size;
    if (!check_head_size(head_size) || !check_head_size(v_size)) return NULL;
    return PyLong_FromSize_t(fd_kv_chunk_bytes((fd_kv_dtype_t)dtype, head_size, v_size));
}

static bool check_hadamard(uint32_t hadamard) {
    return check(hadamard <= FD_HADAMARD_ALL, "unknown Hadamard transforms");
}

static PyObject *kv_append(PyObject *self, PyObject *args) {
    unsigned dtype;
    fd_isa_t isa;
    uint32_t slot, hadamard = 0;
    PyObject *chunks_o, *k_o, *v_o, *result = NULL;
    buffers_t b = {.n = 0};
    Py_buffer *chunks, *k, *v;
    if (!PyArg_ParseTuple(args, "O&O&OO&OO|I", to_isa, &isa, to_kv_dtype, &dtype, &chunks_o, to_u32, &slot, &k_o, &v_o,
                          &hadamard))
        return NULL;
    if (!check_hadamard(hadamard)) goto out;
    if (!(k = get_floats(&b, k_o, "k", 0, 2)) || !(v = get_floats(&b, v_o, "v", 0, 2)) || !check_same_shape(k, v, 1))
        goto out;
    if (!check_head_size(k->shape[1]) || !check_head_size(v->shape[1])) goto out;
    const uint32_t head_size = (uint32_t)k->shape[1], v_size = (uint32_t)v->shape[1];
    const size_t bytes = fd_kv_chunk_bytes((fd_kv_dtype_t)dtype, head_size, v_size), n = (size_t)k->shape[0];
    if (!(chunks = get_chunks(&b, chunks_o, PyBUF_WRITABLE, bytes))) goto out;
    if (!check(slot + n <= chunks->len / bytes * FD_PAGE_TOKENS, "tokens beyond the last chunk")) goto out;
    const fd_kv_ops_t *ops = fd_kv_ops((fd_kv_dtype_t)dtype, isa);
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < n; i++) {
        const size_t t = slot + i;
        uint8_t *chunk = (uint8_t *)chunks->buf + t / FD_PAGE_TOKENS * bytes;
        ops->append(chunk, head_size, v_size, t % FD_PAGE_TOKENS, (const float *)k->buf + i * head_size,
                    (const float *)v->buf + i * v_size, hadamard);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
out:
    release(&b);
    return result;
}

/* Pointers to the pages that attention reads: those with the indexes in `order`, or all `n` pages of `run` if `order`
 * is None. A page has `bytes` bytes. Sets *picked to their number. The caller frees the array with PyMem_Free. */
static const uint8_t **pick_chunks(const uint8_t *run, size_t n, size_t bytes, PyObject *order, uint32_t *picked) {
    PyObject *indexes = order == Py_None ? NULL : PySequence_Fast(order, "order is neither None nor a sequence");
    if (order != Py_None && !indexes) return NULL;
    const size_t count = indexes ? (size_t)PySequence_Fast_GET_SIZE(indexes) : n;
    const uint8_t **chunks = PyMem_Malloc((count + 1) * sizeof *chunks);
    if (!chunks) PyErr_NoMemory();
    for (size_t i = 0; chunks && i < count; i++) {
        uint32_t index = (uint32_t)i;
        if (indexes && (!to_u32(PySequence_Fast_GET_ITEM(indexes, i), &index) ||
                        !check(index < n, "order names a chunk beyond the last"))) {
            PyMem_Free(chunks);
            chunks = NULL;
            break;
        }
        chunks[i] = run + index * bytes;
    }
    *picked = (uint32_t)count;
    Py_XDECREF(indexes);
    return chunks;
}

/* Gets a value for each query head, [heads][group], or NULL if `o` is None. */
static bool get_per_head(buffers_t *b, PyObject *o, const char *name, const Py_buffer *q, const float **values) {
    Py_buffer *view;
    if (o == Py_None) return 1;
    if (!(view = get_floats(b, o, name, 0, 2)) || !check_same_shape(q, view, 1) ||
        !check(view->shape[1] == q->shape[2], "shapes do not agree"))
        return 0;
    *values = view->buf;
    return 1;
}

static PyObject *kv_attend(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"isa", "kv_dtype", "chunks", "order",   "first_token", "q",      "q_pos", "window",   "acc",
                            "m",   "l",        "o",      "segment", "softcap",     "slopes", "sinks", "hadamard", NULL};
    unsigned dtype;
    fd_isa_t isa;
    fd_attend_t a = {0};
    PyObject *chunks_o, *order, *q_o, *acc_o, *m_o, *l_o, *o_o = Py_None, *slopes = Py_None, *sinks = Py_None,
                                                          *result = NULL;
    const uint8_t **picked = NULL;
    buffers_t b = {.n = 0};
    Py_buffer *chunks, *q, *acc, *m, *l, *o = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&OOO&OO&O&OOO|O$O&fOOI", names, to_isa, &isa, to_kv_dtype,
                                     &dtype, &chunks_o, &order, to_u32, &a.first_token, &q_o, to_u32, &a.q_pos, to_u32,
                                     &a.window, &acc_o, &m_o, &l_o, &o_o, to_u32, &a.segment, &a.softcap, &slopes,
                                     &sinks, &a.hadamard))
        return NULL;
    if (!check_hadamard(a.hadamard)) goto out;
    if (!(q = get_floats(&b, q_o, "q", 0, 4)) || !(acc = get_floats(&b, acc_o, "acc", PyBUF_WRITABLE, 4)) ||
        !check_same_shape(q, acc, 3))
        goto out;
    if (!(m = get_floats(&b, m_o, "m", PyBUF_WRITABLE, 3)) || !check_same_shape(q, m, 3)) goto out;
    if (!(l = get_floats(&b, l_o, "l", PyBUF_WRITABLE, 3)) || !check_same_shape(q, l, 3)) goto out;
    if (o_o != Py_None && (!(o = get_floats(&b, o_o, "o", PyBUF_WRITABLE, 4)) || !check_same_shape(acc, o, 4)))
        goto out;
    if (!check_head_size(q->shape[3]) || !check_head_size(acc->shape[3])) goto out;
    if (!get_per_head(&b, slopes, "slopes", q, &a.slopes) || !get_per_head(&b, sinks, "sinks", q, &a.sinks)) goto out;
    const Py_ssize_t heads = q->shape[0], rows = q->shape[1] * q->shape[2];
    if (!check(heads >= 1 && rows >= 1 && rows <= (1 << 24), "no query rows, or more than 2^24")) goto out;
    if (!check(heads == 1 || heads * rows <= FD_PANEL_ROWS, "several heads have more query rows than a panel"))
        goto out;
    if (!check(a.first_token % FD_PAGE_TOKENS == 0, "the first token does not begin a page")) goto out;
    a.heads = (uint32_t)heads, a.q_len = (uint32_t)q->shape[1], a.group = (uint32_t)q->shape[2],
    a.head_size = (uint32_t)q->shape[3], a.v_size = (uint32_t)acc->shape[3];
    a.head_stride = fd_kv_chunk_bytes((fd_kv_dtype_t)dtype, a.head_size, a.v_size);
    const size_t bytes = a.heads * a.head_stride;
    if (!(chunks = get_chunks(&b, chunks_o, 0, bytes))) goto out;
    if (!(picked = pick_chunks(chunks->buf, chunks->len / bytes, bytes, order, &a.n_chunks))) goto out;
    a.chunks = picked, a.acc = acc->buf, a.m = m->buf, a.l = l->buf;
    a.q = q->buf, a.act_dtype = FD_ACT_FP32, a.softmax_scale = 1.0f, a.o = o ? o->buf : NULL;
    a.q_token_stride = (size_t)a.group * a.head_size * sizeof(float), a.q_head_stride = a.q_len * a.q_token_stride;
    a.o_token_stride = (size_t)a.group * a.v_size * sizeof(float), a.o_head_stride = a.q_len * a.o_token_stride;
    Py_BEGIN_ALLOW_THREADS
    fd_kv_ops((fd_kv_dtype_t)dtype, isa)->attend(&a);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
out:
    PyMem_Free(picked);
    release(&b);
    return result;
}

static PyObject *attend_merge(PyObject *self, PyObject *args) {
    static const char *const names[6] = {"m", "l", "acc", "m2", "l2", "acc2"};
    fd_isa_t isa;
    PyObject *o[6], *result = NULL;
    buffers_t b = {.n = 0};
    Py_buffer *v[6];
    if (!PyArg_ParseTuple(args, "O&OOOOOO", to_isa, &isa, &o[0], &o[1], &o[2], &o[3], &o[4], &o[5])) return NULL;
    for (int i = 0; i < 6; i++)
        if (!(v[i] = get_floats(&b, o[i], names[i], i < 3 ? PyBUF_WRITABLE : 0, i % 3 == 2 ? 2 : 1)) ||
            !check_same_shape(v[0], v[i], 1))
            goto out;
    if (!check_same_shape(v[2], v[5], 2) || !check_head_size(v[2]->shape[1])) goto out;
    fd_vec_ops(isa)->merge(v[0]->buf, v[1]->buf, v[2]->buf, v[3]->buf, v[4]->buf, v[5]->buf, (uint32_t)v[2]->shape[0],
                           (uint32_t)v[2]->shape[1]);
    result = Py_NewRef(Py_None);
out:
    release(&b);
    return result;
}

static PyObject *attend_finish(PyObject *self, PyObject *args) {
    fd_isa_t isa;
    unsigned dtype;
    PyObject *o_o, *acc_o, *l_o, *result = NULL;
    buffers_t b = {.n = 0};
    Py_buffer *o, *acc, *l;
    if (!PyArg_ParseTuple(args, "O&OOOO&", to_isa, &isa, &o_o, &acc_o, &l_o, to_act_dtype, &dtype)) return NULL;
    if (!(acc = get_floats(&b, acc_o, "acc", 0, 2)) || !(l = get_floats(&b, l_o, "l", 0, 1)) ||
        !check_same_shape(acc, l, 1))
        goto out;
    if (!(o = get(&b, o_o, "o", PyBUF_WRITABLE))) goto out;
    const size_t rows = (size_t)acc->shape[0], n = (size_t)acc->shape[1];
    if (!check((size_t)o->len == rows * n * fd_act_bytes((uint32_t)dtype), "o and acc have different lengths"))
        goto out;
    if (!check(rows <= UINT32_MAX && n <= UINT32_MAX, "more rows or values than 2^32-1")) goto out;
    fd_vec_ops(isa)->finish(o->buf, acc->buf, l->buf, (uint32_t)rows, (uint32_t)n, (uint32_t)dtype);
    result = Py_NewRef(Py_None);
out:
    release(&b);
    return result;
}

/* o and src hold elements of the activation dtype as untyped bytes. */
static PyObject *load_act(PyObject *self, PyObject *args) {
    unsigned dtype;
    float scale;
    fd_isa_t isa;
    PyObject *dst_o, *src_o, *result = NULL;
    buffers_t b = {.n = 0};
    Py_buffer *dst, *src;
    if (!PyArg_ParseTuple(args, "O&OOO&f", to_isa, &isa, &dst_o, &src_o, to_act_dtype, &dtype, &scale)) return NULL;
    if (!(dst = get_floats(&b, dst_o, "dst", PyBUF_WRITABLE, 1)) || !(src = get(&b, src_o, "src", 0))) goto out;
    const size_t n = (size_t)dst->shape[0];
    if (!check((size_t)src->len == n * fd_act_bytes((uint32_t)dtype), "src and dst have different lengths")) goto out;
    fd_vec_ops(isa)->load_act(dst->buf, src->buf, n, (uint32_t)dtype, scale);
    result = Py_NewRef(Py_None);
out:
    release(&b);
    return result;
}

PyMethodDef fd_attention_methods[] = {
    {"isa_best", isa_best, METH_NOARGS, "isa_best() -> str: the best ISA that this CPU and OS support."},
    {"isa_supported", isa_supported, METH_NOARGS, "isa_supported() -> list[str], slowest first."},
    {"isa_of_kernels", isa_of_kernels, METH_VARARGS,
     "isa_of_kernels(isa, kv_dtype) -> str: the ISA that the chosen kernels name."},
    {"chunk_bytes", chunk_bytes, METH_VARARGS,
     "chunk_bytes(kv_dtype, head_size, v_size=head_size) -> int: bytes of one (page, KV head) chunk."},
    {"kv_append", kv_append, METH_VARARGS,
     "kv_append(isa, kv_dtype, chunks, first_token_slot, k, v, hadamard=0): append k and v to consecutive chunks."},
    {"kv_attend", (PyCFunction)(void (*)(void))kv_attend, METH_VARARGS | METH_KEYWORDS,
     "kv_attend(isa, kv_dtype, chunks, order, first_token, q, q_pos, window, acc, m, l, o=None, *, segment=0, "
     "softcap=0, slopes=None, sinks=None): attend q to chunks."},
    {"attend_merge", attend_merge, METH_VARARGS,
     "attend_merge(isa, m, l, acc, m2, l2, acc2): merge the partial results (m2, l2, acc2) into (m, l, acc)."},
    {"attend_finish", attend_finish, METH_VARARGS, "attend_finish(isa, o, acc, l, act_dtype): o = acc / l."},
    {"load_act", load_act, METH_VARARGS, "load_act(isa, dst, src, act_dtype, scale): dst = scale * src."},
    {NULL, NULL, 0, NULL},
};
