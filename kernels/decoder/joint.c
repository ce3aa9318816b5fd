#include "joint.h"

#include <string.h>

#include "cpu/parallel.h"

enum { LINE = 64 };

/* A step's rows on their way through a joint. The scratch has two areas, from which the operations read and into which
 * they write in turns, one for the outputs of experts and for queries of latent attention, and one for the scratch of
 * experts and states, if there are any. Each begins with a cache line: then AMX's products store whole lines of outputs
 * past the caches, and load whole lines of rows. */
typedef struct {
    const fd_joints_t *j;
    const fd_joint_rows_t *r;
    void *a, *b, *of_experts, *more;
    /* The next norm adds scale * addend to the residual stream, and multiplies it by the factor; NULL: not. */
    const void *addend, *factor;
    float scale;
    unsigned threads;
} pass_t;

static size_t area_bytes(const fd_joints_t *j, size_t rows) {
    return fd_round_up(rows * j->widest * j->number_bytes, LINE);
}

static size_t experts_scratch(const fd_feed_forward_t *f, size_t rows) {
    return f->experts ? fd_experts_scratch(f->experts, rows) : 0;
}

size_t fd_joint_scratch(const fd_joints_t *j, const fd_joint_rows_t *r) {
    const size_t rows = r->rows;
    size_t more = 0;
    for (size_t i = 0; i < j->n_layers; i++) more = fd_max(more, experts_scratch(&j->layers[i].feed_forward, rows));
    for (size_t i = 0; i < j->n_states; i++) {
        more = fd_max(more, experts_scratch(&j->states[i].feed_forward, rows));
        more = fd_max(more, fd_delta_scratch(j->states[i].rule, r->n_singles) * sizeof(float));
    }
    return (more || j->layers->latent ? 3 : 2) * area_bytes(j, rows) + more + LINE - 1;
}

static fd_status_t multiply(const pass_t *s, fd_loop_kind_t kind, const fd_products_t *p, const void *x, void *y) {
    const fd_loop_kind_t before = fd_loops_compute(kind);
    const fd_status_t status = fd_products_multiply(p, x, y, s->r->rows, s->j->number_bytes, s->threads);
    fd_loops_compute(before);
    return status;
}

/* Normalises y [rows][hidden], unless `weight` is NULL. */
static void normalise(const pass_t *s, void *y, const void *weight) {
    const fd_norm_rows_t o = {.x = y, .out = y, .weight = weight, .eps = s->j->eps, .width = s->j->hidden};
    if (weight) fd_norm_rows(s->j->ops, &o, s->r->rows, s->threads);
}

/* Ends a part of a block: the ranks sum its outputs y [rows][hidden], and weights, if there are any, normalise them. */
static fd_status_t sum_over_ranks(const pass_t *s, void *y, const void *post_norm) {
    const fd_joints_t *j = s->j;
    fd_status_t status = FD_OK;
    if (j->reduction) status = fd_reduction_sum(j->reduction, y, s->r->rows * j->hidden, j->act_dtype, s->threads);
    if (status == FD_OK) normalise(s, y, post_norm);
    return status;
}

/* The norm that follows is to add `y` to the residual stream. */
static void add_later(pass_t *s, const void *y, float scale) { s->addend = y, s->scale = scale; }

/* Adds what is to be added to the residual stream, and writes its norm to `out`, unless `weight` is NULL. */
static void norm_to(pass_t *s, const void *weight, void *out) {
    const fd_joints_t *j = s->j;
    const fd_norm_rows_t o = {s->r->x, out, s->addend, weight, s->factor, s->scale, j->eps, j->hidden};
    if (s->addend || s->factor || weight) fd_norm_rows(j->ops, &o, s->r->rows, s->threads);
    s->addend = s->factor = NULL;
}

/* The same; returns the norm, in area b, or the stream itself. */
static const void *norm(pass_t *s, const void *weight) {
    norm_to(s, weight, s->b);
    return weight ? s->b : s->r->x;
}

/* Adds the outputs of the shared expert, in area a, to those of the experts: multiplied by the sigmoids of `gates`
 * [rows], unless that is NULL. */
static void add_shared(const pass_t *s, const float *gates) {
    fd_norm_rows_t sum = {.x = s->of_experts, .y = s->a, .scale = 1.0f, .width = s->j->hidden};
    if (!gates) fd_norm_rows(s->j->ops, &sum, s->r->rows, s->threads);
    for (size_t row = 0; gates && row < s->r->rows; row++) {
        sum.scale = fd_sigmoid(gates[row]);
        s->j->ops->norm(&sum, row, 1);
    }
}

/* The MLP's outputs, in area a, from its inputs x. */
static fd_status_t mlp(const pass_t *s, const fd_feed_forward_t *f, const void *x) {
    const fd_gate_rows_t gate = {.x = s->a, .out = s->b, .width = f->inner, .gelu = s->j->gelu};
    if (multiply(s, FD_LOOP_UP, &f->up, x, s->a) != FD_OK) return FD_INTERNAL;
    fd_gate_rows(s->j->ops, &gate, s->r->rows, s->threads);
    return multiply(s, FD_LOOP_DOWN, &f->down, s->b, s->a);
}

/* Experts and shared expert with norms of their own. */
static fd_status_t normed_mixture(pass_t *s, const fd_feed_forward_t *f) {
    const fd_expert_rows_t chosen = {s->b, s->a, s->of_experts, s->r->rows};
    norm_to(s, f->norms.router, s->a);
    norm_to(s, f->norms.experts, s->b);
    fd_status_t status = fd_experts_run(f->experts, &chosen, s->more, s->threads);
    if (status == FD_OK) status = sum_over_ranks(s, s->of_experts, f->norms.experts_post);
    if (status == FD_OK) status = mlp(s, f, norm(s, f->norm));
    if (status == FD_OK) status = sum_over_ranks(s, s->a, f->norms.shared_post);
    if (status == FD_OK) add_shared(s, NULL);
    return status;
}

/* Computes the rest of a block behind attention or a rule, whose outputs are to be added. */
static fd_status_t feed_forward(pass_t *s, const fd_feed_forward_t *f) {
    void *y = f->experts ? s->of_experts : s->a;
    fd_status_t status = FD_OK;
    if (f->norms.experts) {
        status = normed_mixture(s, f);
        if (status == FD_OK) normalise(s, y, f->post_norm);
    } else {
        const void *x = norm(s, f->norm);
        const fd_expert_rows_t chosen = {x, x, s->of_experts, s->r->rows};
        if (f->experts) status = fd_experts_run(f->experts, &chosen, s->more, s->threads);
        if (status == FD_OK && f->inner) {
            const fd_router_rows_t shared = {x, f->shared_gate, NULL, s->more, 1, s->j->hidden, s->r->rows, false};
            if (f->shared_gate) fd_router_rows(s->j->ops, &shared, s->threads); /* before area b is overwritten */
            if (mlp(s, f, x) != FD_OK) return FD_INTERNAL;
            if (f->experts) add_shared(s, f->shared_gate ? s->more : NULL);
        }
        if (status == FD_OK) status = sum_over_ranks(s, y, f->post_norm);
    }
    add_later(s, y, s->j->scale);
    return status;
}

/* Copies rows of `width` numbers. */
static void copy_rows(const pass_t *s, void *to, size_t to_stride, const void *from, size_t from_stride, size_t width) {
    const size_t bytes = s->j->number_bytes;
    for (size_t row = 0; row < s->r->rows; row++)
        memcpy((uint8_t *)to + row * to_stride * bytes, (const uint8_t *)from + row * from_stride * bytes,
               width * bytes);
}

/* Computes a block's part of the per-layer embedding, which is to be added. */
static fd_status_t own_embedding(pass_t *s, const fd_own_embedding_t *own) {
    const size_t size = own->size, bytes = s->j->number_bytes;
    const fd_gate_rows_t gate = {.x = s->b, .out = s->a, .width = size, .gelu = s->j->gelu};
    if (multiply(s, FD_LOOP_OTHER, &own->gate, norm(s, NULL), s->a) != FD_OK) return FD_INTERNAL;
    copy_rows(s, s->b, 2 * size, s->a, size, size);
    copy_rows(s, (uint8_t *)s->b + size * bytes, 2 * size, (const uint8_t *)s->r->parts + own->first * bytes,
              s->r->parts_stride, size);
    fd_gate_rows(s->j->ops, &gate, s->r->rows, s->threads);
    if (multiply(s, FD_LOOP_OTHER, &own->out, s->a, s->b) != FD_OK) return FD_INTERNAL;
    normalise(s, s->b, own->post_norm);
    add_later(s, s->b, 1.0f);
    return FD_OK;
}

static fd_latent_rows_t latent_rows(const pass_t *s) {
    const fd_joint_rows_t *r = s->r;
    return (fd_latent_rows_t){
        .ops = s->j->ops,
        .number_bytes = s->j->number_bytes,
        .rows = r->rows,
        .q = r->q,
        .kv = r->kv,
        .o = r->o,
        .q_stride = r->q_stride,
        .kv_stride = r->kv_stride,
        .o_stride = r->o_stride,
        .angles = r->angles,
        .a = s->a,
        .b = s->b,
        .c = s->of_experts,
    };
}

/* What the linear `o` of a layer multiplies: the O rows, or rows in area b. NULL if memory runs out. */
static const void *outputs_of_heads(const pass_t *s, const fd_joint_layer_t *l) {
    const fd_joint_rows_t *r = s->r;
    const size_t width = l->q_heads * l->head_size;
    if (l->latent) {
        const fd_latent_rows_t rows = latent_rows(s);
        const fd_loop_kind_t before = fd_loops_compute(FD_LOOP_O);
        const fd_status_t status = fd_latent_outputs(l->latent, &rows, s->threads);
        fd_loops_compute(before);
        return status == FD_OK ? s->b : NULL;
    }
    if (!s->j->output_gate && width == r->o_stride) return r->o;
    const fd_sigmoid_rows_t gated = {r->o, r->gate, s->b, width};
    if (s->j->output_gate) fd_sigmoid_rows(s->j->ops, &gated, r->rows, s->threads);
    else copy_rows(s, s->b, width, r->o, r->o_stride, width);
    return s->b;
}

/* Computes the rest of a layer from its O rows. */
static fd_status_t finish(pass_t *s, const fd_joint_layer_t *l) {
    const void *outputs = outputs_of_heads(s, l);
    fd_status_t status = outputs ? multiply(s, FD_LOOP_O, &l->o, outputs, s->a) : FD_INTERNAL;
    if (status == FD_OK) status = sum_over_ranks(s, s->a, l->attention_post_norm);
    add_later(s, s->a, s->j->scale);
    if (status == FD_OK) status = feed_forward(s, &l->feed_forward);
    if (status == FD_OK && l->own.size) status = own_embedding(s, &l->own);
    s->factor = l->factor;
    return status;
}

/* Computes a block with a state, which reads and writes `states`. */
static fd_status_t pass_state(pass_t *s, const fd_state_block_t *block, const fd_states_t *states) {
    const fd_joint_rows_t *r = s->r;
    const void *x = norm(s, block->norm);
    if (multiply(s, FD_LOOP_QKV, &block->inputs, x, s->a) != FD_OK) return FD_INTERNAL;
    const fd_delta_rows_t rows = {.y = s->a,
                                  .y_stride = fd_products_outs(&block->inputs),
                                  .out = s->b,
                                  .inputs = states->inputs,
                                  .sums = states->sums,
                                  .rows = r->singles,
                                  .sources = r->sources,
                                  .targets = r->targets,
                                  .n = r->n_singles,
                                  .scratch = s->more,
                                  .spans = r->spans,
                                  .n_spans = r->n_spans};
    if (fd_delta_rows(block->ops, block->rule, &rows, s->threads) != FD_OK) return FD_INTERNAL;
    if (multiply(s, FD_LOOP_O, &block->out, s->b, s->a) != FD_OK) return FD_INTERNAL;
    const fd_status_t status = sum_over_ranks(s, s->a, NULL);
    add_later(s, s->a, s->j->scale);
    return status == FD_OK ? feed_forward(s, &block->feed_forward) : status;
}

/* Computes Q, K and V of a layer. */
static fd_status_t project(pass_t *s, const fd_joint_layer_t *l) {
    const fd_joints_t *j = s->j;
    const fd_joint_rows_t *r = s->r;
    const void *x = norm(s, l->attention_norm);
    if (l->latent) {
        const fd_latent_rows_t rows = latent_rows(s);
        const fd_loop_kind_t before = fd_loops_compute(FD_LOOP_QKV);
        const fd_status_t status = fd_latent_project(l->latent, &rows, x, s->threads);
        fd_loops_compute(before);
        return status;
    }
    if (multiply(s, FD_LOOP_QKV, &l->qkv, x, s->a) != FD_OK) return FD_INTERNAL;
    const fd_rope_rows_t rope = {
        .qkv = s->a,
        .q_norm = l->q_norm,
        .k_norm = l->k_norm,
        .v_norm = l->v_norm,
        .q = r->q,
        .kv = r->kv,
        .gate = j->output_gate ? r->gate : NULL,
        .angles = l->second_rope ? r->second_angles : r->angles,
        .eps = j->eps,
        .q_stride = r->q_stride,
        .kv_stride = r->kv_stride,
        .q_heads = l->q_heads,
        .kv_heads = l->kv_heads,
        .head_size = l->head_size,
        .pairs = l->second_rope ? r->second_pairs : r->pairs,
        .whole_norms = j->whole_norms,
        .k_as_v = l->k_as_v,
    };
    fd_rope_rows(j->ops, &rope, r->rows, s->threads);
    return FD_OK;
}

fd_status_t fd_joint_run(const fd_joints_t *j, size_t layer, const fd_joint_rows_t *r, void *scratch,
                         unsigned threads) {
    const size_t bytes = area_bytes(j, r->rows);
    uint8_t *a = (uint8_t *)fd_round_up((uintptr_t)scratch, LINE);
    pass_t s = {j, r, a, a + bytes, a + 2 * bytes, a + 3 * bytes, NULL, NULL, 0.0f, threads};
    size_t state = 0;
    for (size_t i = 0; i < layer; i++) state += j->layers[i].n_states;
    const size_t end = layer < j->n_layers ? state + j->layers[layer].n_states : j->n_states;
    fd_status_t status = layer > 0 ? finish(&s, &j->layers[layer - 1]) : FD_OK;
    for (; state < end && status == FD_OK; state++) status = pass_state(&s, &j->states[state], &r->states[state]);
    if (status != FD_OK) return status;
    if (layer < j->n_layers) return project(&s, &j->layers[layer]);
    norm(&s, NULL);
    return FD_OK;
}
