/* Converts the layers of a link (layers.h) from Python. For py_engine.c only; include Python.h first. */
#ifndef FD_PY_LAYERS_H
#define FD_PY_LAYERS_H

#include "engine/layers.h"

/* Writes the `n` integers of the sequence `o` to `out`, an array of int if `is_signed`, else of uint32_t. 1, or 0 with
 * an exception set. */
static int convert_ints(PyObject *o, const char *what, Py_ssize_t n, long long min, long long max, void *out,
                        bool is_signed) {
    PyObject *seq = PySequence_Fast(o, what);
    if (!seq) return 0;
    int ok = PySequence_Fast_GET_SIZE(seq) == n;
    if (!ok) PyErr_Format(PyExc_ValueError, "%s: %zd given, %zd needed", what, PySequence_Fast_GET_SIZE(seq), n);
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        long long v = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(seq, i));
        if (v == -1 && PyErr_Occurred()) {
            ok = 0;
        } else if (v < min || v > max) {
            PyErr_Format(PyExc_ValueError, "%s: %lld is not within %lld..%lld", what, v, min, max);
            ok = 0;
        } else if (is_signed) {
            ((int *)out)[i] = (int)v;
        } else {
            ((uint32_t *)out)[i] = (uint32_t)v;
        }
    }
    Py_DECREF(seq);
    return ok;
}

/* The keyword arguments of add_link that say what the layers' attention does. NULL or None: nothing. */
typedef struct {
    PyObject *windows, *segments, *kv_layers, *softcaps, *sinks, *slopes, *heads;
    uint32_t rotated;
    Py_buffer sinks_view, slopes_view;
} layer_args_t;

static void release_layer_args(layer_args_t *a) {
    if (a->sinks_view.obj) PyBuffer_Release(&a->sinks_view);
    if (a->slopes_view.obj) PyBuffer_Release(&a->slopes_view);
}

static bool is_given(PyObject *o) { return o && o != Py_None; }

/* Gets `n` floats of fp32. 1, or 0 with an exception set. */
static int get_fp32(PyObject *o, const char *what, size_t n, Py_buffer *view) {
    if (!is_given(o)) return 1;
    if (PyObject_GetBuffer(o, view, PyBUF_C_CONTIGUOUS)) return 0;
    if ((size_t)view->len == n * sizeof(float) && (uintptr_t)view->buf % sizeof(float) == 0) return 1;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes given, %zu aligned bytes needed", what, view->len, n * sizeof(float));
    return 0;
}

static int get_softcaps(PyObject *o, uint32_t n_layers, fd_layer_t *layers) {
    if (!is_given(o)) return 1;
    PyObject *seq = PySequence_Fast(o, "softcaps");
    if (!seq) return 0;
    int ok = PySequence_Fast_GET_SIZE(seq) == n_layers;
    if (!ok) PyErr_Format(PyExc_ValueError, "softcaps: %zd given, %u needed", PySequence_Fast_GET_SIZE(seq), n_layers);
    for (uint32_t i = 0; ok && i < n_layers; i++) {
        layers[i].softcap = (float)PyFloat_AsDouble(PySequence_Fast_GET_ITEM(seq, i));
        ok = !PyErr_Occurred();
    }
    Py_DECREF(seq);
    return ok;
}

/* Reads `o`, a tuple of four integers: query heads, KV heads, head size, size of a V head. */
static int convert_heads(PyObject *o, fd_heads_t *heads) {
    uint32_t n[4];
    if (!convert_ints(o, "heads of a layer", 4, 0, UINT32_MAX, n, false)) return 0;
    *heads = (fd_heads_t){n[0], n[1], n[2], n[3]};
    return 1;
}

/* The heads of each layer: the geometry's where `o` does not give any. */
static int get_heads(PyObject *o, const fd_geometry_t *g, fd_layer_t *layers) {
    for (uint32_t i = 0; i < g->n_layers; i++) layers[i].heads = fd_geometry_heads(g);
    if (!is_given(o)) return 1;
    PyObject *seq = PySequence_Fast(o, "heads");
    if (!seq) return 0;
    int ok = PySequence_Fast_GET_SIZE(seq) == g->n_layers;
    if (!ok) PyErr_Format(PyExc_ValueError, "heads: %zd given, %u needed", PySequence_Fast_GET_SIZE(seq), g->n_layers);
    for (uint32_t i = 0; ok && i < g->n_layers; i++)
        ok = convert_heads(PySequence_Fast_GET_ITEM(seq, i), &layers[i].heads);
    Py_DECREF(seq);
    return ok;
}

/* Fills in `layers`, [n_layers], which point into the views of `a`. 1, or 0 with an exception set. */
static int get_layers(layer_args_t *a, const fd_geometry_t *g, fd_layer_t *layers) {
    const uint32_t n = g->n_layers;
    uint32_t windows[FD_MAX_LAYERS] = {0}, segments[FD_MAX_LAYERS] = {0}, kv_layers[FD_MAX_LAYERS];
    for (uint32_t i = 0; i < n; i++) kv_layers[i] = i;
    if (is_given(a->windows) && !convert_ints(a->windows, "windows", n, 0, UINT32_MAX, windows, false)) return 0;
    if (is_given(a->segments) && !convert_ints(a->segments, "segments", n, 0, UINT32_MAX, segments, false)) return 0;
    if (is_given(a->kv_layers) && !convert_ints(a->kv_layers, "kv_layers", n, 0, n - 1, kv_layers, false)) return 0;
    if (!get_fp32(a->sinks, "sinks", (size_t)n * g->n_q_heads, &a->sinks_view)) return 0;
    if (!get_fp32(a->slopes, "slopes", g->n_q_heads, &a->slopes_view)) return 0;
    const float *sinks = a->sinks_view.buf;
    for (uint32_t i = 0; i < n; i++)
        layers[i] = (fd_layer_t){.window = windows[i],
                                 .segment = segments[i],
                                 .kv_layer = kv_layers[i],
                                 .slopes = a->slopes_view.buf,
                                 .sinks = sinks ? sinks + (size_t)i * g->n_q_heads : NULL,
                                 .rotated = a->rotated};
    return get_heads(a->heads, g, layers) && get_softcaps(a->softcaps, n, layers);
}

#endif
