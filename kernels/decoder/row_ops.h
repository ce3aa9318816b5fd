/* The S-Part's operations between products, on a CPU: each reads and writes its rows once. Rows are in an activation
 * dtype and computed in fp32. A row's result does not depend on the other rows.
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "region/formats.h"

static inline float fd_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* x [rows][width] += scale * y, unless y is NULL; x *= factor [1], unless that is NULL; out = x / sqrt(mean(x^2) + eps)
 * * weight [width] (RMS norm, Zhang and Sennrich, arXiv 1910.07467), unless weight is NULL. Everything is in the
 * activation dtype. `out` may be x or y. */
typedef struct {
    void *x, *out;
    const void *y, *weight, *factor;
    float scale, eps;
    size_t width;
} fd_norm_rows_t;

/* A row of x [2 * width] is gate, up; out [width] = act(gate) * up. The activation is SiLU, or with `gelu` GELU by
 * tanh. With `limit` above 0 it is that of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), where gate is at most
 * `limit`, and up between -limit and limit. */
typedef struct {
    const void *x;
    void *out;
    size_t width;
    bool gelu;
    float alpha, limit;
} fd_gate_rows_t;

/* out [rows][width] = x * sigmoid(gate). `out` may be x or gate. */
typedef struct {
    const void *x, *gate;
    void *out;
    size_t width;
} fd_sigmoid_rows_t;

/* out [rows][width] = the sum over i < n of shares [rows][n] times the rows of y that `from` [rows][n] names, added in
 * this order. `shares` are fp32. */
typedef struct {
    const void *y;
    const uint32_t *from;
    const float *shares;
    void *out;
    size_t n, width;
} fd_mix_rows_t;

/* The rows of a router, out [rows][n] = x [rows][width] W^T + bias, unless the bias is NULL. With `single` the matrix
 * W [n][width] and the bias [n] are fp32; else they are in the activation dtype, to which the outputs are rounded. */
typedef struct {
    const void *x, *weight, *bias;
    float *out;
    size_t n, width, rows;
    bool single;
} fd_router_rows_t;

/* RoPE's angles, fp32 [rows][pairs] each. cos and sin turn K heads; q_cos and q_sin turn Q heads, and may be the same
 * pointers. A factor in q_cos and q_sin multiplies the elements of Q that RoPE turns. */
typedef struct {
    const float *cos, *sin, *q_cos, *q_sin;
} fd_angles_t;

/* A row of qkv is Q heads, K heads, V heads; with `k_as_v` it has no V heads, which are the K heads. Q goes to q; K and
 * then V go to kv; rows stand `q_stride` and `kv_stride` elements apart there. If `gate` is not NULL, each Q head of
 * qkv is followed by as many elements, which go to gate [rows][q_heads * head_size]. Heads are normalised if there are
 * weights [head_size] for them; with `whole_norms` all Q heads as one, and all K heads, by weights for all of their
 * elements. The halves (a, b) of the first 2 * pairs elements of Q and K heads become (a cos - b sin, b cos + a sin).
 */
typedef struct {
    const void *qkv, *q_norm, *k_norm, *v_norm;
    void *q, *kv, *gate;
    fd_angles_t angles;
    float eps;
    size_t q_stride, kv_stride, q_heads, kv_heads, head_size, pairs;
    bool whole_norms, k_as_v;
} fd_rope_rows_t;

/* RoPE of `heads` heads of 2 * pairs numbers of each row, by the angles cos and sin [rows][pairs]. Rows and heads stand
 * strides apart. The pairs of x are neighbours, if `interleaved`, else halves of a head; those of `out` are halves. */
typedef struct {
    const void *x;
    void *out;
    size_t x_row, x_head, out_row, out_head, heads, pairs;
    const float *cos, *sin;
    bool interleaved;
} fd_turn_rows_t;

/* A router's rows are computed in blocks of this many rows, because each block reads the whole matrix. */
enum { FD_ROUTER_BLOCK = 16 };

/* One ISA's functions for one activation dtype; each computes `n` rows from `row` on. `router` computes `n` outputs of
 * blocks, of which output `first` is that of expert first % n in block first / n. */
typedef struct {
    const char *isa;
    void (*norm)(const fd_norm_rows_t *o, size_t row, size_t n);
    void (*gate)(const fd_gate_rows_t *o, size_t row, size_t n);
    void (*sigmoid)(const fd_sigmoid_rows_t *o, size_t row, size_t n);
    void (*rope)(const fd_rope_rows_t *o, size_t row, size_t n);
    void (*turn)(const fd_turn_rows_t *o, size_t row, size_t n);
    void (*mix)(const fd_mix_rows_t *o, size_t row, size_t n);
    void (*router)(const fd_router_rows_t *o, size_t first, size_t n);
} fd_row_ops_t;

/* The functions of an ISA that this machine supports; NULL if it has none for the dtype. */
const fd_row_ops_t *fd_row_ops(fd_isa_t isa, uint32_t act_dtype);

/* Runs one of them over all rows, by as many of `threads` threads as pay. */
void fd_norm_rows(const fd_row_ops_t *ops, const fd_norm_rows_t *o, size_t rows, unsigned threads);
void fd_gate_rows(const fd_row_ops_t *ops, const fd_gate_rows_t *o, size_t rows, unsigned threads);
void fd_sigmoid_rows(const fd_row_ops_t *ops, const fd_sigmoid_rows_t *o, size_t rows, unsigned threads);
void fd_rope_rows(const fd_row_ops_t *ops, const fd_rope_rows_t *o, size_t rows, unsigned threads);
void fd_turn_rows(const fd_row_ops_t *ops, const fd_turn_rows_t *o, size_t rows, unsigned threads);
void fd_mix_rows(const fd_row_ops_t *ops, const fd_mix_rows_t *o, size_t rows, unsigned threads);
void fd_router_rows(const fd_row_ops_t *ops, const fd_router_rows_t *o, unsigned threads);
