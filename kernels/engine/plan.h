/* What a step works on and how its work is shared out, computed once a step and used for all its layers.
 *
 * The work of a layer is laid on a line of spans: entry by entry, KV heads by KV heads (as many at once as a kernel
 * takes, for they lie side by side in a page), page by page. The line is cut into items of about equal cost; an item
 * may begin and end anywhere, so a long sequence is cut among several and many short ones fill one. A span that is cut
 * leaves a partial result per piece; whoever finishes the last piece merges them by log-sum-exp. Every item has at most
 * two pieces that are not whole, so the room for partial results is bounded by the number of items.
 *
 * New rows are appended by the piece that reads them. So that no other piece can come too early, an attending
 * entry is never cut behind the page that receives its first new row: earlier pieces read only what earlier steps
 * wrote. An entry that only appends is cut at page boundaries. One with more than `q_block` rows that attend is not cut
 * within a span, which bounds partial results. No barrier is needed anywhere.
 *
 * The line is planned for the widest window of the model; a layer with a narrower one skips what it does not see.
 */
#ifndef FD_PLAN_H
#define FD_PLAN_H

#include "kvcache.h"

#define FD_NO_CUT UINT32_MAX
#define FD_LINE_END UINT32_MAX

/* A sequence's share of a step, all numbers checked. */
typedef struct {
    uint32_t pos, n_rows; /* first new position, new tokens */
    uint32_t row;         /* of the KV rows, and of the Q and O rows if it attends */
    uint32_t attend;
    uint32_t heads; /* KV heads of a span; divides n_kv_heads */
    size_t pages;   /* index of its first page number in fd_step_t.pages */
} fd_entry_t;

/* A point on the line of work: before `page` (of the sequence) of that entry and the span from KV head `head` on. 0 is
 * the beginning. */
typedef struct {
    uint32_t entry, head, page;
} fd_point_t;

static inline bool fd_same_span(fd_point_t a, fd_point_t b) { return a.entry == b.entry && a.head == b.head; }

typedef struct {
    fd_point_t begin, end;
    uint32_t cut;      /* item in which the span begins that this item begins within; FD_NO_CUT if it begins whole */
    uint32_t n_pieces; /* of the span that is cut at the end of this item and begins in it; else 0 */
} fd_item_t;

/* A slot's step. Owned by thread 0; other threads read it while a call is worked on. */
typedef struct {
    uint32_t valid, n_entries, n_rows, n_attend_rows, n_items;
    fd_row_t *table;     /* [max_rows] private copy of the row table */
    fd_entry_t *entries; /* [max_rows] */
    fd_item_t *items;    /* [max_items] */
    uint32_t *pages;     /* page numbers of all entries, one after another */
    size_t pages_capacity;
} fd_step_t;

/* What the planner must know besides the table. */
typedef struct {
    uint32_t n_kv_heads, group, head_size;
    uint32_t q_block;    /* query tokens a kernel is given at once */
    uint32_t max_window; /* of any layer; 0: some layer sees everything */
    uint32_t max_items;
} fd_plan_shape_t;

fd_status_t fd_step_init(fd_step_t *step, uint32_t max_rows, uint32_t max_items);
void fd_step_destroy(fd_step_t *step);

/* Checks step->table (a private copy, step->n_* already set from a checked header), makes room for it in the cache and
 * plans. On failure the cache is as before. The caller holds the cache's mutex. */
fd_status_t fd_step_plan(fd_step_t *step, fd_kvcache_t *kv, const fd_plan_shape_t *shape, char *err, size_t err_len);

/* First page that a query at `pos` sees through `window`. */
static inline uint32_t fd_first_page(uint32_t pos, uint32_t window) {
    return window && pos >= window ? (pos - window + 1) / FD_PAGE_TOKENS : 0;
}

#endif
