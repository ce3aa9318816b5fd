#include "plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/error.h"

/* The unit of cost is reading one cached token of one KV head for up to 8 query rows. */
enum {
    COST_APPEND = 4,  /* converting and storing one new token */
    COST_PIECE = 16,  /* reading Q and writing O of one KV head */
    COST_COPY = 2,    /* copying one cached token: it is read and written */
    MIN_ITEM = 512,   /* least cost of an item: a smaller one costs more to hand to a thread than to do */
    MIN_PIECE = 512,  /* least cached tokens x heads of a piece; a smaller piece is joined to its neighbour */
    MAX_WEIGHT = 1024 /* keeps sums of costs within 64 bits; the work itself has no such limit */
};

/* The most bytes of the cache that a unit reads, and its most multiply-adds of QK^T: about half a
 * millisecond of one core. */
#ifndef UNIT_BYTES /* a test makes units smaller */
#define UNIT_BYTES ((size_t)4 << 20)
#define UNIT_WORK (1ull << 24)
#endif

static bool init_plan(fd_plan_t *plan, uint32_t max_rows, uint32_t max_items) {
    plan->entries = malloc(max_rows * sizeof *plan->entries);
    plan->items = malloc(max_items * sizeof *plan->items);
    plan->pieces_left = malloc(max_items * sizeof *plan->pieces_left);
    return plan->entries && plan->items && plan->pieces_left;
}

static void destroy_plan(fd_plan_t *plan) {
    free(plan->entries);
    free(plan->items);
    free(plan->pieces_left);
}

/* The tokens that a row selects at most in any layer; 0: in no layer it selects tokens. */
static uint32_t most_selected(const fd_plan_shape_t *shapes, uint32_t n_shapes) {
    uint32_t most = 0;
    for (uint32_t k = 0; k < n_shapes; k++) most = fd_max(most, shapes[k].topk);
    return most;
}

fd_status_t fd_step_init(fd_step_t *step, uint32_t max_rows, uint32_t n_sections, const fd_plan_shape_t *shapes,
                         uint32_t n_shapes, fd_part_t part) {
    const uint32_t max_items = shapes[0].max_items; /* of every shape */
    memset(step, 0, sizeof *step);
    step->part = part;
    step->table = malloc(max_rows * sizeof *step->table);
    step->kept = malloc(max_rows * sizeof *step->kept);
    step->copies = malloc((size_t)max_rows * n_sections * sizeof *step->copies);
    step->n_sections = n_sections;
    step->cursors = malloc(max_items * sizeof *step->cursors);
    step->left = malloc(max_items * sizeof *step->left);
    step->plans = calloc(n_shapes, sizeof *step->plans);
    bool ok = step->table && step->kept && step->copies && step->cursors && step->left && step->plans;
    while (ok && step->n_plans < n_shapes) ok = init_plan(&step->plans[step->n_plans++], max_rows, max_items);
    step->plan = step->plans;
    const uint32_t topk = most_selected(shapes, n_shapes);
    if (ok && topk) ok = (step->selected_scores = malloc((size_t)max_items * topk * sizeof *step->selected_scores));
    if (ok) return FD_OK;
    fd_step_destroy(step);
    return FD_INTERNAL;
}

void fd_step_destroy(fd_step_t *step) {
    for (uint32_t i = 0; i < step->n_plans; i++) destroy_plan(&step->plans[i]);
    free(step->plans);
    free(step->kept);
    free(step->table);
    free(step->copies);
    free(step->cursors);
    free(step->left);
    free(step->partials);
    free(step->pages);
    free(step->selected);
    free(step->selected_scores);
    memset(step, 0, sizeof *step);
}

/* Checks the table against itself and against the call's header. */
static fd_status_t check_table(const fd_step_t *step, fd_error_t *error) {
    uint64_t rows = 0, attend_rows = 0;
    bool appending = false;
    for (uint32_t i = 0; i < step->n_entries; i++) {
        const fd_row_t *r = &step->table[i];
        if (r->flags & ~(uint32_t)(FD_ROW_ATTEND | FD_ROW_TRIM | FD_ROW_SLIDE | FD_ROW_PARTIAL))
            return FD_FAIL(FD_BAD_TABLE, "entry %u: unknown flags 0x%x", i, r->flags);
        if (r->reserved) return FD_FAIL(FD_BAD_TABLE, "entry %u: reserved field is not zero", i);
        if (!r->n_rows) return FD_FAIL(FD_BAD_TABLE, "entry %u has no rows", i);
        if (r->flags & FD_ROW_TRIM && !r->pos)
            return FD_FAIL(FD_BAD_TABLE, "entry %u trims its sequence to nothing", i);
        if (r->flags & FD_ROW_PARTIAL && (r->flags != (FD_ROW_ATTEND | FD_ROW_PARTIAL) || r->n_rows % 2 || !r->pos))
            return FD_FAIL(FD_BAD_TABLE,
                           "entry %u: a partial entry attends, has two rows for each query, and tokens to attend to",
                           i);
        rows += r->n_rows;
        if (r->flags & FD_ROW_ATTEND) {
            if (appending) return FD_FAIL(FD_BAD_TABLE, "entry %u attends but follows an entry that does not", i);
            attend_rows += r->n_rows;
        } else {
            appending = true;
        }
    }
    if (rows != step->n_rows || attend_rows != step->n_attend_rows)
        return FD_FAIL(FD_BAD_TABLE, "the table adds up to %llu rows, %llu of them attending; the call says %u and %u",
                       (unsigned long long)rows, (unsigned long long)attend_rows, step->n_rows, step->n_attend_rows);
    return FD_OK;
}

/* Checks that every layer sees all tokens where an entry is partial: only then can their answers be merged. */
static fd_status_t check_partial(const fd_step_t *step, const fd_plan_shape_t *shapes, fd_error_t *error) {
    uint32_t i = 0;
    while (i < step->n_entries && !(step->table[i].flags & FD_ROW_PARTIAL)) i++;
    for (uint32_t k = 0; i < step->n_entries && k < step->n_plans; k++)
        if (fd_is_part(step->part) || shapes[k].window || shapes[k].topk || shapes[k].slopes)
            return FD_FAIL(FD_BAD_TABLE,
                           "entry %u is partial, and layers have windows, ALiBi or an indexer, or R-nodes "
                           "share the tokens",
                           i);
    return FD_OK;
}

/* Checks that the call does not ask for more pairs of a row and a token than FD_MAX_CALL_WORK allows, whose products
 * have `elements` elements. */
static fd_status_t check_pairs(uint64_t pairs, uint64_t elements, const char *what, fd_error_t *error) {
    const uint64_t most = FD_MAX_CALL_WORK / elements;
    if (pairs <= most) return FD_OK;
    return FD_FAIL(FD_BAD_TABLE,
                   "the call %s %llu pairs of a row and a token; at most %llu are allowed with this model's heads",
                   what, (unsigned long long)pairs, (unsigned long long)most);
}

/* Checks the work that the call asks for in layers of one kind. The positions of the table have been checked against
 * the cache. */
static fd_status_t check_work(const fd_step_t *step, const fd_plan_shape_t *shape, fd_error_t *error) {
    uint64_t attended = 0, scored = 0;
    for (uint32_t i = 0; i < step->n_entries; i++) {
        const fd_row_t *r = &step->table[i];
        uint64_t seen = (uint64_t)r->pos + r->n_rows, most = (uint64_t)shape->window + r->n_rows;
        if (!(r->flags & FD_ROW_ATTEND)) continue;
        if (shape->window && seen > most) seen = most;
        scored += shape->index_elements ? r->n_rows * seen : 0;
        if (shape->topk && seen > shape->topk) seen = shape->topk;
        attended += r->n_rows * seen;
    }
    if (scored && check_pairs(scored, shape->index_elements, "scores", error) != FD_OK) return error->status;
    return check_pairs(attended, (uint64_t)shape->n_kv_heads * shape->group * shape->head_size, "attends", error);
}

static bool reserve_pages(fd_step_t *step, size_t n) {
    if (n <= step->pages_capacity) return true;
    size_t capacity = n + n / 2;
    uint32_t *pages = realloc(step->pages, capacity * sizeof *pages);
    if (!pages) return false;
    step->pages = pages;
    step->pages_capacity = capacity;
    return true;
}

/* The cost of a row's attention in a layer that selects tokens; the row sees `tokens` tokens. */
static uint64_t row_cost(const fd_plan_shape_t *shape, uint64_t tokens) {
    const uint64_t attended = tokens > shape->topk ? shape->topk : tokens,
                   scored = attended < tokens ? tokens * shape->index_elements / shape->head_size : 0;
    return attended * (1 + shape->group / 8) + scored / 8;
}

/* The cost of a span, and where it may be cut: before any page of (first, last]. Each page of [first, last) costs
 * `page_cost`; page `last` and all pages after it cost `rest` together. */
typedef struct {
    uint32_t first, last, min_piece; /* in pages */
    uint64_t page_cost, rest;
} span_t;

static span_t span_of(const fd_entry_t *e, const fd_plan_shape_t *shape) {
    uint32_t end = fd_pages_for((uint64_t)e->n_cached + e->n_kept);
    span_t s;
    if (!e->attend) {
        s.first = e->n_cached / FD_PAGE_TOKENS;
        s.last = shape->is_part ? s.first : end - 1;
        s.page_cost = FD_PAGE_TOKENS * COST_APPEND;
        s.rest = shape->is_part ? (uint64_t)e->n_kept * COST_APPEND : s.page_cost;
    } else {
        const uint64_t weight = fd_min(1 + (uint64_t)e->n_rows * shape->group / 8, MAX_WEIGHT);
        s.first = fd_first_block(e->n_cached, shape->window);
        s.last = e->n_rows > (e->partial ? 1 : shape->q_block) ? s.first : e->n_cached / FD_PAGE_TOKENS;
        s.page_cost = FD_PAGE_TOKENS * weight;
        s.rest = (end - s.last) * s.page_cost + (uint64_t)(e->partial ? 0 : e->n_rows) * COST_APPEND;
        if (shape->topk) {
            s.last = s.first;
            s.rest = e->n_rows * (row_cost(shape, (uint64_t)end * FD_PAGE_TOKENS) + COST_APPEND);
        }
    }
    s.rest += COST_PIECE;
    s.page_cost *= e->heads;
    s.rest *= e->heads;
    s.min_piece = MIN_PIECE / FD_PAGE_TOKENS > e->heads ? MIN_PIECE / FD_PAGE_TOKENS / e->heads : 1;
    return s;
}

static uint64_t span_cost(const span_t *s) { return (s->last - s->first) * s->page_cost + s->rest; }

/* The page before which to cut a span so that the cost of the pages before the cut is about `offset`. 0: cut before the
 * span; FD_LINE_END: cut after it. */
static uint32_t cut_span(const span_t *s, uint64_t offset) {
    uint64_t pages = offset / s->page_cost;
    if (pages < s->min_piece) return 0;
    pages = fd_min(pages, s->last - s->first);
    if (pages < s->min_piece) return offset * 2 < span_cost(s) ? 0 : FD_LINE_END;
    return s->first + (uint32_t)pages;
}

/* Sets `cut` and `n_pieces` of every item. */
static void link_pieces(fd_plan_t *plan) {
    uint32_t owner = FD_NO_CUT;
    for (uint32_t i = 0; i < plan->n_items; i++) {
        fd_item_t *item = &plan->items[i];
        item->n_pieces = 0;
        item->cut = item->begin.page ? owner : FD_NO_CUT;
        if (item->begin.page) plan->items[owner].n_pieces++;
        if (item->end.page && !(item->begin.page && fd_same_span(item->begin, item->end))) {
            owner = i;
            item->n_pieces = 1;
        }
    }
    for (uint32_t i = 0; i < plan->n_items; i++) plan->pieces_left[i] = plan->items[i].n_pieces;
}

/* The KV heads of a span: the most that a kernel takes at once, among the divisors of n_kv_heads. */
static uint32_t heads_of_span(const fd_row_t *r, const fd_plan_shape_t *shape) {
    if (!(r->flags & FD_ROW_ATTEND)) return 1;
    uint64_t rows = (uint64_t)r->n_rows * shape->group;
    uint32_t heads = rows * shape->n_kv_heads <= FD_PANEL_ROWS ? shape->n_kv_heads
                     : rows < FD_PANEL_ROWS                    ? FD_PANEL_ROWS / (uint32_t)rows
                                                               : 1;
    while (shape->n_kv_heads % heads) heads--;
    return heads;
}

/* The query rows that a kernel takes at once of a row table's entry: the rows of one block, for all heads of a span. */
static uint32_t block_rows(const fd_row_t *r, const fd_plan_shape_t *shape) {
    return heads_of_span(r, shape) * shape->group * (r->n_rows < shape->q_block ? r->n_rows : shape->q_block);
}

static uint32_t unit_of(const fd_row_t *r, const fd_plan_shape_t *shape) {
    const uint64_t by_work = UNIT_WORK / ((uint64_t)block_rows(r, shape) * shape->head_size * FD_PAGE_TOKENS),
                   by_bytes = UNIT_BYTES / (heads_of_span(r, shape) * shape->chunk_bytes);
    return fd_max(fd_min(fd_min(by_work, by_bytes), FD_UNIT_PAGES), 1);
}

/* Makes room for the partial results of any cuts of the table's attending entries. */
static bool reserve_partials(fd_step_t *step, fd_plan_t *plan, const fd_plan_shape_t *shape) {
    uint32_t rows = 0;
    for (uint32_t i = 0; i < step->n_entries && step->table[i].flags & FD_ROW_ATTEND; i++)
        rows = fd_max(rows, block_rows(&step->table[i], shape));
    plan->partial_rows = rows;
    const size_t floats = 3 * (size_t)shape->max_items * fd_partial_floats(rows, shape->v_size);
    if (floats <= step->partials_floats) return true;
    free(step->partials);
    step->partials = aligned_alloc(FD_LINE, floats * sizeof *step->partials); /* uses memory only where it is written */
    step->partials_floats = step->partials ? floats : 0;
    return step->partials;
}

/* Makes room for the tokens that the step's rows select, which are few enough (fd_index_error). */
static bool reserve_selected(fd_step_t *step, const fd_plan_shape_t *shapes) {
    const size_t n = (size_t)step->n_attend_rows * most_selected(shapes, step->n_plans);
    if (n <= step->n_selected) return true;
    free(step->selected);
    step->selected = malloc(n * sizeof *step->selected); /* uses memory only where it is written */
    step->n_selected = step->selected ? n : 0;
    return step->selected;
}

/* The cost of all spans of an entry. */
static uint64_t entry_cost(const span_t *s, const fd_entry_t *e, const fd_plan_shape_t *shape) {
    return span_cost(s) * (shape->n_kv_heads / e->heads);
}

/* The cost of the first i of n items together. If there is `plenty` of work, the items become smaller along the line,
 * the last one 1/n of the average, so that threads of different speed finish together. */
static uint64_t cut_at(uint64_t total, uint32_t i, uint32_t n, bool plenty) {
    const uint64_t rest = n - i, linear = total / n * rest + total % n * rest / n;
    return total - (plenty ? linear / n * rest + linear % n * rest / n : linear);
}

static void cut_line(fd_plan_t *plan, const fd_plan_shape_t *shape) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < plan->n_entries; i++) {
        span_t s = span_of(&plan->entries[i], shape);
        total += entry_cost(&s, &plan->entries[i], shape);
    }
    plan->cost = total;
    const uint32_t n = fd_max(fd_min(total / MIN_ITEM, shape->max_items), 1);
    fd_point_t begin = {0, 0, 0};
    uint32_t entry = 0;
    uint64_t before = 0; /* cost of the entries before `entry` */
    plan->n_items = 0;
    for (uint32_t i = 1; i <= n; i++) {
        fd_point_t end = {plan->n_entries, 0, 0};
        const uint64_t at = cut_at(total, i, n, n == shape->max_items);
        if (i < n && at < total) { /* where items shrink to nothing, a cut may lie at the end of the line */
            span_t s = span_of(&plan->entries[entry], shape);
            while (at - before >= entry_cost(&s, &plan->entries[entry], shape)) {
                before += entry_cost(&s, &plan->entries[entry], shape);
                s = span_of(&plan->entries[++entry], shape);
            }
            const uint32_t heads = plan->entries[entry].heads;
            end = (fd_point_t){entry, (uint32_t)((at - before) / span_cost(&s)) * heads, 0};
            end.page = cut_span(&s, (at - before) % span_cost(&s));
            if (end.page == FD_LINE_END) {
                end.page = 0;
                end.head += heads;
                if (end.head == shape->n_kv_heads) end = (fd_point_t){entry + 1, 0, 0};
            }
        }
        if (fd_same_span(begin, end) && begin.page == end.page) continue;
        plan->items[plan->n_items++] = (fd_item_t){begin, end, FD_NO_CUT, 0};
        begin = end;
    }
    link_pieces(plan);
}

/* Plans the layers of one kind. The step's pages have been taken. */
static void plan_kind(fd_plan_t *plan, const fd_step_t *step, const fd_kvcache_t *kv, const fd_plan_shape_t *shape) {
    size_t at = 0;
    uint32_t row = 0;
    for (uint32_t i = 0; i < step->n_entries; i++) {
        const fd_row_t *r = &step->table[i];
        const bool partial = r->flags & FD_ROW_PARTIAL;
        plan->entries[i] = (fd_entry_t){.pos = r->pos,
                                        .n_rows = partial ? r->n_rows / 2 : r->n_rows,
                                        .n_cached = step->kept[i].pos,
                                        .n_kept = step->kept[i].n_rows,
                                        .row = row,
                                        .attend = r->flags & FD_ROW_ATTEND,
                                        .partial = partial,
                                        .heads = heads_of_span(r, shape),
                                        .unit = unit_of(r, shape),
                                        .blocks = at};
        at += kv->sequences[r->seq_index].n_blocks;
        row += r->n_rows;
    }
    plan->n_entries = step->n_entries;
    cut_line(plan, shape);
}

/* Fills in `kept`, the table as the cache has it. Rows of partial entries and rows that other R-nodes keep are not
 * appended. */
static fd_status_t keep_part(fd_step_t *step, fd_error_t *error) {
    for (uint32_t i = 0; i < step->n_entries; i++) {
        const fd_row_t *r = &step->table[i];
        if (fd_is_part(step->part) && (uint64_t)r->pos + r->n_rows > UINT32_MAX)
            return FD_FAIL(FD_BAD_TABLE, "entry %u: its sequence would have %llu tokens, a length has 32 bits", i,
                           (unsigned long long)r->pos + r->n_rows);
        step->kept[i] = *r;
        step->kept[i].pos = fd_part_length(step->part, r->pos);
        step->kept[i].n_rows = r->flags & FD_ROW_PARTIAL
                                   ? 0
                                   : fd_part_length(step->part, (uint64_t)r->pos + r->n_rows) - step->kept[i].pos;
    }
    return FD_OK;
}

fd_status_t fd_step_plan(fd_step_t *step, fd_kvcache_t *kv, const fd_plan_shape_t *shapes, fd_error_t *error) {
    fd_status_t status = check_table(step, error);
    if (status == FD_OK) status = check_partial(step, shapes, error);
    if (status == FD_OK) status = keep_part(step, error);
    if (status == FD_OK) status = fd_kvcache_check(kv, step->kept, step->n_entries, error);
    for (uint32_t k = 0; status == FD_OK && k < step->n_plans; k++) status = check_work(step, &shapes[k], error);
    if (status != FD_OK) return status;
    size_t n_pages = 0; /* at most the pages of the lease + FD_MAX_SHARED_REFS, and those given back */
    for (uint32_t i = 0; i < step->n_entries; i++)
        n_pages += (size_t)fd_pages_for((uint64_t)step->kept[i].pos + step->kept[i].n_rows) * step->n_sections;
    if (!reserve_pages(step, n_pages)) return FD_FAIL(FD_INTERNAL, "no memory for %zu page numbers", n_pages);
    for (uint32_t k = 0; k < step->n_plans; k++)
        if (!reserve_partials(step, &step->plans[k], &shapes[k]))
            return FD_FAIL(FD_INTERNAL, "no memory for partial results");
    if (!reserve_selected(step, shapes)) return FD_FAIL(FD_INTERNAL, "no memory for the tokens that rows select");
    status = fd_kvcache_append(kv, step->kept, step->n_entries, step->copies, &step->n_copies, error);
    if (status != FD_OK) return status;
    uint32_t *to = step->pages;
    for (uint32_t i = 0; i < step->n_entries; i++) {
        const fd_sequence_t *s = &kv->sequences[step->table[i].seq_index];
        const size_t n = (size_t)s->n_blocks * step->n_sections;
        memcpy(to, s->pages, n * sizeof *to);
        to += n;
    }
    for (uint32_t k = 0; k < step->n_plans; k++) plan_kind(&step->plans[k], step, kv, &shapes[k]);
    return FD_OK;
}

uint64_t fd_step_copy_cost(const fd_step_t *step, const fd_kvcache_t *kv) {
    return (uint64_t)step->n_copies * kv->page_chunks * FD_PAGE_TOKENS * COST_COPY;
}

uint32_t fd_step_copy_items(const fd_step_t *step, const fd_kvcache_t *kv, uint32_t max_items) {
    const uint64_t planes = (uint64_t)step->n_copies * kv->planes.n_planes;
    return fd_max(fd_min(fd_min(fd_step_copy_cost(step, kv) / MIN_ITEM, planes), max_items), 1);
}
