/* A link's S-node describes the attention of each layer by an fd_layer_t, beyond the geometry. */
#ifndef FD_LAYERS_H
#define FD_LAYERS_H

#include "attention.h"
#include "region.h"

typedef struct {
    uint32_t window;  /* fd_attend_t.window: 0, or how many tokens a token sees, itself included */
    uint32_t segment; /* fd_attend_t.segment: 0, or the length of the segments that a token sees alone */
    /* The layer that stores the K and V that this layer attends to: this layer, or an earlier one that stores its own
     * (Gemma 3n and 4). A layer that shares another's stores nothing, and its KV rows are ignored. */
    uint32_t kv_layer;
    float softcap;       /* fd_attend_t.softcap */
    const float *slopes; /* fd_attend_t.slopes, [n_q_heads], or NULL */
    const float *sinks;  /* fd_attend_t.sinks, [n_q_heads], or NULL; -INFINITY: no sink */
} fd_layer_t;

/* The tokens that a token of the layer sees at most; 0: no limit. */
static inline uint32_t fd_layer_reach(const fd_layer_t *y) {
    return y->segment && (!y->window || y->segment < y->window) ? y->segment : y->window;
}

/* The number of layers that store K and V. */
static inline uint32_t fd_stored_layers(const fd_layer_t *layers, uint32_t n_layers) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_layers; i++) n += layers[i].kv_layer == i;
    return n;
}

static inline bool fd_all_below_infinity(const float *values, uint32_t n) {
    for (uint32_t i = 0; values && i < n; i++)
        if (!(values[i] < INFINITY)) return false;
    return true;
}

/* NULL if layer `i` is valid, else a readable reason. The layers before it are valid. */
static inline const char *fd_layer_error(const fd_layer_t *layers, uint32_t i, uint32_t n_q_heads) {
    const fd_layer_t *y = &layers[i];
    if (y->kv_layer > i || layers[y->kv_layer].kv_layer != y->kv_layer)
        return "a layer shares the K and V of a layer that does not store its own before it";
    if (!(y->softcap >= 0 && y->softcap < INFINITY)) return "a softcap is not a finite number of at least 0";
    if (!fd_all_below_infinity(y->slopes, n_q_heads)) return "a slope is not a finite number";
    for (uint32_t h = 0; y->slopes && h < n_q_heads; h++)
        if (y->slopes[h] == -INFINITY) return "a slope is not a finite number";
    if (!fd_all_below_infinity(y->sinks, n_q_heads)) return "a sink is not a number below infinity";
    return NULL;
}

#endif
