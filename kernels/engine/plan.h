/* The plan of a step: how the threads share the work of a call. It is computed once per step for each kind of layer.
 *
 * A span is the work of one entry for a few neighbouring KV heads, over all pages of the entry: as many heads as a
 * kernel takes at once, because they lie side by side in a page. The spans of a layer, ordered by entry and
 * then by head, form a line, and the line is cut into items of about equal cost. An item may begin and end at any page
 * of a span: a long sequence is cut into several items, and many short sequences share one. The parts into which cuts
 * divide a span are its pieces. Each attending piece leaves a partial result, and the thread that finishes the last
 * piece of a span merges them by log-sum-exp. An item has at most two pieces, at its ends, so the number of items
 * bounds the memory for partial results.
 *
 * The piece that attends to the new rows of an entry also appends them. An attending entry is never cut after the page
 * that receives its first new row, so its other pieces read only rows of earlier steps, and no barrier is needed. An
 * attending entry with more than `q_block` new rows is never cut within a span, which bounds the size of a partial
 * result. An entry that only appends is cut between any two pages.
 *
 * A thread does an item in units, between which it may stop (work.h). A unit attends one block of query rows to a few
 * pages. The plan alone decides which pages, so results do not depend on when a thread has stopped.
 *
 * A link that keeps a part of the tokens (parts.h) attends one query row at a time, because each row of an entry may
 * see as many kept tokens as the row before it. Its appending entries are not cut within a span, because their rows do
 * not follow each other in the cache.
 *
 * The queries of a partial entry (FD_ROW_PARTIAL) see the same tokens, and are attended one at a time, too. An entry
 * with several is not cut within a span.
 *
 * Layers of one kind have the same heads, see equally far and select tokens in the same way (fd_same_kind). A layer
 * skips the pages that it does not see.
 *
 * A layer that selects tokens (fd_layer_t.selection) attends one query row at a time, and no entry is cut within its
 * span: all tokens are scored before the first is attended to. The selected tokens stay in the step for the layers that
 * share them.
 */
#pragma once

#include "cache/kvcache.h"
#include "parts.h"

#define FD_NO_CUT UINT32_MAX
#define FD_LINE_END UINT32_MAX

/* One sequence's part of a step. All numbers have been checked. */
typedef struct {
    uint32_t pos, n_rows;      /* position of the first new token, number of new tokens */
    uint32_t n_cached, n_kept; /* kept tokens (parts.h) before the first new one, and among the new ones */
    uint32_t row;              /* index of the first KV row, and of the first Q and O row if the entry attends */
    uint32_t attend;
    bool partial;   /* FD_ROW_PARTIAL: `n_rows` counts queries, and each has two rows */
    uint32_t heads; /* KV heads of each span; divides n_kv_heads */
    uint32_t unit;  /* most pages that a thread attends to before it looks whether it should stop */
    size_t blocks;  /* index of the first block in fd_step_t.pages */
} fd_entry_t;

/* A point on the line: in the span of entry `entry` that begins with KV head `head`, right before page `page` of the
 * sequence. Page 0 stands for the beginning of the span, even if the window hides the first pages. */
typedef struct {
    uint32_t entry, head, page;
} fd_point_t;

/* True if both points are in the same span. */
static inline bool fd_same_span(fd_point_t a, fd_point_t b) { return a.entry == b.entry && a.head == b.head; }

typedef struct {
    fd_point_t begin, end;
    uint32_t cut;      /* index of the item in which this item's first span begins; FD_NO_CUT if it begins here */
    uint32_t n_pieces; /* number of pieces of the last span, if that span begins in this item and is cut; else 0 */
} fd_item_t;

/* The progress of an item in which a thread has stopped. Any thread may go on from here. */
typedef struct {
    fd_point_t at;     /* where the piece in progress begins */
    uint32_t appended; /* rows of that piece that have been appended */
    uint32_t row;      /* first query row of the block in progress */
    uint32_t page;     /* the next page that the block attends to; 0: none has been attended to */
    uint32_t copied;   /* of an item of copies: planes of pages that have been copied */
} fd_cursor_t;

/* The plan of the layers of one kind. Thread 0 owns it; the other threads read it while a call is served. */
typedef struct {
    uint32_t n_entries, n_items;
    fd_entry_t *entries; /* [max_rows] */
    fd_item_t *items;    /* [max_items] */
    /* [max_items] atomics: unfinished pieces of the span that n_pieces counts. The last piece sets n_pieces again. */
    uint32_t *pieces_left;
    uint32_t partial_rows; /* query rows of each partial result */
    uint64_t cost;         /* of one layer, see plan.c */
} fd_plan_t;

/* The step of a slot. Thread 0 owns it; the other threads read it while a call is served. */
typedef struct {
    uint32_t valid, n_entries, n_rows, n_attend_rows, n_layers, n_plans, n_sections;
    fd_row_t *table; /* [max_rows] private copy of the row table */
    fd_row_t *kept;  /* [max_rows] the table with positions and rows as the cache has them */
    fd_part_t part;
    fd_plan_t *plans;       /* [n_plans] one for each kind of layer */
    fd_plan_t *plan;        /* of the layer in progress: one of `plans` */
    fd_cursor_t *cursors;   /* [max_items] of the items of a layer, and before the first layer of the copies' items */
    uint32_t *left;         /* [max_items] room for a list of the items that are left of a call */
    float *partials;        /* three for each item: of its first span and of its last one if cut, and of one block */
    size_t partials_floats; /* allocated */
    uint32_t *pages;        /* [blocks][n_sections] page numbers of all entries, one after another */
    size_t pages_capacity;
    fd_page_copy_t *copies; /* [max_rows * n_sections], the first n_copies of which are under way */
    uint32_t n_copies;
    /* Where layers select tokens: the tokens that each attending row has selected last, [n_attend_rows][topk], and the
     * index scores of the tokens that each item's row in progress has selected so far, [max_items][topk]. */
    uint32_t *selected;
    size_t n_selected; /* allocated */
    float *selected_scores;
} fd_step_t;

/* The properties of a kind of layer that planning depends on. */
typedef struct {
    uint32_t n_kv_heads, group, head_size, v_size;
    bool v_in_k;
    uint32_t q_block;        /* most query tokens that a kernel takes at once */
    uint32_t window;         /* most tokens that a token sees; 0: all */
    uint32_t topk;           /* tokens that a row attends to at most, where the layer selects them; 0: it does not */
    uint32_t index_elements; /* of an index query, all heads together; 0: the layer has no indexer of its own */
    uint32_t index_unit;     /* pages that are scored before a thread looks whether it should stop */
    bool slopes;             /* ALiBi */
    bool is_part;            /* the link keeps a part of the tokens (parts.h) */
    uint32_t max_items;
    size_t chunk_bytes; /* of one KV head of a page */
} fd_plan_shape_t;

#define FD_UNIT_PAGES 1024u /* most pages of a unit */

fd_status_t fd_step_init(fd_step_t *step, uint32_t max_rows, uint32_t n_sections, const fd_plan_shape_t *shapes,
                         uint32_t n_shapes, fd_part_t part);
void fd_step_destroy(fd_step_t *step);

/* Checks step->table, takes pages for its new rows and plans the step for the shapes of fd_step_init. The caller has
 * copied the table out of the region, has set step->n_* from a checked header and holds the link's mutex. On failure
 * the cache is unchanged. The threads do step->copies before the first layer. */
fd_status_t fd_step_plan(fd_step_t *step, fd_kvcache_t *kv, const fd_plan_shape_t *shapes, fd_error_t *error);

/* The cost of the step's copies, in the unit of `cost`. */
uint64_t fd_step_copy_cost(const fd_step_t *step, const fd_kvcache_t *kv);
/* The number of items that the copies are cut into, at most max_items. */
uint32_t fd_step_copy_items(const fd_step_t *step, const fd_kvcache_t *kv, uint32_t max_items);

/* Rounds a number of floats up to whole cache lines. */
static inline size_t fd_padded_floats(size_t floats) { return fd_round_up(floats, FD_LINE / sizeof(float)); }

/* Floats of one partial result: acc [rows][v_size], then m and l [rows], each on cache lines of its own. */
static inline size_t fd_partial_floats(uint32_t rows, uint32_t v_size) {
    return fd_padded_floats((size_t)rows * v_size) + 2 * fd_padded_floats(rows);
}
