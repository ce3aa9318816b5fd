/* Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): what a layer
 * computes before and behind it. fastdecode/spart/decoder/latent.py says the same in torch.
 */
#pragma once

#include "head_products.h"
#include "row_ops.h"

typedef struct {
    size_t heads, k_size, rope_size, rank, v_size;
    size_t q_rank;                /* of the row that all queries are made of; 0: `inputs` makes Q */
    fd_products_t inputs, q;      /* inputs: of Q or that row, of the latent row, and of K with RoPE; q: of that row */
    const void *q_norm, *kv_norm; /* [q_rank], [rank] */
    const fd_head_products_t *k, *v; /* of queries, [rank][k_size]; of O rows, [v_size][rank] */
    bool interleaved;                /* as in fd_turn_rows_t */
    float eps;                       /* of the norms */
} fd_latent_t;

/* A step's rows in an activation dtype. A row of q has a latent row and a part with RoPE for each head, a row of kv one
 * of each, a row of o a latent row for each head; rows stand strides apart. The areas have room for
 * fd_latent_widest numbers a row. */
typedef struct {
    const fd_row_ops_t *ops;
    size_t number_bytes, rows;
    void *q, *kv;
    const void *o;
    size_t q_stride, kv_stride, o_stride;
    fd_angles_t angles;
    void *a, *b, *c;
} fd_latent_rows_t;

/* The numbers of a row of the projections `inputs`. */
static inline size_t fd_latent_inputs(const fd_latent_t *l) {
    const size_t q_width = l->heads * (l->k_size + l->rope_size);
    return (l->q_rank ? l->q_rank : q_width) + l->rank + l->rope_size;
}

size_t fd_latent_widest(const fd_latent_t *l);

/* Computes Q and KV rows from x [rows][hidden], which may stand in area b. FD_INTERNAL if memory runs out. */
fd_status_t fd_latent_project(const fd_latent_t *l, const fd_latent_rows_t *r, const void *x, unsigned threads);

/* Computes the heads' outputs [rows][heads * v_size], in area b, from O rows. FD_INTERNAL if memory runs out. */
fd_status_t fd_latent_outputs(const fd_latent_t *l, const fd_latent_rows_t *r, unsigned threads);
