#include "joint.h"

#include "cpu/parallel.h"

enum { LINE = 64 };

/* The scratch has two areas, from which the operations read and into which they write in turns. Each begins with a
 * cache line: then AMX's products store whole lines of outputs past the caches, and load whole lines of rows. */
static size_t area_bytes(const fd_joints_t *j, size_t rows) {
    const size_t qkv = (j->q_heads + 2 * j->kv_heads) * j->head_size,
                 widest = fd_max(fd_max(2 * j->inner, j->hidden), qkv);
    return fd_round_up(rows * widest * j->number_bytes, LINE);
}

size_t fd_joint_scratch(const fd_joints_t *j, size_t rows) { return 2 * area_bytes(j, rows) + LINE - 1; }

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

/* A product that ends a part of a block: the ranks sum its outputs, which are then normalised if there are weights. */
static fd_status_t multiply_and_sum(const fd_joints_t *j, fd_loop_kind_t kind, const fd_products_t *p, const void *x,
                                    size_t rows, void *y, const void *post_norm, unsigned threads) {
    fd_status_t status = multiply(j, kind, p, x, rows, y, threads);
    if (status == FD_OK && j->reduction)
        status = fd_reduction_sum(j->reduction, y, rows * j->hidden, j->act_dtype, threads);
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

fd_status_t fd_joint_run(const fd_joints_t *j, size_t layer, const fd_joint_rows_t *r, void *scratch,
                         unsigned threads) {
    void *a = (void *)fd_round_up((uintptr_t)scratch, LINE), *b = (uint8_t *)a + area_bytes(j, r->rows);
    const void *block = NULL; /* what the last block adds to the residual stream */
    fd_status_t status;
    if (layer > 0) {
        const fd_joint_layer_t *l = &j->layers[layer - 1];
        status = multiply_and_sum(j, FD_LOOP_O, &l->o, r->o, r->rows, a, l->attention_post_norm, threads);
        if (status != FD_OK) return status;
        const void *rows = norm(j, r, a, l->mlp_norm, b, threads);
        if (multiply(j, FD_LOOP_UP, &l->up, rows, r->rows, a, threads) != FD_OK) return FD_INTERNAL;
        const fd_gate_rows_t gate = {.x = a, .out = b, .width = j->inner, .gelu = j->gelu};
        fd_gate_rows(j->ops, &gate, r->rows, threads);
        status = multiply_and_sum(j, FD_LOOP_DOWN, &l->down, b, r->rows, a, l->mlp_post_norm, threads);
        if (status != FD_OK) return status;
        block = a;
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
