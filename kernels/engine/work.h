/* How a thread does an item (plan.h) of a call: it appends the new K and V rows, attends and writes O rows. */
#ifndef FD_WORK_H
#define FD_WORK_H

#include "plan.h"

/* The working memory of one thread. */
typedef struct {
    const uint8_t **chunks; /* [max_pages] the chunks to attend to */
    float *acc, *m, *l;     /* softmax state of one query block, all heads of a span */
    float *k, *v;           /* [head_size] the row to append, in fp32 */
    float *memory;          /* allocation of the five arrays of floats */
} fd_scratch_t;

/* The partial result of one piece. */
typedef struct {
    float *acc, *m, *l; /* [rows][head_size], [rows], [rows]; the query rows of all heads of a span */
} fd_partial_t;

/* The part of a link that does not change from call to call, and its working memory. */
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
    float *partial_memory;  /* allocation of the floats of `partials` */
    fd_partial_t *partials; /* [2 * max_items]: of item i, 2 * i if its first span is cut, 2 * i + 1 if its last is */
    uint32_t *pieces_left;  /* [max_items] atomic: unfinished pieces of the span that n_pieces counts */
} fd_work_t;

/* Copies `windows` and `g`; `kv` must outlive `w`. Returns FD_OK, or FD_INTERNAL if out of memory. */
fd_status_t fd_work_init(fd_work_t *w, const fd_geometry_t *g, fd_kvcache_t *kv, fd_kv_dtype_t dtype, fd_isa_t isa,
                         float softmax_scale, const uint32_t *windows, uint32_t n_threads);
void fd_work_destroy(fd_work_t *w);

/* Resets the piece counters of a step. To be called before the threads start on the items of a layer. */
void fd_work_begin(fd_work_t *w, const fd_step_t *step);

/* Does item `i` of a layer on thread `thread`; `slot` points to the slot in the region. Any thread may do any item;
 * each item is done once per layer. Returns the bytes of KV-cache that the item read. */
uint64_t fd_work_item(const fd_work_t *w, const fd_step_t *step, uint8_t *slot, uint32_t layer, uint32_t i,
                      uint32_t thread);

#endif
