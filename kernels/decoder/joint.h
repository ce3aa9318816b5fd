/* What an S-Part on a CPU computes between the attention of two layers, in one call: the rest of a block from its O
 * rows, then Q, K and V of the next block. The blocks have Llama's architecture: RMS norms before attention and
 * MLP, a gated SiLU, RoPE; or Gemma's, which also normalises what a block adds, has a gated GELU, and may turn the
 * heads of some layers by other angles; or OLMo 2's, which normalises only what a block adds. A mixture of experts may
 * stand in place of the MLP, or beside it: then the MLP is the shared expert.
 *
 * A single row's products take microseconds, less than Python takes to ask for them.
 */
#pragma once

#include "region/region.h"
#include "experts.h"
#include "product.h"
#include "reduction.h"
#include "row_ops.h"

typedef struct {
    const void *attention_norm, *mlp_norm; /* [hidden], or NULL */
    const void *q_norm, *k_norm;           /* as in fd_rope_rows_t, or NULL */
    /* [hidden], or NULL: of the outputs of `o` and of the MLP and experts, before the residual stream adds them. */
    const void *attention_post_norm, *mlp_post_norm;
    bool second_rope; /* RoPE turns its heads by the second angles */
    size_t inner;     /* the MLP's columns; 0: it has none */
    fd_products_t qkv, o, up, down;
    const fd_experts_t *experts; /* or NULL: it has none */
} fd_joint_layer_t;

typedef struct {
    const fd_row_ops_t *ops;
    uint32_t act_dtype;
    size_t number_bytes; /* of an activation */
    size_t hidden, q_heads, kv_heads, head_size;
    size_t inner;     /* the most columns of an MLP */
    float eps, scale; /* of the norms; of what a block adds to the residual stream */
    bool gelu;        /* see fd_gate_rows_t */
    bool whole_norms; /* see fd_rope_rows_t */
    size_t n_layers;
    const fd_joint_layer_t *layers;
    /* NULL, or what sums the outputs of `o` and of MLPs and experts over the ranks that share heads and columns. */
    fd_reduction_t *reduction;
} fd_joints_t;

/* The rows of a step. */
typedef struct {
    void *x;      /* [rows][hidden], the residual stream */
    void *o;      /* [rows][q_heads * head_size] */
    void *q, *kv; /* rows stand q_stride and kv_stride numbers apart */
    size_t q_stride, kv_stride;
    fd_angles_t angles, second_angles;
    size_t pairs, rows;
} fd_joint_rows_t;

/* Bytes of scratch, at any address, that fd_joint_run needs for `rows` rows. */
size_t fd_joint_scratch(const fd_joints_t *j, size_t rows);

/* Finishes block `layer - 1`, if there is one, and projects block `layer`, if there is one. FD_INTERNAL if memory runs
 * out, FD_LINK_CLOSED if the reduction is broken. */
fd_status_t fd_joint_run(const fd_joints_t *j, size_t layer, const fd_joint_rows_t *r, void *scratch, unsigned threads);
