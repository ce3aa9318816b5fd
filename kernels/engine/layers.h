/* A link's S-node describes the attention of each layer by an fd_layer_t, beyond the geometry. */
#pragma once

#include "attention/attention.h"
#include "cache/planes.h"
#include "region/region.h"

#define FD_MAX_LAYER_KINDS 16u /* of one link; each step is planned once for every kind */

/* Which of the tokens that a layer sees it attends to. The number goes over the wire. */
typedef enum {
    FD_SELECT_ALL = 0,
    /* The geometry's index_topk tokens that the layer's own indexer gives the largest scores (trained sparse attention:
     * DeepSeek-V3.2, GLM-5). The layer stores an index key for each token. */
    FD_SELECT_OWN = 1,
    FD_SELECT_SHARED = 2 /* the tokens that the last layer with an indexer has selected */
} fd_selection_t;

typedef struct {
    fd_heads_t heads; /* no more query heads and no longer rows than the geometry's, and the same v_in_k */
    uint32_t window;  /* fd_attend_t.window: 0, or how many tokens a token sees, itself included */
    uint32_t segment; /* fd_attend_t.segment: 0, or the length of the segments that a token sees alone */
    /* The layer that stores the K and V that this layer attends to: this layer, or an earlier one that stores its own
     * (Gemma 3n and 4). A layer that shares another's stores nothing, and its KV rows are ignored. */
    uint32_t kv_layer;
    uint32_t selection;  /* fd_selection_t */
    float softcap;       /* fd_attend_t.softcap */
    const float *slopes; /* fd_attend_t.slopes, [heads.n_q_heads], or NULL */
    const float *sinks;  /* fd_attend_t.sinks, [heads.n_q_heads], or NULL; -INFINITY: no sink */
    uint32_t hadamard;   /* fd_attend_t.hadamard */
} fd_layer_t;

/* The tokens that a token of the layer sees at most; 0: no limit. */
static inline uint32_t fd_layer_reach(const fd_layer_t *y) {
    return y->segment && (!y->window || y->segment < y->window) ? y->segment : y->window;
}

/* The heads of a layer as large as the geometry's. */
static inline fd_heads_t fd_geometry_heads(const fd_geometry_t *g) {
    return (fd_heads_t){g->n_q_heads, g->n_kv_heads, g->head_size, g->v_size, g->v_in_k};
}

static inline bool fd_same_heads(const fd_heads_t *a, const fd_heads_t *b) {
    return a->n_q_heads == b->n_q_heads && a->n_kv_heads == b->n_kv_heads && a->head_size == b->head_size &&
           a->v_size == b->v_size;
}

/* Layers of one kind share a plan: they have the same heads, see equally far and select tokens in the same way. */
static inline bool fd_same_kind(const fd_layer_t *a, const fd_layer_t *b) {
    return fd_same_heads(&a->heads, &b->heads) && fd_layer_reach(a) == fd_layer_reach(b) &&
           a->selection == b->selection;
}

/* Writes the layers that store K and V to stored[n_layers]; returns their number. */
static inline uint32_t fd_stored_layers(const fd_geometry_t *g, const fd_layer_t *layers, fd_stored_t *stored) {
    uint32_t n = 0, at[FD_MAX_LAYERS];
    for (uint32_t i = 0; i < g->n_layers; i++) {
        const uint32_t reach = fd_layer_reach(&layers[i]);
        if (layers[i].kv_layer == i) {
            const uint32_t index_size = layers[i].selection == FD_SELECT_OWN ? g->index_size : 0;
            stored[at[i] = n++] = (fd_stored_t){layers[i].heads, reach, index_size};
            continue;
        }
        fd_stored_t *shared = &stored[at[layers[i].kv_layer]];
        if (!reach || (shared->reach && shared->reach < reach)) shared->reach = reach;
    }
    return n;
}

static inline bool fd_all_below_infinity(const float *values, uint32_t n) {
    for (uint32_t i = 0; values && i < n; i++)
        if (!(values[i] < INFINITY)) return false;
    return true;
}

/* NULL if a layer of a link with this geometry may have these heads, else a readable reason. */
static inline const char *fd_heads_error(const fd_heads_t *h, const fd_geometry_t *g) {
    if (h->n_q_heads < 1 || h->n_q_heads > FD_MAX_HEADS)
        return "number of query heads is not within 1.." FD_TEXT(FD_MAX_HEADS);
    if (h->n_kv_heads < 1 || h->n_q_heads % h->n_kv_heads) return "query heads are not a multiple of KV heads";
    if (fd_head_size_error(h->head_size)) return fd_head_size_error(h->head_size);
    if (fd_head_size_error(h->v_size)) return fd_head_size_error(h->v_size);
    if (h->v_in_k != g->v_in_k) return "V is a part of K in some layers only";
    if (h->v_in_k && h->v_size > h->head_size) return "V is a part of K, but larger";
    const uint32_t v_size = h->v_in_k ? 0 : h->v_size, most_v_size = h->v_in_k ? 0 : g->v_size;
    if (h->n_q_heads * h->head_size > g->n_q_heads * g->head_size ||
        h->n_kv_heads * (h->head_size + v_size) > g->n_kv_heads * (g->head_size + most_v_size) ||
        h->n_q_heads * h->v_size > g->n_q_heads * g->v_size)
        return "the layer's rows are longer than those of the geometry";
    if (h->n_q_heads > g->n_q_heads) return "the layer has more query heads than the geometry"; /* sinks and slopes */
    return NULL;
}

/* NULL if layer `i` may select tokens as it says, else a readable reason. The layers before it are valid. */
static inline const char *fd_selection_error(const fd_layer_t *layers, uint32_t i, const fd_geometry_t *g) {
    const fd_layer_t *y = &layers[i];
    uint32_t own = 0;
    if (y->selection == FD_SELECT_ALL) return NULL;
    if (y->selection > FD_SELECT_SHARED) return "unknown selection of tokens";
    if (!g->index_topk) return "a layer selects tokens, but the geometry has no indexer";
    if (y->window || y->segment || y->slopes) return "a layer that selects tokens has a window, segments or ALiBi";
    if (y->heads.n_kv_heads != 1) return "a layer that selects tokens has several KV heads";
    if (y->selection == FD_SELECT_OWN) return y->kv_layer == i ? NULL : "a layer has an indexer, but no K of its own";
    while (own < i && layers[own].selection != FD_SELECT_OWN) own++;
    return own < i ? NULL : "a layer shares the tokens of an indexer, but no layer before it has one";
}

/* NULL if layer `i` is valid, else a readable reason. The layers before it are valid. */
static inline const char *fd_layer_error(const fd_layer_t *layers, uint32_t i, const fd_geometry_t *g) {
    const fd_layer_t *y = &layers[i];
    const uint32_t n_q_heads = y->heads.n_q_heads;
    const char *reason = fd_heads_error(&y->heads, g);
    if (reason) return reason;
    if (y->kv_layer > i || layers[y->kv_layer].kv_layer != y->kv_layer)
        return "a layer shares the K and V of a layer that does not store its own before it";
    const fd_heads_t *stored = &layers[y->kv_layer].heads;
    if (y->heads.n_kv_heads != stored->n_kv_heads || y->heads.head_size != stored->head_size ||
        y->heads.v_size != stored->v_size)
        return "a layer shares K and V whose heads are not its own";
    if ((reason = fd_selection_error(layers, i, g))) return reason;
    if (!(y->softcap >= 0 && y->softcap < INFINITY)) return "a softcap is not a finite number of at least 0";
    if (!fd_all_below_infinity(y->slopes, n_q_heads)) return "a slope is not a finite number";
    for (uint32_t h = 0; y->slopes && h < n_q_heads; h++)
        if (y->slopes[h] == -INFINITY) return "a slope is not a finite number";
    if (!fd_all_below_infinity(y->sinks, n_q_heads)) return "a sink is not a number below infinity";
    if (y->hadamard > FD_HADAMARD_ALL) return "unknown Hadamard transforms";
    if (y->heads.v_in_k && y->hadamard % FD_HADAMARD_ALL) return "V is a part of K and not transformed with it";
    return NULL;
}
