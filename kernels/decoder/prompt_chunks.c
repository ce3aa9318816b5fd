#include "prompt_chunks.h"

static fd_status_t attend(const fd_prompt_chunks_t *c, const fd_prompt_chunk_t *chunk, size_t layer,
                          const fd_joints_t *j, const fd_joint_rows_t *r, unsigned threads) {
    const fd_prompt_layer_t *l = &chunk->layers[layer];
    const fd_joint_layer_t *heads = &j->layers[layer];
    const size_t size = heads->head_size;
    const uint8_t *kv = (const uint8_t *)r->kv + chunk->first * r->kv_stride * j->number_bytes;
    const fd_prompt_pack_t pack = {
        .blocks = &l->blocks,
        .k = kv,
        .v = heads->latent ? kv : kv + heads->kv_heads * size * j->number_bytes,
        .pos = chunk->pos,
        .n = chunk->rows,
        .k_head = size,
        .k_row = r->kv_stride,
        .v_head = size,
        .v_row = r->kv_stride,
    };
    fd_prompt_pack(c->ops, &pack, threads);
    const fd_prompt_t prompt = {
        .blocks = &l->blocks,
        .q = (const uint8_t *)r->q + chunk->first * r->q_stride * j->number_bytes,
        .out = (uint8_t *)r->o + chunk->first * r->o_stride * j->number_bytes,
        .q_row = r->q_stride,
        .out_row = r->o_stride,
        .rows = chunk->rows,
        .pos = chunk->pos,
        .group = heads->q_heads / heads->kv_heads,
        .window = l->window,
        .segment = l->segment,
        .scale = c->scale,
    };
    return fd_prompt_attend(c->ops, &prompt, threads);
}

fd_status_t fd_prompt_chunks_attend(const fd_prompt_chunks_t *c, size_t layer, const fd_joints_t *j,
                                    const fd_joint_rows_t *r, unsigned threads) {
    for (size_t i = 0; i < c->n; i++)
        if (attend(c, &c->chunks[i], layer, j, r, threads) != FD_OK) return FD_INTERNAL;
    return FD_OK;
}
