/* The state of a thread's work on an item, and the rows and pages that it reads: what work.c and selection.c share. */
#pragma once

#include "region/doorbell.h"
#include "work.h"

enum { WORK_PER_CLOCK = 1 << 20 /* multiply-adds that a thread does before it reads the clock again */ };

/* A thread's work on one item of a call. */
typedef struct {
    const fd_work_t *w;
    const fd_plan_shape_t *shape; /* of the layer's kind */
    const fd_step_t *step;
    fd_plan_t *plan;
    uint8_t *slot;
    const fd_layer_t *layer;
    uint32_t store, section; /* the layer's place in the cache (fd_work_t.store_of), and the section of its pages */
    bool appends;            /* whether the layer has K and V of its own (fd_work_appends) */
    uint32_t item;
    fd_scratch_t *scratch;
    const uint8_t *after, *after_q; /* first chunk and first query row of the item's next span, to prefetch; or NULL */
    uint64_t kv_bytes;
    const fd_stop_t *stop;
    uint64_t work; /* multiply-adds since the clock was read */
} call_t;

static inline bool is_told_to_stop(const fd_stop_t *stop) {
    return stop->word && __atomic_load_n(stop->word, __ATOMIC_RELAXED) != stop->expected;
}

static inline bool is_late(const fd_stop_t *stop) { return stop->until_ns && fd_now_ns() >= stop->until_ns; }

/* Whether the thread should stop after a unit of `work` multiply-adds. */
static inline bool should_stop(call_t *c, uint64_t work) {
    if (is_told_to_stop(c->stop)) return true;
    c->work += work;
    if (c->work < WORK_PER_CLOCK) return false;
    c->work = 0;
    return is_late(c->stop);
}

/* The first page that a query at `pos` sees in the layer. */
static inline uint32_t first_page(const call_t *c, uint32_t pos) {
    const uint32_t window = fd_first_block(pos, c->layer->window), segment = c->layer->segment,
                   start = segment ? pos / segment * segment / FD_PAGE_TOKENS : 0;
    return window > start ? window : start;
}

/* The page of a block of an entry, for the layer. */
static inline uint32_t page_of(const call_t *c, const fd_entry_t *e, uint32_t block) {
    return c->step->pages[(e->blocks + block) * c->step->n_sections + c->section];
}

/* Prefetches a row of the region. It is not in this core's cache, because the S-node or a carrier has written it. */
static inline void prefetch_row(const uint8_t *row, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* The bytes of a head of K, and of V, in a row. */
static inline size_t k_bytes(const call_t *c) { return c->shape->head_size * fd_act_bytes(c->w->g.act_dtype); }
static inline size_t v_bytes(const call_t *c) { return c->shape->v_size * fd_act_bytes(c->w->g.act_dtype); }

/* The new KV row of an entry, in the slot, and in it K and V of KV head `head`. */
static inline const uint8_t *kv_row(const call_t *c, const fd_entry_t *e, uint32_t row) {
    return c->slot + c->w->layout.kv + (size_t)(e->row + row) * c->w->layout.kv_row_bytes;
}
static inline const uint8_t *k_of(const call_t *c, const uint8_t *kv, uint32_t head) { return kv + head * k_bytes(c); }
static inline const uint8_t *v_of(const call_t *c, const uint8_t *kv, uint32_t head) {
    return kv + c->shape->n_kv_heads * k_bytes(c) + head * v_bytes(c);
}

/* The bytes of Q, and of O, for the query heads of a KV head. */
static inline size_t q_head_bytes(const call_t *c) { return c->shape->group * k_bytes(c); }
static inline size_t o_head_bytes(const call_t *c) { return c->shape->group * v_bytes(c); }

/* The row of the slot that has Q and O of query row `row` of an entry. */
static inline size_t slot_row(const fd_entry_t *e, uint32_t row) { return (size_t)e->row + (row << e->partial); }

static inline const uint8_t *q_row(const call_t *c, const fd_entry_t *e, uint32_t row, uint32_t head) {
    const fd_work_t *w = c->w;
    return c->slot + w->layout.q + slot_row(e, row) * w->layout.q_row_bytes + head * q_head_bytes(c);
}
static inline uint8_t *o_row(const call_t *c, const fd_entry_t *e, uint32_t row, uint32_t head) {
    const fd_work_t *w = c->w;
    return c->slot + w->layout.o + slot_row(e, row) * w->layout.o_row_bytes + head * o_head_bytes(c);
}

/* Whether an entry's answers are parts, which the S-node merges with others. */
static inline bool is_partial(const call_t *c, const fd_entry_t *e) { return e->partial || fd_is_part(c->w->part); }

/* How many of the tokens in the cache query row `row` of an entry sees, windows aside. */
static inline uint32_t n_seen(const call_t *c, const fd_entry_t *e, uint32_t row) {
    return e->partial ? e->n_cached : fd_part_length(c->w->part, (uint64_t)e->pos + row + 1);
}
