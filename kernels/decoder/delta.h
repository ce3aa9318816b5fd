/* The gated delta rule (Yang et al., arXiv 2412.06464) with the convolution before it, for rows that take the states of
 * their sequences one token further, and for spans of rows, each of one sequence. A state is read and written once a
 * row, or once for some rows of a span. fastdecode/spart/states/delta.py has the equations.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "region/region.h"

/* Where the numbers of a K head, or of the V heads that share it, stand in a row of projections: those of head h begin
 * at first + h * step. */
typedef struct {
    size_t first, step;
} fd_delta_heads_t;

/* A block. Its rule has v_heads / k_heads neighbouring V heads for each K head, with which a Q head goes. */
typedef struct {
    size_t k_heads, v_heads, k_size, v_size;
    size_t kernel; /* rows that the convolution sees, the row itself included; at least 2 */
    fd_delta_heads_t q, k, v, z, beta, decay;
    const float *conv;   /* [kernel][channels], the channels of all Q, all K and all V heads */
    const float *rate;   /* [v_heads], negative */
    const float *bias;   /* [v_heads] */
    const float *norm;   /* [v_size] */
    float eps, unit_eps; /* of the norm, and of the length of queries and keys */
} fd_delta_t;

/* `n` rows of one sequence, or none, which take its state from one slot to another or leave it in the same. */
typedef struct {
    int64_t first, n, source, target;
} fd_delta_span_t;

/* A step's rows in an activation dtype. Single row i goes on from the state of slot sources[i] and leaves the next one
 * in targets[i]. A span may go on from the state that a single row or a span before it leaves. */
typedef struct {
    const void *y; /* projections; rows stand y_stride numbers apart */
    size_t y_stride;
    void *out;    /* [rows of the step][v_heads * v_size] */
    void *inputs; /* [slots][kernel - 1][channels] in the activation dtype: the rows before */
    float *sums;  /* [slots][v_heads][k_size][v_size] */
    const int64_t *rows, *sources, *targets;
    size_t n;       /* single rows */
    float *scratch; /* fd_delta_scratch numbers */
    const fd_delta_span_t *spans;
    size_t n_spans;
} fd_delta_rows_t;

/* One ISA's functions for one activation dtype, for `n` K heads or V heads from `head` on. */
typedef struct {
    const char *isa;
    void (*convolve)(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n); /* K heads, to `scratch` */
    void (*advance)(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n);  /* V heads, to `out` */
    /* K heads, with their V heads, of all spans. FD_INTERNAL if there is no memory for it. */
    fd_status_t (*spans)(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n);
} fd_delta_ops_t;

/* The numbers of a row of a convolution, and of the scratch for `n` single rows. */
static inline size_t fd_delta_channels(const fd_delta_t *d) {
    return 2 * d->k_heads * d->k_size + d->v_heads * d->v_size;
}
static inline size_t fd_delta_scratch(const fd_delta_t *d, size_t n) {
    return n * fd_delta_channels(d) + 2 * d->v_heads * d->v_size;
}

/* The functions of an ISA that this machine supports; NULL if it has none for the dtype. */
const fd_delta_ops_t *fd_delta_ops(fd_isa_t isa, uint32_t act_dtype);

/* Advances the states by single rows, one after another where they are of one sequence, and then by spans, in as many
 * of `threads` threads as pay. FD_INTERNAL if memory runs out. */
fd_status_t fd_delta_rows(const fd_delta_ops_t *ops, const fd_delta_t *d, const fd_delta_rows_t *r, unsigned threads);
