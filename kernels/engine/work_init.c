/* The part of a link's work that does not change from call to call, and its working memory. */
#include <stdlib.h>
#include <string.h>

#include "work.h"

enum {
    MAX_Q_BLOCK = 16,
    INDEX_UNIT_WORK = 1 << 26, /* multiply-adds of index scores before a thread looks whether it should stop */
    ITEMS_PER_THREAD = 8,      /* several, so that a thread that is late or descheduled delays only a small item */
};

static float *alloc_floats(size_t n) { return aligned_alloc(64, fd_round_up(n * sizeof(float), 64)); }

/* Most query rows that a kernel takes at once: a block of query tokens for one KV head, or a panel of several heads. */
static size_t most_rows(const fd_plan_shape_t *shape) {
    return fd_max((size_t)shape->q_block * shape->group, FD_PANEL_ROWS);
}

/* Allocates what a thread needs where layers select tokens. */
static bool alloc_selection(const fd_work_t *w, fd_scratch_t *s) {
    const uint32_t topk = w->g.index_topk, n = topk + FD_INDEX_PAGES * FD_PAGE_TOKENS;
    const size_t chunk = fd_kv_chunk_bytes(w->kv_dtype, w->g.head_size, w->g.v_size, true);
    if (!topk) return true;
    s->gathered = aligned_alloc(FD_LINE, fd_pages_for(topk) * chunk);
    s->scores = alloc_floats(n);
    s->tokens = malloc(n * sizeof *s->tokens);
    s->which = malloc(topk * sizeof *s->which);
    s->weights = alloc_floats(w->g.index_heads);
    return s->gathered && s->scores && s->tokens && s->which && s->weights;
}

static bool alloc_scratch(fd_work_t *w) {
    size_t block = 0, stat = 0, row = 0;
    for (uint32_t i = 0; i < w->n_kinds; i++) {
        const fd_plan_shape_t *shape = &w->shapes[i];
        block = fd_max(block, fd_padded_floats(most_rows(shape) * shape->v_size));
        stat = fd_max(stat, fd_padded_floats(most_rows(shape)));
        row = fd_max(row, fd_padded_floats(fd_max(shape->head_size, shape->v_size)));
    }
    row = fd_max(row, fd_padded_floats(w->g.index_size));
    w->scratch = calloc(w->n_threads, sizeof *w->scratch);
    if (!w->scratch) return false;
    for (uint32_t t = 0; t < w->n_threads; t++) {
        fd_scratch_t *s = &w->scratch[t];
        s->chunks = malloc(fd_max(FD_UNIT_PAGES, w->g.index_topk) * sizeof *s->chunks);
        s->memory = alloc_floats(block + 2 * stat + 2 * row);
        if (!s->chunks || !s->memory || !alloc_selection(w, s)) return false;
        s->acc = s->memory;
        s->m = s->acc + block;
        s->l = s->m + stat;
        s->k = s->l + stat;
        s->v = s->k + row;
    }
    return true;
}

/* Copies the values of a layer's query heads to `to`; NULL stays NULL. */
static const float *copy_per_head(const fd_layer_t *layer, float *to, const float *values) {
    return values ? memcpy(to, values, layer->heads.n_q_heads * sizeof *to) : NULL;
}

/* The pages that are scored at once, where index queries have this many elements. */
static uint32_t index_unit(uint32_t elements) {
    return elements ? fd_max(fd_min(INDEX_UNIT_WORK / FD_PAGE_TOKENS / elements, FD_INDEX_PAGES), 1) : 1;
}

/* The shape of a layer of `w`, whose numbers beside the layers are known. */
static fd_plan_shape_t shape_of(const fd_work_t *w, const fd_layer_t *layer) {
    const fd_heads_t *h = &layer->heads;
    const uint32_t group = h->n_q_heads / h->n_kv_heads, block = FD_PANEL_ROWS / group,
                   index_elements = layer->selection == FD_SELECT_OWN ? w->g.index_heads * w->g.index_size : 0;
    return (fd_plan_shape_t){
        .n_kv_heads = h->n_kv_heads,
        .group = group,
        .head_size = h->head_size,
        .v_size = h->v_size,
        .v_in_k = h->v_in_k,
        .q_block = block < 1 || fd_is_part(w->part) || layer->selection ? 1
                   : block > MAX_Q_BLOCK                                ? MAX_Q_BLOCK
                                                                        : block,
        .window = fd_layer_reach(layer),
        .topk = layer->selection ? w->g.index_topk : 0,
        .index_elements = index_elements,
        .index_unit = index_unit(index_elements),
        .slopes = layer->slopes,
        .is_part = fd_is_part(w->part),
        .max_items = w->n_threads > 1 ? w->n_threads * ITEMS_PER_THREAD : 1, /* a single thread needs no cuts */
        .chunk_bytes = fd_kv_chunk_bytes(w->kv_dtype, h->head_size, h->v_size, h->v_in_k),
    };
}

/* The kind of layer `i`, a new one if no layer before it is of its kind. */
static uint32_t kind_of(fd_work_t *w, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (fd_same_kind(&w->layers[j], &w->layers[i])) return w->kinds[j];
    w->shapes[w->n_kinds] = shape_of(w, &w->layers[i]);
    return w->n_kinds++;
}

/* Copies the layers, and the slopes and sinks that they point to. */
static bool copy_layers(fd_work_t *w, const fd_layer_t *layers) {
    const uint32_t n = w->g.n_layers;
    size_t all_heads = 0;
    for (uint32_t i = 0; i < n; i++) all_heads += layers[i].heads.n_q_heads;
    w->layers = malloc(n * sizeof *w->layers);
    w->kinds = malloc(n * sizeof *w->kinds);
    w->store_of = malloc(n * sizeof *w->store_of);
    w->per_head = malloc(2 * all_heads * sizeof *w->per_head);
    if (!w->layers || !w->kinds || !w->store_of || !w->per_head) return false;
    float *slopes = w->per_head; /* of the next layer; its sinks follow them */
    uint32_t n_stored = 0;
    for (uint32_t i = 0; i < n; i++) {
        const fd_layer_t *from = &layers[i];
        float *sinks = slopes + from->heads.n_q_heads;
        w->layers[i] = *from;
        w->layers[i].slopes = copy_per_head(from, slopes, from->slopes);
        w->layers[i].sinks = copy_per_head(from, sinks, from->sinks);
        w->kinds[i] = kind_of(w, i);
        w->store_of[i] = fd_work_appends(w, i) ? n_stored++ : w->store_of[from->kv_layer];
        slopes = sinks + from->heads.n_q_heads;
    }
    return true;
}

fd_status_t fd_work_init(fd_work_t *w, const fd_geometry_t *g, fd_kvcache_t *kv, fd_kv_dtype_t dtype, fd_isa_t isa,
                         float softmax_scale, const fd_layer_t *layers, fd_part_t part, uint32_t n_threads) {
    memset(w, 0, sizeof *w);
    w->g = *g;
    w->layout = fd_region_layout(g);
    w->kv_dtype = dtype;
    w->kv_ops = fd_kv_ops(dtype, isa);
    w->index_ops = fd_kv_ops(fd_index_dtype(dtype), isa);
    w->vec_ops = fd_vec_ops(isa);
    w->kv = kv;
    w->softmax_scale = softmax_scale;
    w->part = part;
    w->n_threads = n_threads;
    if (copy_layers(w, layers) && alloc_scratch(w)) return FD_OK;
    fd_work_destroy(w);
    return FD_INTERNAL;
}

void fd_work_destroy(fd_work_t *w) {
    for (uint32_t t = 0; w->scratch && t < w->n_threads; t++) {
        fd_scratch_t *s = &w->scratch[t];
        free(s->chunks);
        free(s->memory);
        free(s->gathered);
        free(s->scores);
        free(s->tokens);
        free(s->which);
        free(s->weights);
    }
    free(w->scratch);
    free(w->layers);
    free(w->kinds);
    free(w->store_of);
    free(w->per_head);
    memset(w, 0, sizeof *w);
}
