#include "work.h"

#include <math.h>
#include <string.h>

#include "item.h"
#include "selection.h"

enum { APPEND_ROWS = 512 /* rows that are appended before the thread looks whether it should stop */ };

void fd_work_begin(fd_step_t *step, uint32_t i) { step->cursors[i] = (fd_cursor_t){.at = step->plan->items[i].begin}; }

/* The result of one query block over some of its pages. */
typedef struct {
    float *acc, *m, *l; /* [rows][v_size], [rows], [rows]; the query rows of all heads of a span */
} fd_partial_t;

enum { FIRST = 0, LAST = 1, BLOCK = 2 }; /* the three partial results of an item (fd_step_t.partials) */

static fd_partial_t partial_of(const call_t *c, uint32_t item, uint32_t which) {
    const uint32_t rows = c->plan->partial_rows;
    const size_t acc = fd_padded_floats((size_t)rows * c->shape->v_size);
    float *at = c->step->partials + (3 * (size_t)item + which) * fd_partial_floats(rows, c->shape->v_size);
    return (fd_partial_t){at, at + acc, at + acc + fd_padded_floats(rows)};
}

/* Appends rows [from, to) of an entry, counted from its first new row, for `heads` KV heads from `head` on. */
static void append_rows(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t heads, uint32_t from, uint32_t to) {
    const fd_work_t *w = c->w;
    const uint32_t k_size = c->shape->head_size, v_size = c->shape->v_size, act = w->g.act_dtype;
    const uint8_t *kv = kv_row(c, e, from), *k = k_of(c, kv, head), *v = v_of(c, kv, head);
    for (uint32_t j = from; j < to; j++, k += w->layout.kv_row_bytes, v += w->layout.kv_row_bytes) {
        if (!fd_part_keeps(w->part, e->pos + j)) continue;
        uint32_t t = fd_part_length(w->part, e->pos + j);
        uint8_t *chunk = fd_kv_chunk(w->kv, c->store, page_of(c, e, t / FD_PAGE_TOKENS), head);
        for (uint32_t h = 0; h < heads; h++, chunk += c->shape->chunk_bytes) {
            w->vec_ops->load_act(c->scratch->k, k + h * k_bytes(c), k_size, act, 1.0f);
            if (!c->shape->v_in_k) w->vec_ops->load_act(c->scratch->v, v + h * v_bytes(c), v_size, act, 1.0f);
            w->kv_ops->append(chunk, k_size, v_size, t % FD_PAGE_TOKENS, c->scratch->k,
                              c->shape->v_in_k ? NULL : c->scratch->v, c->layer->hadamard);
        }
        if (c->layer->selection == FD_SELECT_OWN) fd_append_index_key(c, e, j);
    }
}

/* A span whose new row is appended while a kernel attends to it (can_pend). */
typedef struct {
    call_t *c;
    const fd_entry_t *e;
    uint32_t head;
} pending_t;

/* Prefetches the new row of a head, and the cache lines of the chunk that receive it, while the kernel attends the head
 * before it. */
static void prefetch_pending(const pending_t *p, uint32_t head) {
    const fd_work_t *w = p->c->w;
    if (head == p->e->heads) return;
    const uint8_t *kv = kv_row(p->c, p->e, 0);
    prefetch_row(k_of(p->c, kv, p->head + head), k_bytes(p->c));
    if (!p->c->shape->v_in_k) prefetch_row(v_of(p->c, kv, p->head + head), v_bytes(p->c));
    const uint8_t *chunk =
        fd_kv_chunk(w->kv, p->c->store, page_of(p->c, p->e, p->e->n_cached / FD_PAGE_TOKENS), p->head + head);
    const fd_plan_shape_t *shape = p->c->shape;
    fd_kv_prefetch_append(w->kv_dtype, chunk, shape->head_size, shape->v_size, shape->v_in_k,
                          p->e->n_cached % FD_PAGE_TOKENS);
}

/* fd_attend_t.before_last_chunk: the kernel calls this right before it reads the last chunk of a head. */
static void append_pending(void *context, uint32_t head) {
    const pending_t *p = context;
    append_rows(p->c, p->e, p->head + head, 1, 0, p->e->n_rows);
    prefetch_pending(p, head + 1);
    if (p->c->after_q && head + 1 == p->e->heads) prefetch_row(p->c->after_q, q_head_bytes(p->c));
}

/* Returns true if append_pending can append the span's new rows while a kernel attends to the last page: there is only
 * one row, so it goes to that page. A row that selects tokens attends to none of the pages themselves. */
static bool can_pend(const call_t *c, const fd_entry_t *e) {
    return e->n_rows == 1 && e->n_kept == 1 && e->heads * c->shape->group <= FD_PANEL_ROWS && !fd_row_selects(c, e, 0);
}

/* Writes the log-sum-exp of query rows [from, from + q_len): fp32, one for each query head, behind the layer's O heads
 * or, of a partial entry, in the O row after them. It is that of the scores, sinks excluded, and -infinity for a row
 * that sees no token. */
static void store_sums(const call_t *c, const fd_entry_t *e, uint32_t head, uint32_t from, uint32_t q_len,
                       fd_partial_t p) {
    const uint32_t group = c->shape->group;
    const size_t o_bytes = e->partial ? c->w->layout.o_row_bytes : c->shape->n_kv_heads * o_head_bytes(c);
    for (uint32_t i = 0; i < e->heads * q_len; i++) {
        uint8_t *to = o_row(c, e, from + i % q_len, 0) + o_bytes + (head + i / q_len) * group * sizeof(float);
        for (uint32_t r = 0; r < group; r++) {
            const float m = p.m[i * group + r], l = p.l[i * group + r], sum = l > 0 ? m + logf(l) : -INFINITY;
            memcpy(to + r * sizeof sum, &sum, sizeof sum);
        }
    }
}

/* Normalises the attention of query rows [from, from + q_len) and writes it as O rows. */
static void store_block(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t from, uint32_t q_len, fd_partial_t p) {
    const fd_work_t *w = c->w;
    const uint32_t group = c->shape->group, v_size = c->shape->v_size;
    const float *sinks = is_partial(c, e) ? NULL : c->layer->sinks;
    uint8_t *o = o_row(c, e, from, head);
    if (is_partial(c, e)) store_sums(c, e, head, from, q_len, p);
    for (uint32_t i = 0; i < e->heads * q_len; i++) {
        float *m = p.m + i * group, *l = p.l + i * group;
        for (uint32_t r = 0; sinks && r < group; r++)
            l[r] = fd_add_sink(l[r], m[r], sinks[(head + i / q_len) * group + r]);
        uint8_t *row = o + i / q_len * o_head_bytes(c) + i % q_len * w->layout.o_row_bytes;
        w->vec_ops->finish(row, p.acc + (size_t)i * group * v_size, l, group, v_size, w->g.act_dtype);
    }
}

/* Attends no token: the block's rows see none of the piece's pages. */
static void attend_nothing(const call_t *c, const fd_entry_t *e, uint32_t q_len, fd_partial_t out) {
    const uint32_t rows = e->heads * q_len * c->shape->group;
    for (uint32_t i = 0; i < rows; i++) {
        out.m[i] = -INFINITY;
        out.l[i] = 0;
    }
    memset(out.acc, 0, (size_t)rows * c->shape->v_size * sizeof *out.acc);
}

/* A piece of an attending span, and what becomes of its result. */
typedef struct {
    const fd_entry_t *e;
    uint32_t head;        /* the span's first KV head */
    uint32_t first, last; /* its pages; `last` is FD_LINE_END if they go to the end, new rows included */
    bool pending;         /* the new row is appended while a kernel attends to the last page (can_pend) */
    bool whole;           /* the span has no other pieces, so O rows are written; else the result is left in `sum` */
    fd_partial_t sum;
} piece_t;

/* Some query rows of a piece, and some of its pages. */
typedef struct {
    uint32_t from, q_len; /* query rows [from, from + q_len) of the entry */
    uint32_t first, last; /* pages */
    bool selected;        /* the pages are the ones that K of the row's selected tokens fills; `q_len` is 1 */
    bool append;          /* the entry's new row is appended meanwhile */
    bool to_o;            /* these pages are all that the rows see: O rows are written, and `out` is scratch memory */
    fd_partial_t out;     /* the result */
    const uint8_t *next;  /* the chunk that the thread reads after these, or NULL */
} unit_t;

static void attend_unit(call_t *c, const fd_entry_t *e, uint32_t head, const unit_t *u) {
    const fd_work_t *w = c->w;
    if (u->selected) fd_gather_selected(c, e, u->from);
    for (uint32_t p = u->first; !u->selected && p < u->last; p++)
        c->scratch->chunks[p - u->first] = fd_kv_chunk(w->kv, c->store, page_of(c, e, p), head);
    const uint32_t q_head = head * c->shape->group;
    pending_t appended = {c, e, head};
    const fd_attend_t a = {
        .chunks = c->scratch->chunks,
        .n_chunks = u->last - u->first,
        .heads = e->heads,
        .head_stride = c->shape->chunk_bytes,
        .first_token = u->first * FD_PAGE_TOKENS,
        .head_size = c->shape->head_size,
        .v_size = c->shape->v_size,
        .v_in_k = c->shape->v_in_k,
        .group = c->shape->group,
        .q_len = u->q_len,
        .q_pos = (u->selected ? c->shape->topk : n_seen(c, e, u->from)) - 1,
        .window = c->layer->window,
        .segment = c->layer->segment,
        .softmax_scale = w->softmax_scale,
        .softcap = c->layer->softcap,
        .slopes = c->layer->slopes ? c->layer->slopes + q_head : NULL,
        .sinks = c->layer->sinks && !is_partial(c, e) ? c->layer->sinks + q_head : NULL,
        .hadamard = c->layer->hadamard,
        .act_dtype = w->g.act_dtype,
        .q = q_row(c, e, u->from, head),
        .q_head_stride = q_head_bytes(c),
        .q_token_stride = w->layout.q_row_bytes,
        .o = u->to_o ? o_row(c, e, u->from, head) : NULL,
        .o_head_stride = o_head_bytes(c),
        .o_token_stride = w->layout.o_row_bytes,
        .acc = u->out.acc,
        .m = u->out.m,
        .l = u->out.l,
        .prefetch_next = u->next,
        .before_last_chunk = u->append ? append_pending : NULL,
        .context = &appended,
    };
    if (u->append) prefetch_pending(&appended, 0);
    w->kv_ops->attend(&a);
    if (u->to_o && is_partial(c, e)) store_sums(c, e, head, u->from, u->q_len, u->out);
    c->kv_bytes += (uint64_t)(u->last - u->first) * e->heads * c->shape->chunk_bytes;
}

/* Goes on with the query row that the cursor is in, which attends to selected tokens. Returns false if the thread
 * should stop; the row is done if the cursor's page is 0 then. */
static bool attend_selected(call_t *c, const piece_t *piece) {
    fd_cursor_t *cursor = &c->step->cursors[c->item];
    const uint32_t topk = c->shape->topk;
    const unit_t unit = {
        .from = cursor->row,
        .q_len = 1,
        .last = fd_pages_for(topk),
        .selected = true,
        .to_o = true,
        .out = {c->scratch->acc, c->scratch->m, c->scratch->l},
        .next = c->after,
    };
    if (c->layer->selection == FD_SELECT_OWN && !fd_select_tokens(c, piece->e, cursor->row)) return false;
    attend_unit(c, piece->e, piece->head, &unit);
    cursor->page = 0;
    return !should_stop(c, (uint64_t)c->shape->group * c->shape->head_size * topk);
}

/* Goes on with the block of `q_len` query rows that the cursor is in: attends to the piece's pages that the layer's
 * window reaches. Returns false if the thread should stop; the block is done if the cursor's page is 0 then. */
static bool attend_block(call_t *c, const piece_t *piece, uint32_t q_len) {
    const fd_work_t *w = c->w;
    const fd_entry_t *e = piece->e;
    const fd_partial_t sum = piece->sum, unit_sum = {c->scratch->acc, c->scratch->m, c->scratch->l};
    fd_cursor_t *cursor = &c->step->cursors[c->item];
    const uint32_t from = cursor->row, rows = e->heads * q_len * c->shape->group, n = n_seen(c, e, from);
    const uint32_t seen = n ? first_page(c, n - 1) : 0, end = fd_pages_for((uint64_t)n + q_len - 1);
    const uint32_t first = piece->first < seen ? seen : piece->first, last = piece->last > end ? end : piece->last;
    uint32_t page = cursor->page ? cursor->page : first, n_pages;
    bool go_on = true;
    if (fd_row_selects(c, e, from)) return attend_selected(c, piece);
    if (first >= last) {
        if (piece->pending) append_rows(c, e, piece->head, e->heads, 0, e->n_rows);
        attend_nothing(c, e, q_len, sum);
    }
    for (; page < last && go_on; page += n_pages, cursor->page = page) {
        n_pages = last - page < e->unit ? last - page : e->unit;
        const bool final = page + n_pages == last, to_o = piece->whole && page == first && final;
        const unit_t unit = {
            .from = from,
            .q_len = q_len,
            .first = page,
            .last = page + n_pages,
            .append = piece->pending && final,
            .to_o = to_o,
            .out = page == first && !to_o ? sum : unit_sum,
            .next = final ? c->after : fd_kv_chunk(w->kv, c->store, page_of(c, e, page + n_pages), piece->head),
        };
        attend_unit(c, e, piece->head, &unit);
        if (page != first)
            w->vec_ops->merge(sum.m, sum.l, sum.acc, unit_sum.m, unit_sum.l, unit_sum.acc, rows, c->shape->v_size);
        go_on = !should_stop(c, (uint64_t)rows * c->shape->head_size * n_pages * FD_PAGE_TOKENS);
    }
    if (page < last) return false;
    if (piece->whole && (first >= last || last - first > e->unit)) store_block(c, e, piece->head, from, q_len, sum);
    cursor->page = 0;
    return go_on;
}

/* Merges the pieces of the span that is cut at the end of item `owner` and writes O rows. The first piece is the last
 * of that item; the others are the first pieces of the items that follow. */
static void merge_pieces(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t owner) {
    const fd_work_t *w = c->w;
    fd_partial_t sum = partial_of(c, owner, LAST);
    for (uint32_t i = owner + 1; i < owner + c->plan->items[owner].n_pieces; i++) {
        fd_partial_t p = partial_of(c, i, FIRST);
        w->vec_ops->merge(sum.m, sum.l, sum.acc, p.m, p.l, p.acc, e->heads * e->n_rows * c->shape->group,
                          c->shape->v_size);
    }
    store_block(c, e, head, 0, e->n_rows, sum);
}

/* A piece of a cut span is done. The thread that does the span's last piece merges all of them. */
static void end_piece(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t owner) {
    uint32_t *left = &c->plan->pieces_left[owner];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL)) return;
    __atomic_store_n(left, c->plan->items[owner].n_pieces, __ATOMIC_RELAXED); /* for the next layer */
    merge_pieces(c, e, head, owner);
}

/* Goes on with the piece of an attending span that the cursor is in: pages [first, last). It appends the new rows,
 * unless the layer shares the K and V that an earlier layer has appended. Returns false if the thread should stop;
 * *done says whether the piece is done. */
static bool attend_piece(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t first, uint32_t last, bool *done) {
    fd_cursor_t *cursor = &c->step->cursors[c->item];
    const bool to_end = last == FD_LINE_END, whole = !first && to_end, new_rows = to_end && c->appends && !e->partial;
    const piece_t piece = {
        .e = e,
        .head = head,
        .first = first,
        .last = last,
        .pending = new_rows && can_pend(c, e),
        .whole = whole,
        .sum = partial_of(c, c->item,
                          whole   ? BLOCK
                          : first ? FIRST
                                  : LAST),
    };
    bool go_on = true;
    *done = false;
    if (piece.pending) cursor->appended = e->n_rows;
    while (new_rows && go_on && cursor->appended < e->n_rows) {
        const uint32_t from = cursor->appended, n = e->n_rows - from < APPEND_ROWS ? e->n_rows - from : APPEND_ROWS;
        append_rows(c, e, head, e->heads, from, from + n);
        cursor->appended += n;
        go_on = n < APPEND_ROWS || !should_stop(c, (uint64_t)n * e->heads * c->shape->head_size * 8);
    }
    while (go_on && cursor->row < e->n_rows) {
        const uint32_t left = e->n_rows - cursor->row, most = e->partial ? 1 : c->shape->q_block,
                       q_len = left < most ? left : most;
        go_on = attend_block(c, &piece, q_len);
        if (!cursor->page) cursor->row += q_len;
    }
    *done = cursor->row == e->n_rows;
    if (*done && !whole) end_piece(c, e, head, first ? c->plan->items[c->item].cut : c->item);
    return go_on;
}

/* Goes on with a piece that only appends: the new rows of an entry that lie in pages [first, last). Returns false if
 * the thread should stop; *done says whether the piece is done. */
static bool append_piece(call_t *c, const fd_entry_t *e, uint32_t head, uint32_t first, uint32_t last, bool *done) {
    fd_cursor_t *cursor = &c->step->cursors[c->item];
    uint64_t from = (uint64_t)first * FD_PAGE_TOKENS, to = (uint64_t)last * FD_PAGE_TOKENS,
             end = (uint64_t)e->pos + e->n_rows;
    if (c->shape->is_part) from = 0, to = end; /* the span is not cut */
    if (from < e->pos) from = e->pos;
    if (to > end) to = end;
    for (from += cursor->appended; from < to;) {
        const uint32_t n = to - from < APPEND_ROWS ? (uint32_t)(to - from) : APPEND_ROWS;
        append_rows(c, e, head, e->heads, (uint32_t)(from - e->pos), (uint32_t)(from - e->pos) + n);
        cursor->appended += n;
        from += n;
        *done = from == to;
        if (should_stop(c, (uint64_t)n * e->heads * c->shape->head_size * 8)) return false;
    }
    *done = true;
    return true;
}

/* The beginning of the span after the one that contains `at`. */
static fd_point_t next_span(const call_t *c, fd_point_t at) {
    uint32_t head = at.head + c->plan->entries[at.entry].heads;
    return head < c->shape->n_kv_heads ? (fd_point_t){.entry = at.entry, .head = head}
                                       : (fd_point_t){.entry = at.entry + 1};
}

/* Sets `after` and `after_q` for the span at `at`, if the item continues with that span and the span attends. */
static void prefetch_next_span(call_t *c, fd_point_t at, fd_point_t end) {
    const fd_entry_t *e = &c->plan->entries[at.entry];
    if ((fd_same_span(at, end) && !end.page) || !e->attend || !n_seen(c, e, 0)) return;
    c->after = fd_kv_chunk(c->w->kv, c->store, page_of(c, e, first_page(c, n_seen(c, e, 0) - 1)), at.head);
    c->after_q = q_row(c, e, 0, at.head);
}

bool fd_work_advance(const fd_work_t *w, fd_step_t *step, uint8_t *slot, uint32_t layer, uint32_t i, uint32_t thread,
                     const fd_stop_t *stop, uint64_t *kv_bytes) {
    fd_plan_t *plan = step->plan;
    call_t c = {.w = w,
                .shape = &w->shapes[w->kinds[layer]],
                .step = step,
                .plan = plan,
                .slot = slot,
                .layer = &w->layers[layer],
                .store = w->store_of[layer],
                .section = w->kv->stores[w->store_of[layer]].section,
                .appends = fd_work_appends(w, layer),
                .item = i,
                .scratch = &w->scratch[thread],
                .stop = stop};
    const fd_item_t *item = &plan->items[i];
    fd_cursor_t *cursor = &step->cursors[i];
    bool go_on = true, done = false;
    while (go_on && !done) {
        const fd_point_t at = cursor->at;
        const bool final = fd_same_span(at, item->end);
        const uint32_t last = final ? item->end.page : FD_LINE_END;
        if (!last) {
            done = true;
            break;
        }
        const fd_entry_t *e = &plan->entries[at.entry];
        const fd_point_t next = next_span(&c, at);
        c.after = c.after_q = NULL;
        if (!final) prefetch_next_span(&c, next, item->end);
        bool piece_done = true; /* of an entry that only appends, in a layer that does not */
        if (e->attend) go_on = attend_piece(&c, e, at.head, at.page, last, &piece_done);
        else if (c.appends) go_on = append_piece(&c, e, at.head, at.page, last, &piece_done);
        if (!piece_done) continue;
        done = final || (fd_same_span(next, item->end) && !item->end.page);
        *cursor = (fd_cursor_t){.at = next};
    }
    *kv_bytes += c.kv_bytes;
    return done;
}

bool fd_work_copy(const fd_work_t *w, fd_step_t *step, uint32_t i, uint32_t n_items, const fd_stop_t *stop) {
    const uint64_t all = (uint64_t)step->n_copies * w->kv->planes.n_planes, first = all * i / n_items,
                   n = all * (i + 1) / n_items - first;
    uint32_t *done = &step->cursors[i].copied;
    while (*done < n) {
        const uint64_t at = first + (*done)++;
        fd_kvcache_copy(w->kv, step->copies[at % step->n_copies], (uint32_t)(at / step->n_copies));
        if (is_told_to_stop(stop) || is_late(stop)) break;
    }
    return *done == n;
}
