/* One layer's call, done item by item (plan.h): append the new K and V, attend, write O rows. */
#ifndef FD_WORK_H
#define FD_WORK_H

#include "plan.h"

/* What a thread needs for itself. */
typedef struct {
    const uint8_t **chunks; /* [n_pages] */
    float *acc, *m, *l;     /* one query block, all heads of a span */
    float *k, *v;           /* [head_size] */
    float *memory;          /* of the five above */
} fd_scratch_t;

/* A partial result of one piece. */
typedef struct {
    float *acc, *m, *l; /* [rows][head_size], [rows], the same; rows: of all heads of a span */
} fd_partial_t;

/* What is fixed for a link. */
typedef struct {
    fd_geometry_t g;
    fd_layout_t layout;
    fd_plan_shape_t shape;
    fd_kv_dtype_t kv_dtype;
    const fd_kv_ops_t *kv_ops;
    const fd_vec_ops_t *vec_ops;
    fd_kvcache_t *kv;
    float softmax_scale;
    uint32_t *windows; /* [n_layers] */
    uint32_t n_threads;
    fd_scratch_t *scratch;  /* [n_threads] */
    float *partial_memory;  /* of `partials` */
    fd_partial_t *partials; /* [2 * max_items]: of the piece that an item begins within, of the one it ends within */
    uint32_t *pieces_left;  /* [max_items] atomic: of the span cut at the item's end */
} fd_work_t;

/* Takes over nothing; `windows` is copied. Returns FD_OK or FD_INTERNAL (no memory). */
fd_status_t fd_work_init(fd_work_t *w, const fd_geometry_t *g, fd_kvcache_t *kv, fd_kv_dtype_t dtype, fd_isa_t isa,
                         float softmax_scale, const uint32_t *windows, uint32_t n_threads);
void fd_work_destroy(fd_work_t *w);

/* Readies the counters of a step's cut spans; before the items of a layer are let loose. */
void fd_work_begin(fd_work_t *w, const fd_step_t *step);

/* Does item `i` of a layer on thread `thread`; `slot` is the head of the slot in the region. Any thread may do any
 * item, each once a layer. Returns the bytes of KV-cache read. */
uint64_t fd_work_item(const fd_work_t *w, const fd_step_t *step, uint8_t *slot, uint32_t layer, uint32_t i,
                      uint32_t thread);

#endif
