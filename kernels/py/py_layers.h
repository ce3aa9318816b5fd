/* Converts the layers of a link (layers.h) from Python. For py_engine.c and py_page_lists.c; include Python.h first.
 * Functions return true, or false with an exception set. */
#pragma once

#include "engine/layers.h"
#include "py_object.h"

/* The keyword arguments of add_link that say what the layers' attention does. NULL or None: nothing. */
typedef struct {
    PyObject *windows, *segments, *kv_layers, *selections, *softcaps, *sinks, *slopes, *heads;
    uint32_t hadamard;
    Py_buffer sinks_view, slopes_view;
} layer_args_t;

static void release_layer_args(layer_args_t *a) {
    if (a->sinks_view.obj) PyBuffer_Release(&a->sinks_view);
    if (a->slopes_view.obj) PyBuffer_Release(&a->slopes_view);
}

static bool is_given(PyObject *o) { return o && o != Py_None; }

/* Gets `n` floats of fp32. */
static bool get_fp32(PyObject *o, const char *what, size_t n, Py_buffer *view) {
    if (!is_given(o)) return true;
    if (!fd_py_view(o, what, 0, view)) return false;
    if ((size_t)view->len == n * sizeof(float) && (uintptr_t)view->buf % sizeof(float) == 0) return true;
    return FD_PY_FAIL(PyExc_ValueError, "%s: %zd bytes given, %zu aligned bytes needed", what, view->len,
                      n * sizeof(float));
}

/* Gets an integer of each layer, which is the field of `layers[0]` at `field` and of the others. */
static bool get_ints(PyObject *o, const char *what, uint32_t n_layers, uint32_t max, uint32_t *field) {
    return !is_given(o) || fd_py_ints(o, what, n_layers, max, field, sizeof(fd_layer_t));
}

static bool get_softcaps(PyObject *o, uint32_t n_layers, fd_layer_t *layers) {
    if (!is_given(o)) return true;
    PyObject *seq = fd_py_sequence(o, "softcaps", n_layers);
    for (uint32_t i = 0; seq && i < n_layers; i++)
        layers[i].softcap = (float)PyFloat_AsDouble(PySequence_Fast_GET_ITEM(seq, i));
    Py_XDECREF(seq);
    return !PyErr_Occurred();
}

/* Reads `o`, a tuple of four integers: query heads, KV heads, head size, size of a V head. */
static bool convert_heads(PyObject *o, bool v_in_k, fd_heads_t *heads) {
    uint32_t n[4];
    if (!fd_py_ints(o, "heads of a layer", 4, UINT32_MAX, n, sizeof *n)) return false;
    *heads = (fd_heads_t){n[0], n[1], n[2], n[3], v_in_k};
    return true;
}

/* The heads of each layer: the geometry's where `o` does not give any. */
static bool get_heads(PyObject *o, const fd_geometry_t *g, fd_layer_t *layers) {
    for (uint32_t i = 0; i < g->n_layers; i++) layers[i].heads = fd_geometry_heads(g);
    if (!is_given(o)) return true;
    PyObject *seq = fd_py_sequence(o, "heads", g->n_layers);
    bool ok = seq != NULL;
    for (uint32_t i = 0; ok && i < g->n_layers; i++)
        ok = convert_heads(PySequence_Fast_GET_ITEM(seq, i), g->v_in_k, &layers[i].heads);
    Py_XDECREF(seq);
    return ok;
}

/* Fills in `layers`, [n_layers], which point into the views of `a`. */
static bool get_layers(layer_args_t *a, const fd_geometry_t *g, fd_layer_t *layers) {
    const uint32_t n = g->n_layers;
    for (uint32_t i = 0; i < n; i++) layers[i] = (fd_layer_t){.kv_layer = i, .hadamard = a->hadamard};
    if (!get_ints(a->windows, "windows", n, UINT32_MAX, &layers->window) ||
        !get_ints(a->segments, "segments", n, UINT32_MAX, &layers->segment) ||
        !get_ints(a->kv_layers, "kv_layers", n, n - 1, &layers->kv_layer) ||
        !get_ints(a->selections, "selections", n, UINT32_MAX, &layers->selection) ||
        !get_fp32(a->sinks, "sinks", (size_t)n * g->n_q_heads, &a->sinks_view) ||
        !get_fp32(a->slopes, "slopes", g->n_q_heads, &a->slopes_view))
        return false;
    const float *sinks = a->sinks_view.buf;
    for (uint32_t i = 0; i < n; i++) {
        layers[i].slopes = a->slopes_view.buf;
        layers[i].sinks = sinks ? sinks + (size_t)i * g->n_q_heads : NULL;
    }
    return get_heads(a->heads, g, layers) && get_softcaps(a->softcaps, n, layers);
}
