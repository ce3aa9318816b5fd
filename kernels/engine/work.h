/* The work of a thread on an item (plan.h) of a call: the thread appends the new K and V rows, attends and writes O
 * rows. */
#pragma once

#include "layers.h"
#include "plan.h"

/* The working memory of one thread. */
typedef struct {
    const uint8_t **chunks; /* [FD_UNIT_PAGES], at least index_topk: the chunks to attend to, or to gather from */
    float *acc, *m, *l;     /* softmax state of one unit: one query block, all heads of a span */
    float *k, *v;           /* [head_size], [v_size] the row to append, in fp32 */
    float *memory;          /* allocation of the five arrays of floats */
    /* Where layers select tokens: K of the selected tokens, and the index scores and numbers of the tokens that the row
     * in progress has selected so far, before the ones of the next FD_INDEX_PAGES pages. */
    uint8_t *gathered;
    float *scores;    /* [index_topk + FD_INDEX_PAGES * FD_PAGE_TOKENS] */
    uint32_t *tokens; /* likewise */
    uint32_t *which;  /* [index_topk] */
    float *weights;   /* [index_heads] */
} fd_scratch_t;

/* The most pages that are scored before the thread looks whether it should stop. */
#ifndef FD_INDEX_PAGES /* a test makes it smaller */
#define FD_INDEX_PAGES 64u
#endif

/* The part of a link that does not change from call to call, and its working memory. */
typedef struct {
    fd_geometry_t g;
    fd_layout_t layout;
    fd_plan_shape_t shapes[FD_MAX_LAYER_KINDS];
    uint32_t n_kinds;
    fd_kv_dtype_t kv_dtype;
    const fd_kv_ops_t *kv_ops, *index_ops; /* index_ops: of index keys */
    const fd_vec_ops_t *vec_ops;
    fd_kvcache_t *kv;
    float softmax_scale;
    fd_part_t part;
    fd_layer_t *layers; /* [n_layers] */
    uint32_t *kinds;    /* [n_layers] index among `shapes` */
    uint32_t *store_of; /* [n_layers] index in kv->stores of the K and V that a layer attends to */
    float *per_head;    /* allocation of the slopes and sinks of `layers` */
    uint32_t n_threads;
    fd_scratch_t *scratch; /* [n_threads] */
} fd_work_t;

/* A thread stops in the middle of an item once *word is no longer `expected`, or at `until_ns` (fd_now_ns). */
typedef struct {
    const uint64_t *word;
    uint64_t expected;
    uint64_t until_ns; /* 0: at no time */
} fd_stop_t;

/* Copies `layers`, which are of at most FD_MAX_LAYER_KINDS kinds, and `g`. `kv`, which has the layers that store K and
 * V, must outlive `w`. Returns FD_OK, or FD_INTERNAL if out of memory. */
fd_status_t fd_work_init(fd_work_t *w, const fd_geometry_t *g, fd_kvcache_t *kv, fd_kv_dtype_t dtype, fd_isa_t isa,
                         float softmax_scale, const fd_layer_t *layers, fd_part_t part, uint32_t n_threads);
void fd_work_destroy(fd_work_t *w);

/* Whether a layer appends K and V of its own, and does not attend to those of an earlier layer. */
static inline bool fd_work_appends(const fd_work_t *w, uint32_t layer) { return w->layers[layer].kv_layer == layer; }

/* Begins item `i` of a layer or of the copies, so that it is done from its start. */
void fd_work_begin(fd_step_t *step, uint32_t i);

/* Does item `i` of a layer on thread `thread`, from where it was left, and adds the bytes of KV-cache that it reads to
 * *kv_bytes. `slot` points to the slot in the region. Returns false if it has stopped before the end, which `stop` asks
 * for; any thread may go on with the item. At least one unit is done. */
bool fd_work_advance(const fd_work_t *w, fd_step_t *step, uint8_t *slot, uint32_t layer, uint32_t i, uint32_t thread,
                     const fd_stop_t *stop, uint64_t *kv_bytes);

/* Does item `i` of the `n_items` that the step's copies are cut into, from where it was left. Returns false if it has
 * stopped before the end; any thread may go on with the item. At least one plane of a page is copied. */
bool fd_work_copy(const fd_work_t *w, fd_step_t *step, uint32_t i, uint32_t n_items, const fd_stop_t *stop);
