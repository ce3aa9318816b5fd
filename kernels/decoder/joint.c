#include "joint.h"

#include "cpu/parallel.h"

enum { LINE = 64 };

/* The scratch has two areas, from which the operations read and into which they write in turns. If a layer has experts,
 * there is an area for their outputs and their own scratch. Each begins with a cache line: then AMX's products store
 * whole lines of outputs past the caches, and load whole lines of rows. */
typedef struct {
    void *a, *b, *of_experts, *experts;
} areas_t;

static size_t area_bytes(const fd_joints_t *j, size_t rows) {
    const size_t qkv = (j->q_heads + 2 * j->kv_heads) * j->head_size,
                 widest = fd_max(fd_max(2 * j->inner, j->hidden), qkv);
    return fd_round_up(rows * widest * j->number_bytes, LINE);
}

size_t fd_joint_scratch(const fd_joints_t *j, size_t rows) {
    size_t experts = 0;
    for (size_t i = 0; i < j->n_layers; i++)
        if (j->layers[i].experts) experts = fd_max(experts, fd_experts_scratch(j->layers[i].experts, rows));
    return (experts ? 3 : 2) * area_bytes(j, rows) + experts + LINE - 1;
}

static fd_status_t multiply(const fd_joints_t *j, fd_loop_kind_t kind, const fd_products_t *p, const void *x,
                            size_t rows, void *y, unsigned threads) {
    const size_t stride = fd_products_outs(p);
    size_t first = 0;
    fd_status_t status = FD_OK;
    const fd_loop_kind_t before = fd_loops_compute(kind);
    for (const fd_product_t *part = p->parts; part < p->parts + p->n && status == FD_OK; first += part++->outs) {
        const fd_linear_task_t task = {part->linear, x, (uint8_t *)y + first * j->number_bytes, rows};
        status = part->multiply(part->ops, &task, 1, stride, threads);
    }
    fd_loops_compute(before);
    return status;
}

/* Ends a part of a block: the ranks sum its outputs y [rows][hidden], and weights, if there are any, normalise them. */
static fd_status_t sum_over_ranks(const fd_joints_t *j, size_t rows, void *y, const void *post_norm, unsigned threads) {
    fd_status_t status = FD_OK;
    if (j->reduction) status = fd_reduction_sum(j->reduction, y, rows * j->hidden, j->act_dtype, threads);
    if (status != FD_OK || !post_norm) return status;
    const fd_norm_rows_t o = {.x = y, .out = y, .weight = post_norm, .eps = j->eps, .width = j->hidden};
    fd_norm_rows(j->ops, &o, rows, threads);
    return FD_OK;
}

/* Adds `y` to the residual stream, unless it is NULL, and returns its norm, in `out`; the stream itself if `weight` is
 * NULL. */
static const void *norm(const fd_joints_t *j, const fd_joint_rows_t *r, const void *y, const void *weight, void *out,
                        unsigned threads) {
    const fd_norm_rows_t o = {r->x, out, y, weight, j->scale, j->eps, j->hidden};
    if (y || weight) fd_norm_rows(j->ops, &o, r->rows, threads);
    return weight ? out : r->x;
}

/* The outputs of a block's MLP and experts, in `*out`, for x [rows][hidden], which is b or stands in no area. */
static fd_status_t feed_forward(const fd_joints_t *j, const fd_joint_layer_t *l, const void *x, size_t rows,
                                const areas_t *areas, void **out, unsigned threads) {
    fd_status_t status = FD_OK;
    void *a = areas->a, *b = areas->b, *of_experts = areas->of_experts;
    *out = l->experts ? of_experts : a;
    const fd_expert_rows_t r = {x, x, of_experts, rows};
    if (l->experts) status = fd_experts_run(l->experts, &r, areas->experts, threads);
    if (status != FD_OK || !l->inner) return status;
    if (multiply(j, FD_LOOP_UP, &l->up, x, rows, a, threads) != FD_OK) return FD_INTERNAL;
    const fd_gate_rows_t gate = {.x = a, .out = b, .width = l->inner, .gelu = j->gelu};
    fd_gate_rows(j->ops, &gate, rows, threads);
    if (multiply(j, FD_LOOP_DOWN, &l->down, b, rows, a, threads) != FD_OK) return FD_INTERNAL;
    const fd_norm_rows_t sum = {.x = of_experts, .y = a, .scale = 1.0f, .width = j->hidden};
    if (l->experts) fd_norm_rows(j->ops, &sum, rows, threads);
    return FD_OK;
}

fd_status_t fd_joint_run(const fd_joints_t *j, size_t layer, const fd_joint_rows_t *r, void *scratch,
                         unsigned threads) {
    const size_t bytes = area_bytes(j, r->rows);
    uint8_t *a = (uint8_t *)fd_round_up((uintptr_t)scratch, LINE), *b = a + bytes;
    const areas_t areas = {a, b, b + bytes, b + 2 * bytes};
    void *block = NULL; /* what the last block adds to the residual stream */
    fd_status_t status;
    if (layer > 0) {
        const fd_joint_layer_t *l = &j->layers[layer - 1];
        status = multiply(j, FD_LOOP_O, &l->o, r->o, r->rows, a, threads);
        if (status == FD_OK) status = sum_over_ranks(j, r->rows, a, l->attention_post_norm, threads);
        if (status != FD_OK) return status;
        const void *rows = norm(j, r, a, l->mlp_norm, b, threads);
        status = feed_forward(j, l, rows, r->rows, &areas, &block, threads);
        if (status == FD_OK) status = sum_over_ranks(j, r->rows, block, l->mlp_post_norm, threads);
        if (status != FD_OK) return status;
    }
    if (layer == j->n_layers) {
        norm(j, r, block, NULL, NULL, threads);
        return FD_OK;
    }
    const fd_joint_layer_t *l = &j->layers[layer];
    const void *rows = norm(j, r, block, l->attention_norm, b, threads);
    if (multiply(j, FD_LOOP_QKV, &l->qkv, rows, r->rows, a, threads) != FD_OK) return FD_INTERNAL;
    const fd_rope_rows_t rope = {
        .qkv = a,
        .q_norm = l->q_norm,
        .k_norm = l->k_norm,
        .q = r->q,
        .kv = r->kv,
        .angles = l->second_rope ? r->second_angles : r->angles,
        .eps = j->eps,
        .q_stride = r->q_stride,
        .kv_stride = r->kv_stride,
        .q_heads = j->q_heads,
        .kv_heads = j->kv_heads,
        .head_size = j->head_size,
        .pairs = r->pairs,
        .whole_norms = j->whole_norms,
    };
    fd_rope_rows(j->ops, &rope, r->rows, threads);
    return FD_OK;
}
