/* What an S-Part on a CPU computes between the attention of two layers, in one call: the rest of a block from its O
 * rows, the blocks that keep a state in place of attention, then Q, K and V of the next block. The blocks have Llama's
 * architecture: RMS norms before attention and MLP, a gated SiLU, RoPE; or Gemma's, which also normalises what a block
 * adds, has a gated GELU, and whose layers may differ in their heads, attend to K and V of others, and add a part of an
 * embedding of their own; or OLMo 2's, which normalises only what a block adds. A mixture of experts may stand in place
 * of the MLP, or beside it: then the MLP is the shared expert. Attention may be latent, in all layers.
 *
 * A single row's products take microseconds, less than Python takes to ask for them.
 */
#pragma once

#include "region/region.h"
#include "delta.h"
#include "experts.h"
#include "latent.h"
#include "product.h"
#include "reduction.h"
#include "row_ops.h"

/* The norms [hidden] of a mixture whose experts, router and shared expert have inputs of their own: of the inputs of
 * router and experts, and of the outputs of experts and shared expert. */
typedef struct {
    const void *router, *experts, *experts_post, *shared_post;
} fd_mixture_norms_t;

/* A block's MLP, its experts, or both. */
typedef struct {
    const void *norm;      /* [hidden], or NULL: of their inputs */
    const void *post_norm; /* [hidden], or NULL: of their outputs, before the residual stream adds them */
    size_t inner;          /* the MLP's columns; 0: it has none */
    fd_products_t up, down;
    const fd_experts_t *experts; /* or NULL: it has none */
    const void *shared_gate;     /* [hidden], or NULL: by the sigmoid of its product the MLP beside experts counts */
    fd_mixture_norms_t norms;    /* all NULL: experts and router have the inputs of the MLP */
} fd_feed_forward_t;

/* How a block adds its part of the per-layer embedding, numbers [first, first + size) of a row of these parts: the norm
 * of out(act(gate(x)) * part). */
typedef struct {
    size_t first, size; /* size 0: it adds none */
    fd_products_t gate, out;
    const void *post_norm; /* [hidden] */
} fd_own_embedding_t;

/* A block that keeps a state (delta.h). */
typedef struct {
    const void *norm; /* [hidden] */
    fd_products_t inputs, out;
    const fd_delta_ops_t *ops;
    const fd_delta_t *rule;
    fd_feed_forward_t feed_forward;
} fd_state_block_t;

typedef struct {
    size_t q_heads, kv_heads, head_size;  /* no KV heads: it attends to those of an earlier layer */
    const void *attention_norm;           /* [hidden], or NULL */
    const void *attention_post_norm;      /* [hidden], or NULL: of the outputs of `o` */
    const void *q_norm, *k_norm, *v_norm; /* as in fd_rope_rows_t, or NULL */
    bool second_rope;                     /* RoPE turns its heads by the second angles */
    bool k_as_v;                          /* as in fd_rope_rows_t */
    const fd_latent_t *latent; /* NULL, or latent attention, whose heads are those of its rows; `qkv` is unused then */
    fd_products_t qkv, o;
    fd_feed_forward_t feed_forward;
    fd_own_embedding_t own;
    const void *factor; /* [1], or NULL: multiplies the residual stream behind the block */
    size_t n_states;    /* blocks with a state before it */
} fd_joint_layer_t;

typedef struct {
    const fd_row_ops_t *ops;
    uint32_t act_dtype;
    size_t number_bytes; /* of an activation */
    size_t hidden;
    size_t widest;    /* the most numbers of a row between two operations */
    float eps, scale; /* of the norms; of what a block adds to the residual stream */
    bool gelu;        /* see fd_gate_rows_t */
    bool whole_norms; /* see fd_rope_rows_t */
    bool output_gate; /* Q heads have gates beside them, by whose sigmoid the O rows are multiplied */
    size_t n_layers, n_states;
    const fd_joint_layer_t *layers;
    const fd_state_block_t *states; /* those before the first layer, before the second, and so on; the rest is last */
    /* NULL, or what sums the outputs of `o`, and of MLPs and experts, over the ranks that share heads and columns. */
    fd_reduction_t *reduction;
} fd_joints_t;

/* The states of all sequences in a block. */
typedef struct {
    void *inputs; /* see fd_delta_rows_t */
    float *sums;
} fd_states_t;

/* The rows of a step. */
typedef struct {
    void *x;           /* [rows][hidden], the residual stream */
    void *q, *kv, *o;  /* a layer's heads; rows stand q_stride, kv_stride and o_stride numbers apart */
    void *gate;        /* [rows][q_heads * head_size], with output_gate: from one joint to the next */
    const void *parts; /* NULL, or the parts of the per-layer embedding, which stand parts_stride numbers apart */
    size_t q_stride, kv_stride, o_stride, parts_stride;
    fd_angles_t angles, second_angles;
    size_t pairs, second_pairs, rows;
    const fd_states_t *states; /* [n_states]; and the rows that advance them, as in fd_delta_rows_t */
    const int64_t *singles, *sources, *targets;
    size_t n_singles, n_spans;
    const fd_delta_span_t *spans;
} fd_joint_rows_t;

/* Bytes of scratch, at any address, that fd_joint_run needs for the step. */
size_t fd_joint_scratch(const fd_joints_t *j, const fd_joint_rows_t *r);

/* Finishes block `layer - 1`, if there is one, computes the blocks with a state behind it, and projects block `layer`,
 * if there is one. FD_INTERNAL if memory runs out, FD_LINK_CLOSED if the reduction is broken. */
fd_status_t fd_joint_run(const fd_joints_t *j, size_t layer, const fd_joint_rows_t *r, void *scratch, unsigned threads);
