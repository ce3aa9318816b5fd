#include "selection.h"

#include <string.h>

#include "attention/select.h"

/* The tokens that a row has selected, [topk]. */
static uint32_t *selected_of(const call_t *c, const fd_entry_t *e, uint32_t row) {
    return c->step->selected + (size_t)(e->row + row) * c->shape->topk;
}

void fd_append_index_key(call_t *c, const fd_entry_t *e, uint32_t row) {
    const fd_work_t *w = c->w;
    const uint32_t t = e->pos + row, size = w->g.index_size;
    const uint8_t *key = k_of(c, kv_row(c, e, row), c->shape->n_kv_heads);
    uint8_t *chunk = fd_kv_index_chunk(w->kv, c->store, page_of(c, e, t / FD_PAGE_TOKENS));
    w->vec_ops->load_act(c->scratch->k, key, size, w->g.act_dtype, 1.0f);
    w->index_ops->append(chunk, size, size, t % FD_PAGE_TOKENS, c->scratch->k, NULL, 0);
}

/* Writes the index scores of the tokens of pages [first, last) to `scores`. */
static void score_pages(call_t *c, const fd_entry_t *e, uint32_t row, uint32_t first, uint32_t last, float *scores) {
    const fd_work_t *w = c->w;
    fd_scratch_t *s = c->scratch;
    const uint8_t *q = q_row(c, e, row, 0) + c->shape->n_kv_heads * q_head_bytes(c),
                  *weights = q + c->shape->index_elements * fd_act_bytes(w->g.act_dtype);
    w->vec_ops->load_act(s->weights, weights, w->g.index_heads, w->g.act_dtype, 1.0f);
    for (uint32_t p = first; p < last; p++) s->chunks[p - first] = fd_kv_index_chunk(w->kv, c->store, page_of(c, e, p));
    w->index_ops->attend(&(fd_attend_t){
        .chunks = s->chunks,
        .n_chunks = last - first,
        .heads = 1,
        .head_size = w->g.index_size,
        .v_size = w->g.index_size,
        .v_in_k = 1,
        .group = w->g.index_heads,
        .q_len = 1,
        .softmax_scale = 1.0f,
        .act_dtype = w->g.act_dtype,
        .q = q,
        .index_scores = scores,
        .index_weights = s->weights,
    });
    c->kv_bytes += (uint64_t)(last - first) * w->kv->stores[c->store].index_bytes;
}

/* Selects among the tokens selected so far, which are of the pages before `first`, and those of pages [first, last). */
static void select_among(call_t *c, const fd_entry_t *e, uint32_t row, uint32_t first, uint32_t last) {
    fd_scratch_t *s = c->scratch;
    const uint32_t topk = c->shape->topk, from = first * FD_PAGE_TOKENS, before = fd_min(from, topk),
                   scored = fd_min(n_seen(c, e, row) - from, (last - first) * FD_PAGE_TOKENS), all = before + scored,
                   n = fd_min(all, topk);
    uint32_t *selected = selected_of(c, e, row);
    float *scores = c->step->selected_scores + (size_t)c->item * topk;
    memcpy(s->scores, scores, before * sizeof *scores);
    memcpy(s->tokens, selected, before * sizeof *selected);
    score_pages(c, e, row, first, last, s->scores + before);
    for (uint32_t i = 0; i < scored; i++) s->tokens[before + i] = from + i;
    fd_select_top(s->scores, all, n, s->which);
    for (uint32_t i = 0; i < n; i++) {
        scores[i] = s->scores[s->which[i]];
        selected[i] = s->tokens[s->which[i]];
    }
}

bool fd_select_tokens(call_t *c, const fd_entry_t *e, uint32_t row) {
    fd_cursor_t *cursor = &c->step->cursors[c->item];
    const uint32_t end = fd_pages_for(n_seen(c, e, row));
    while (cursor->page < end) {
        const uint32_t first = cursor->page, last = first + fd_min(end - first, c->shape->index_unit);
        select_among(c, e, row, first, last);
        cursor->page = last;
        if (should_stop(c, (uint64_t)(last - first) * FD_PAGE_TOKENS * c->shape->index_elements)) return false;
    }
    return true;
}

void fd_gather_selected(call_t *c, const fd_entry_t *e, uint32_t row) {
    const fd_work_t *w = c->w;
    fd_scratch_t *s = c->scratch;
    const uint32_t topk = c->shape->topk, *tokens = selected_of(c, e, row);
    for (uint32_t i = 0; i < topk; i++)
        s->chunks[i] = fd_kv_chunk(w->kv, c->store, page_of(c, e, tokens[i] / FD_PAGE_TOKENS), 0);
    fd_gather_k(w->kv_dtype, c->shape->head_size, s->chunks, tokens, topk, s->gathered);
    for (uint32_t p = 0; p < fd_pages_for(topk); p++) s->chunks[p] = s->gathered + p * c->shape->chunk_bytes;
}
