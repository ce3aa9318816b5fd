/* How Python hands a geometry and a region to C. For the extension modules only; include Python.h first. */
#pragma once

#include "region.h"

/* O& converter to an fd_geometry_t, from a sequence of its twelve integers: n_slots, max_rows, n_layers, n_q_heads,
 * n_kv_heads, head_size, act_dtype, v_size, v_in_k, index_heads, index_size, index_topk. Sets TypeError, or ValueError
 * with the reason if the geometry is not valid. */
static inline int fd_py_geometry(PyObject *object, void *out) {
    fd_geometry_t *g = out;
    *g = (fd_geometry_t){0};
    uint32_t *fields[] = {&g->n_slots,   &g->max_rows, &g->n_layers, &g->n_q_heads,   &g->n_kv_heads, &g->head_size,
                          &g->act_dtype, &g->v_size,   &g->v_in_k,   &g->index_heads, &g->index_size, &g->index_topk};
    enum { N_FIELDS = sizeof fields / sizeof *fields };
    PyObject *numbers = PySequence_Tuple(object);
    if (!numbers) return 0;
    bool converted = PyTuple_GET_SIZE(numbers) == N_FIELDS;
    if (!converted) PyErr_Format(PyExc_TypeError, "a geometry is %d integers", (int)N_FIELDS);
    for (Py_ssize_t i = 0; converted && i < N_FIELDS; i++) {
        unsigned long value = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(numbers, i));
        if (PyErr_Occurred()) {
            converted = PyErr_ExceptionMatches(PyExc_OverflowError);
            if (converted) PyErr_Clear();
            value = UINT32_MAX; /* no valid geometry has it in any field */
        }
        *fields[i] = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
    }
    Py_DECREF(numbers);
    if (!converted) return 0;
    const char *reason = fd_geometry_error(g);
    if (reason) PyErr_SetString(PyExc_ValueError, reason);
    return !reason;
}

/* Takes the buffer of a region: exactly as long as its geometry needs, and aligned to a cache line. 0, or -1 with
 * ValueError or BufferError set. The caller releases the view. */
static inline int fd_py_region(PyObject *object, const fd_geometry_t *g, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE)) return -1;
    const size_t needed = fd_region_layout(g).region_bytes;
    if ((size_t)view->len != needed)
        PyErr_Format(PyExc_ValueError, "the region has %zd bytes, its geometry needs %zu", view->len, needed);
    else if ((uintptr_t)view->buf % FD_LINE)
        PyErr_Format(PyExc_ValueError, "the region is not aligned to %u bytes", FD_LINE);
    else return 0;
    PyBuffer_Release(view);
    return -1;
}
