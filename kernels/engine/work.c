#include "work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_Q_BLOCK = 16,
    ITEMS_PER_THREAD = 8, /* several, so that a thread that is late or descheduled delays only a small item */
    LANES = 16            /* floats in a cache line */
};

static float *alloc_floats(size_t n) { return aligned_alloc(64, fd_round_up(n * sizeof(float), 64)); }

static size_t padded(size_t floats) { return fd_round_up(floats, LANES); }

/* Most query rows that a kernel takes at once: a block of query tokens for one KV head, or a panel of several heads. */
static size_t most_rows(const fd_work_t *w) {
    size_t rows = (size_t)w->shape.q_block * w->shape.group;
    return rows > FD_PANEL_ROWS ? rows : FD_PANEL_ROWS;
}

static bool alloc_scratch(fd_work_t *w) {
    size_t rows = most_rows(w), hs = w->g.head_size;
    size_t block = padded(rows * hs), stat = padded(rows), row = padded(hs);
    w->scratch = calloc(w->n_threads, sizeof *w->scratch);
    if (!w->scratch) return false;
    for (uint32_t t = 0; t < w->n_threads; t++) {
        fd_scratch_t *s = &w->scratch[t];
        s->chunks = malloc(w->kv->max_pages * sizeof *s->chunks);
        s->memory = alloc_floats(block + 2 * stat + 2 * row);
        if (!s->chunks || !s->memory) return false;
        s->acc = s->memory;
        s->m = s->acc + block;
        s->l = s->m + stat;
        s->k = s->l + stat;
        s->v = s->k + row;
    }
    return true;
}

static bool alloc_partials(fd_work_t *w) {
    size_t rows = most_rows(w);
    size_t block = padded(rows * w->g.head_size), stat = padded(rows), n = 2 * (size_t)w->shape.max_items;
    w->partials = malloc(n * sizeof *w->partials);
    w->partial_memory = alloc_floats(n * (block + 2 * stat));
    w->pieces_left = calloc(w->shape.max_items, sizeof *w->pieces_left);
    if (!w->partials || !w->partial_memory || !w->pieces_left) return false;
    float *next = w->partial_memory;
    for (size_t i = 0; i < n; i++, next += block + 2 * stat)
        w->partials[i] = (fd_partial_t){next, next + block, next + block + stat};
    return true;
}

fd_status_t fd_work_init(fd_work_t *w, const fd_geometry_t *g, fd_kvcache_t *kv, fd_kv_dtype_t dtype, fd_isa_t isa,
                         float softmax_scale, const uint32_t *windows, uint32_t n_threads) {
    memset(w, 0, sizeof *w);
    w->g = *g;
    w->layout = fd_region_layout(g);
    w->kv_dtype = dtype;
    w->kv_ops = fd_kv_ops(dtype, isa);
    w->vec_ops = fd_vec_ops(isa);
    w->kv = kv;
    w->softmax_scale = softmax_scale;
    w->n_threads = n_threads;
    w->windows = malloc(g->n_layers * sizeof *w->windows);
    if (!w->windows) return FD_INTERNAL;
    memcpy(w->windows, windows, g->n_layers * sizeof *w->windows);
    w->shape.n_kv_heads = g->n_kv_heads;
    w->shape.group = g->n_q_heads / g->n_kv_heads;
    w->shape.head_size = g->head_size;
    uint32_t block = FD_PANEL_ROWS / w->shape.group;
    w->shape.q_block = block < 1 ? 1 : block > MAX_Q_BLOCK ? MAX_Q_BLOCK : block;
    w->shape.max_items = n_threads > 1 ? n_threads * ITEMS_PER_THREAD : 1; /* a single thread needs no cuts */
    w->shape.max_window = windows[0];
    for (uint32_t i = 1; i < g->n_layers && w->shape.max_window; i++)
        if (!windows[i] || windows[i] > w->shape.max_window) w->shape.max_window = windows[i];
    if (alloc_scratch(w) && (w->shape.max_items == 1 || alloc_partials(w))) return FD_OK;
    fd_work_destroy(w);
    return FD_INTERNAL;
}

void fd_work_destroy(fd_work_t *w) {
    for (uint32_t t = 0; w->scratch && t < w->n_threads; t++) {
        free(w->scratch[t].chunks);
        free(w->scratch[t].memory);
    }
    free(w->scratch);
    free(w->partials);
    free(w->partial_memory);
    free(w->pieces_left);
    free(w->windows);
    memset(w, 0, sizeof *w);
}

void fd_work_begin(fd_work_t *w, const fd_step_t *step) {
    for (uint32_t i = 0; i < step->n_items; i++)
        if (step->items[i].n_pieces) __atomic_store_n(&w->pieces_left[i], step->items[i].n_pieces, __ATOMIC_RELAXED);
}

/* The state of one item. */
typedef struct {
    const fd_work_t *w;
    const fd_step_t *step;
    uint8_t *slot;
    uint32_t layer, window;
    fd_scratch_t *scratch;
    const uint8_t *after, *after_q; /* first chunk and first query row of the item's next span, to prefetch; or NULL */
    uint64_t kv_bytes;
} ctx_t;

/* Prefetches a row of the region. It is not in this core's cache, because the S-node or a carrier has written it. */
static void prefetch_row(const uint8_t *row, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* K of KV head `head` of an entry's new row, in the slot. V of that head follows n_kv_heads heads later. */
static const uint8_t *kv_row(const ctx_t *c, const fd_entry_t *e, uint32_t row, uint32_t head) {
    const fd_work_t *w = c->w;
    return c->slot + w->layout.kv + (size_t)(e->row + row) * w->layout.kv_row_bytes +
           head * w->g.head_size * fd_act_bytes(w->g.act_dtype);
}
static size_t q_head_bytes(const fd_work_t *w) {
    return (size_t)w->shape.group * w->g.head_size * fd_act_bytes(w->g.act_dtype);
}
static const uint8_t *q_row(const ctx_t *c, const fd_entry_t *e, uint32_t row, uint32_t head) {
    const fd_work_t *w = c->w;
    return c->slot + w->layout.q + (size_t)(e->row + row) * w->layout.q_row_bytes + head * q_head_bytes(w);
}

/* Appends rows [from, to) of an entry, counted from its first new row, for `heads` KV heads from `head` on. */
static void append_rows(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t heads, uint32_t from, uint32_t to) {
    const fd_work_t *w = c->w;
    uint32_t hs = w->g.head_size, act = w->g.act_dtype;
    size_t bytes = hs * fd_act_bytes(act);
    const uint8_t *k = kv_row(c, e, from, head);
    for (uint32_t j = from; j < to; j++, k += w->layout.kv_row_bytes) {
        uint32_t t = e->pos + j;
        uint8_t *chunk = fd_kv_chunk(w->kv, c->layer, c->step->pages[e->pages + t / FD_PAGE_TOKENS], head);
        for (uint32_t h = 0; h < heads; h++, chunk += w->kv->chunk_bytes) {
            w->vec_ops->load_act(c->scratch->k, k + h * bytes, hs, act, 1.0f);
            w->vec_ops->load_act(c->scratch->v, k + (w->g.n_kv_heads + h) * bytes, hs, act, 1.0f);
            w->kv_ops->append(chunk, hs, hs, t % FD_PAGE_TOKENS, c->scratch->k, c->scratch->v);
        }
    }
}

/* A span whose new row is appended while the kernel attends it (leave_pending). */
typedef struct {
    ctx_t *c;
    const fd_entry_t *e;
    uint32_t head;
} pending_t;

/* Prefetches the new row of a head, and the cache lines of the chunk that receive it, while the kernel attends the head
 * before it. */
static void prefetch_pending(const pending_t *p, uint32_t head) {
    const fd_work_t *w = p->c->w;
    if (head == p->e->heads) return;
    const size_t bytes = w->g.head_size * fd_act_bytes(w->g.act_dtype);
    const uint8_t *k = kv_row(p->c, p->e, 0, p->head + head);
    prefetch_row(k, bytes);
    prefetch_row(k + w->g.n_kv_heads * bytes, bytes);
    const uint8_t *chunk =
        fd_kv_chunk(w->kv, p->c->layer, p->c->step->pages[p->e->pages + p->e->pos / FD_PAGE_TOKENS], p->head + head);
    fd_kv_prefetch_append(w->kv_dtype, chunk, w->g.head_size, w->g.head_size, p->e->pos % FD_PAGE_TOKENS);
}

/* fd_attend_t.before_last_chunk: the kernel calls this right before it reads the last chunk of a head. */
static void append_pending(void *context, uint32_t head) {
    const pending_t *p = context;
    append_rows(p->c, p->e, p->head + head, 1, 0, p->e->n_rows);
    prefetch_pending(p, head + 1);
    if (p->c->after_q && head + 1 == p->e->heads) prefetch_row(p->c->after_q, q_head_bytes(p->c->w));
}

/* Makes the page that receives the entry's first new row a copy of the page that its sequence shared. */
static void copy_shared_page(ctx_t *c, const fd_entry_t *e, uint32_t head) {
    if (e->copy_from == FD_NO_PAGE) return;
    const uint32_t dst = c->step->pages[e->pages + e->pos / FD_PAGE_TOKENS];
    fd_kvcache_copy(c->w->kv, c->layer, e->copy_from, dst, head, e->heads);
}

/* Returns true if append_pending can append the span's new rows: there is only one, so it goes to the last page. Else
 * appends them now. */
static bool leave_pending(ctx_t *c, const fd_entry_t *e, uint32_t head) {
    copy_shared_page(c, e, head);
    if (e->n_rows == 1 && e->heads * c->w->shape.group <= FD_PANEL_ROWS) return true;
    append_rows(c, e, head, e->heads, 0, e->n_rows);
    return false;
}

static uint8_t *o_row(const ctx_t *c, const fd_entry_t *e, uint32_t row, uint32_t head) {
    const fd_work_t *w = c->w;
    return c->slot + w->layout.o + (size_t)(e->row + row) * w->layout.q_row_bytes + head * q_head_bytes(w);
}

/* Normalises the attention of query rows [from, from + q_len) and writes it as O rows. */
static void store_block(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t from, uint32_t q_len, fd_partial_t p) {
    const fd_work_t *w = c->w;
    const uint32_t group = w->shape.group, hs = w->g.head_size;
    uint8_t *o = o_row(c, e, from, head);
    for (uint32_t i = 0; i < e->heads * q_len; i++) {
        uint8_t *row = o + i / q_len * q_head_bytes(w) + i % q_len * w->layout.q_row_bytes;
        w->vec_ops->finish(row, p.acc + (size_t)i * group * hs, p.l + i * group, group, hs, w->g.act_dtype);
    }
}

/* Attends query rows [from, from + q_len) of an entry to those of its pages [first, last) that the layer's window
 * reaches, and leaves the result in `out`. `pending` is what leave_pending returned; if true, the pages include the
 * last one. `whole`: the span has no other pieces, so O rows are written and `out` is only scratch memory. */
static void attend_block(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t from, uint32_t q_len, uint32_t first,
                         uint32_t last, bool pending, bool whole, fd_partial_t out) {
    const fd_work_t *w = c->w;
    uint32_t hs = w->g.head_size, group = w->shape.group, q_pos = e->pos + from;
    uint32_t seen = fd_first_page(q_pos, c->window), end = fd_pages_for((uint64_t)q_pos + q_len);
    if (first < seen) first = seen;
    if (last > end) last = end;
    if (first >= last) {
        if (pending) append_rows(c, e, head, e->heads, 0, e->n_rows);
        for (uint32_t i = 0; i < e->heads * q_len * group; i++) {
            out.m[i] = -INFINITY;
            out.l[i] = 0;
        }
        memset(out.acc, 0, (size_t)e->heads * q_len * group * hs * sizeof *out.acc);
        if (whole) store_block(c, e, head, from, q_len, out);
        return;
    }
    const uint32_t *pages = c->step->pages + e->pages;
    for (uint32_t p = first; p < last; p++)
        c->scratch->chunks[p - first] = fd_kv_chunk(w->kv, c->layer, pages[p], head);
    pending_t appended = {c, e, head};
    const fd_attend_t a = {
        .chunks = c->scratch->chunks,
        .n_chunks = last - first,
        .heads = e->heads,
        .head_stride = w->kv->chunk_bytes,
        .first_token = first * FD_PAGE_TOKENS,
        .head_size = hs,
        .v_size = hs,
        .group = group,
        .q_len = q_len,
        .q_pos = q_pos,
        .window = c->window,
        .softmax_scale = w->softmax_scale,
        .act_dtype = w->g.act_dtype,
        .q = q_row(c, e, from, head),
        .q_head_stride = q_head_bytes(w),
        .q_token_stride = w->layout.q_row_bytes,
        .o = whole ? o_row(c, e, from, head) : NULL,
        .o_head_stride = q_head_bytes(w),
        .o_token_stride = w->layout.q_row_bytes,
        .acc = out.acc,
        .m = out.m,
        .l = out.l,
        .prefetch_next = c->after,
        .before_last_chunk = pending ? append_pending : NULL,
        .context = &appended,
    };
    if (pending) prefetch_pending(&appended, 0);
    w->kv_ops->attend(&a);
    c->kv_bytes += (uint64_t)(last - first) * e->heads * w->kv->chunk_bytes;
}

static void attend_whole(ctx_t *c, const fd_entry_t *e, uint32_t head) {
    fd_partial_t own = {c->scratch->acc, c->scratch->m, c->scratch->l};
    const bool pending = leave_pending(c, e, head);
    for (uint32_t from = 0; from < e->n_rows;) {
        uint32_t q_len = e->n_rows - from < c->w->shape.q_block ? e->n_rows - from : c->w->shape.q_block;
        attend_block(c, e, head, from, q_len, 0, UINT32_MAX, pending, true, own);
        from += q_len;
    }
}

/* Merges the pieces of the span that is cut at the end of item `owner` and writes O rows. The first piece is the last
 * of that item; the others are the first pieces of the items that follow. */
static void merge_pieces(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t owner) {
    const fd_work_t *w = c->w;
    fd_partial_t sum = w->partials[2 * owner + 1];
    for (uint32_t i = owner + 1; i < owner + c->step->items[owner].n_pieces; i++) {
        fd_partial_t p = w->partials[2 * i];
        w->vec_ops->merge(sum.m, sum.l, sum.acc, p.m, p.l, p.acc, e->heads * e->n_rows * w->shape.group,
                          w->g.head_size);
    }
    store_block(c, e, head, 0, e->n_rows, sum);
}

/* Attends one piece of a cut span: pages [first, last). `last` FD_LINE_END means up to the end, new rows included. */
static void attend_piece(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t first, uint32_t last, uint32_t item) {
    uint32_t owner = first ? c->step->items[item].cut : item;
    const bool pending = last == FD_LINE_END && leave_pending(c, e, head);
    attend_block(c, e, head, 0, e->n_rows, first, last, pending, false, c->w->partials[2 * item + (first == 0)]);
    if (__atomic_sub_fetch(&c->w->pieces_left[owner], 1, __ATOMIC_ACQ_REL) == 0) merge_pieces(c, e, head, owner);
}

/* Appends the new rows of an entry that lie in pages [first, last). */
static void append_piece(ctx_t *c, const fd_entry_t *e, uint32_t head, uint32_t first, uint32_t last) {
    uint64_t from = (uint64_t)first * FD_PAGE_TOKENS, to = (uint64_t)last * FD_PAGE_TOKENS,
             end = (uint64_t)e->pos + e->n_rows;
    if (from <= e->pos) {
        copy_shared_page(c, e, head);
        from = e->pos;
    }
    if (to > end) to = end;
    append_rows(c, e, head, e->heads, (uint32_t)(from - e->pos), (uint32_t)(to - e->pos));
}

/* The beginning of the span after the one that contains `at`. */
static fd_point_t next_span(const fd_work_t *w, const fd_step_t *step, fd_point_t at) {
    uint32_t head = at.head + step->entries[at.entry].heads;
    return head < w->shape.n_kv_heads ? (fd_point_t){.entry = at.entry, .head = head}
                                      : (fd_point_t){.entry = at.entry + 1};
}

/* Sets `after` and `after_q` for the span at `at`, if the item continues with that span and the span attends. */
static void prefetch_next_span(ctx_t *c, fd_point_t at, fd_point_t end) {
    const fd_entry_t *e = &c->step->entries[at.entry];
    if ((fd_same_span(at, end) && !end.page) || !e->attend) return;
    c->after = fd_kv_chunk(c->w->kv, c->layer, c->step->pages[e->pages + fd_first_page(e->pos, c->window)], at.head);
    c->after_q = q_row(c, e, 0, at.head);
}

uint64_t fd_work_item(const fd_work_t *w, const fd_step_t *step, uint8_t *slot, uint32_t layer, uint32_t i,
                      uint32_t thread) {
    ctx_t c = {w, step, slot, layer, w->windows[layer], &w->scratch[thread], NULL, NULL, 0};
    const fd_item_t *item = &step->items[i];
    fd_point_t at = item->begin;
    for (;;) {
        bool final = fd_same_span(at, item->end);
        uint32_t last = final ? item->end.page : FD_LINE_END;
        if (!last) break;
        const fd_entry_t *e = &step->entries[at.entry];
        const fd_point_t next = next_span(w, step, at);
        c.after = c.after_q = NULL;
        if (!final) prefetch_next_span(&c, next, item->end);
        if (!e->attend) append_piece(&c, e, at.head, at.page, last);
        else if (!at.page && last == FD_LINE_END) attend_whole(&c, e, at.head);
        else attend_piece(&c, e, at.head, at.page, last, i);
        if (final) break;
        at = next;
    }
    return c.kv_bytes;
}
