/* The gated delta rule for spans of rows of one sequence, written with the vec_* primitives of the including file, with
 * tiles (tile_simd.h), and with the functions of delta_rows_simd.h.
 *
 * Some tokens advance a state together. Their equations (fastdecode/spart/states/delta.py) are products of matrices,
 * computed for a strip of V's columns at a time, so that a strip of the state and of the tokens' rows stays in L1.
 */
#pragma once

#include <stdlib.h>

#include "cpu/exp2_simd.h"
#include "delta_rows_simd.h"
#include "tile_simd.h"

enum {
    SPAN_COLUMNS = 64,                                  /* of a matrix with a column for each token, in whole strips */
    SPAN_TOKENS = SPAN_COLUMNS / TILE_ROWS * TILE_ROWS, /* that advance together, in whole tiles */
    STRIP = TILE_VECTORS * LANES,
};

/* The tokens that advance the states of a K head's V heads together. Zeros fill up their rows, and those of a state, to
 * whole tiles, and V's columns to whole strips. */
typedef struct {
    size_t n, rows, v_width;      /* rows: of tokens, in whole tiles */
    float *q, *k;                 /* [SPAN_TOKENS][k_size] */
    float *turned;                /* [k_size in whole tiles][SPAN_COLUMNS]: K transposed */
    float *of_keys, *of_queries;  /* [SPAN_TOKENS][SPAN_COLUMNS]: their products with the keys up to their own */
    float *lower, *shares;        /* the same size: -L, and the shares of corrections in a token's output */
    float *v, *o;                 /* [SPAN_TOKENS][v_width] */
    float *state;                 /* [k_size in whole tiles][STRIP] */
    float *corrections, *outputs; /* [SPAN_TOKENS][STRIP] */
    float *beta, *fade, *rest;    /* [SPAN_COLUMNS]; fade: exp(G); rest: the decay from a token to the last one */
    float *total, *low;           /* [SPAN_COLUMNS]: the sum G of the decays up to a token, and what it lacks in fp32 */
} span_chunk_t;

FD_INLINE size_t whole(size_t n, size_t of) { return (n + of - 1) / of * of; }

/* c [rows][STRIP] = a [rows][depth] b [depth][STRIP], or c += a b; rows in whole tiles. */
FD_SHARED void multiply_tiles(const float *a, size_t a_stride, const float *b, size_t b_stride, size_t rows,
                              size_t depth, float *c, size_t c_stride, bool add) {
    for (size_t i = 0; i < rows; i += TILE_ROWS)
        multiply_tile(0, TILE_ROWS, TILE_VECTORS, (const word_t *)(a + i * a_stride), a_stride, (const word_t *)b,
                      b_stride, depth, c + i * c_stride, c_stride, add, NULL);
}

/* What row t of a span has for the convolution of the channels from `channel` on, which stand from `first` on in a row
 * of projections. Rows before the span (t < 0) are those of the state. */
FD_INLINE const void *span_inputs(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r,
                                  const fd_delta_span_t *s, int64_t t, size_t channel, size_t first) {
    if (t >= 0) return at(dtype, r->y, (size_t)(s->first + t) * r->y_stride + first);
    const size_t row = (size_t)s->source * (d->kernel - 1) + (size_t)((int64_t)d->kernel - 1 + t);
    return at(dtype, r->inputs, row * fd_delta_channels(d) + channel);
}

/* Convolves `n` channels of row t. */
FD_INLINE void convolve_token(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r,
                              const fd_delta_span_t *s, int64_t t, size_t channel, size_t first, size_t n, float *out) {
    const size_t channels = fd_delta_channels(d);
    const int64_t before = (int64_t)d->kernel - 1;
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const float *weights = d->conv + channel + c;
        vec_t sum = vec_zero();
        for (int64_t i = t - before; i <= t; i++, weights += channels)
            sum = vec_fma(load(dtype, span_inputs(dtype, d, r, s, i, channel, first), c), vec_load(weights), sum);
        vec_store(out + c, silu(sum));
    }
    for (; c < n; c++) {
        const float *weights = d->conv + channel + c;
        float sum = 0.0f;
        for (int64_t i = t - before; i <= t; i++, weights += channels)
            sum += load_one(dtype, span_inputs(dtype, d, r, s, i, channel, first), c) * *weights;
        out[c] = delta_silu(sum);
    }
}

/* Leaves the last rows of a span in the state after it. */
FD_INLINE void keep_inputs(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r,
                           const fd_delta_span_t *s, size_t channel, size_t first, size_t n) {
    const size_t before = d->kernel - 1, channels = fd_delta_channels(d);
    for (size_t i = 0; i < before; i++) {
        void *to = (void *)at(dtype, r->inputs, ((size_t)s->target * before + i) * channels + channel);
        const int64_t t = s->n - (int64_t)before + (int64_t)i;
        memmove(to, span_inputs(dtype, d, r, s, t, channel, first), n * fd_act_bytes(dtype));
    }
}

/* Convolves the tokens' Q and K of a K head, from row `first` of the span on, and multiplies them with the keys. */
FD_INLINE void prepare_k_head(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r,
                              const fd_delta_span_t *s, size_t head, size_t first, const span_chunk_t *b) {
    const size_t size = d->k_size, q_channel = head * size, k_channel = (d->k_heads + head) * size;
    for (size_t t = 0; t < b->n; t++) {
        float *q = b->q + t * size, *k = b->k + t * size;
        const int64_t row = (int64_t)(first + t);
        convolve_token(dtype, d, r, s, row, q_channel, d->q.first + head * d->q.step, size, q);
        convolve_token(dtype, d, r, s, row, k_channel, d->k.first + head * d->k.step, size, k);
        set_length(q, size, d->unit_eps, 1.0f / sqrtf((float)size));
        set_length(k, size, d->unit_eps, 1.0f);
    }
    memset(b->q + b->n * size, 0, (b->rows - b->n) * size * sizeof *b->q);
    memset(b->k + b->n * size, 0, (b->rows - b->n) * size * sizeof *b->k);
    for (size_t i = 0; i < size; i++) {
        float *column = b->turned + i * SPAN_COLUMNS;
        for (size_t t = 0; t < b->n; t++) column[t] = b->k[t * size + i];
        for (size_t t = b->n; t < SPAN_COLUMNS; t++) column[t] = 0.0f;
    }
    for (size_t c = 0; c < b->rows; c += STRIP) { /* each token needs its products with the keys up to its own */
        const size_t top = c / TILE_ROWS * TILE_ROWS, to = top * SPAN_COLUMNS + c;
        multiply_tiles(b->k + top * size, size, b->turned + c, SPAN_COLUMNS, b->rows - top, size, b->of_keys + to,
                       SPAN_COLUMNS, false);
        multiply_tiles(b->q + top * size, size, b->turned + c, SPAN_COLUMNS, b->rows - top, size, b->of_queries + to,
                       SPAN_COLUMNS, false);
    }
}

/* The decays and matrices of V head h, and its convolved V. */
FD_INLINE void prepare_v_head(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r,
                              const fd_delta_span_t *s, size_t h, size_t first, const span_chunk_t *b) {
    const size_t size = d->v_size, group = d->v_heads / d->k_heads;
    const size_t channel = 2 * d->k_heads * d->k_size + h * size;
    const size_t stands = d->v.first + h / group * d->v.step + h % group * size;
    double total = 0.0; /* fp32 would lose a weak decay behind strong ones */
    for (size_t t = 0; t < b->n; t++) {
        const void *y = at(dtype, r->y, ((size_t)s->first + first + t) * r->y_stride);
        b->beta[t] = delta_beta(dtype, d, y, h);
        total += (double)delta_decay(dtype, d, y, h);
        b->total[t] = (float)total, b->low[t] = (float)(total - (double)b->total[t]);
        convolve_token(dtype, d, r, s, (int64_t)(first + t), channel, stands, size, b->v + t * b->v_width);
    }
    memset(b->v + b->n * b->v_width, 0, (b->rows - b->n) * b->v_width * sizeof *b->v);
    const float last = b->total[b->n - 1], last_low = b->low[b->n - 1];
    for (size_t t = b->n; t < SPAN_COLUMNS; t++) b->beta[t] = 0.0f, b->total[t] = last, b->low[t] = last_low;
    for (size_t t = 0; t < b->rows; t++) {
        b->fade[t] = expf(b->total[t]);
        b->rest[t] = expf(last - b->total[t] + (last_low - b->low[t]));
    }
    for (size_t t = 0; t < b->rows; t++) {
        float *lower = b->lower + t * SPAN_COLUMNS, *shares = b->shares + t * SPAN_COLUMNS;
        const vec_t until = vec_set1(b->total[t]), until_low = vec_set1(b->low[t]);
        const vec_t unit = vec_set1(LOG2_E), minus_beta = vec_set1(-b->beta[t]);
        for (size_t c = 0; c <= t; c += LANES) {
            const vec_t low = vec_sub(until_low, vec_load(b->low + c));
            const vec_t decay = vec_min(vec_zero(), vec_add(vec_sub(until, vec_load(b->total + c)), low));
            const vec_t left = vec_exp2_of_float(vec_mul(decay, unit));
            const vec_t of_keys = vec_load(b->of_keys + t * SPAN_COLUMNS + c);
            vec_store(lower + c, vec_mul(vec_mul(minus_beta, left), of_keys));
            vec_store(shares + c, vec_mul(left, vec_load(b->of_queries + t * SPAN_COLUMNS + c)));
        }
        for (size_t c = t + 1; c < whole(t + 1, TILE_ROWS); c++) shares[c] = 0.0f;
    }
}

/* Solves (I + L) U = X for a strip of the corrections: X is in their place. */
FD_INLINE void correct_strip(const span_chunk_t *b) {
    for (size_t top = 0; top < b->rows; top += TILE_ROWS) {
        const float *lower = b->lower + top * SPAN_COLUMNS;
        multiply_tiles(lower, SPAN_COLUMNS, b->corrections, STRIP, TILE_ROWS, top, b->corrections + top * STRIP, STRIP,
                       true);
        for (size_t t = top + 1; t < top + TILE_ROWS; t++) {
            lower += SPAN_COLUMNS;
            for (size_t c = 0; c < STRIP; c += LANES) {
                vec_t sum = vec_load(b->corrections + t * STRIP + c);
                for (size_t i = top; i < t; i++)
                    sum = vec_fma(vec_set1(lower[i]), vec_load(b->corrections + i * STRIP + c), sum);
                vec_store(b->corrections + t * STRIP + c, sum);
            }
        }
    }
}

/* Advances the columns of a state from `column` on: those of `from` to those of `to`, which may be the same. */
FD_INLINE void advance_strip(const fd_delta_t *d, const span_chunk_t *b, const float *from, float *to, size_t column) {
    const size_t size = d->k_size, v_size = d->v_size, width = v_size - column < STRIP ? v_size - column : STRIP;
    const vec_t faded = vec_set1(b->fade[b->rows - 1]);
    for (size_t i = 0; i < size; i++) {
        if (width < STRIP) memset(b->state + i * STRIP, 0, STRIP * sizeof *b->state);
        memcpy(b->state + i * STRIP, from + i * v_size + column, width * sizeof *from);
    }
    multiply_tiles(b->k, size, b->state, STRIP, b->rows, size, b->corrections, STRIP, false);
    multiply_tiles(b->q, size, b->state, STRIP, b->rows, size, b->outputs, STRIP, false);
    for (size_t t = 0; t < b->rows; t++) {
        const vec_t fade = vec_set1(b->fade[t]), beta = vec_set1(b->beta[t]);
        for (size_t c = 0; c < STRIP; c += LANES) {
            float *x = b->corrections + t * STRIP + c, *o = b->outputs + t * STRIP + c;
            const vec_t v = vec_load(b->v + t * b->v_width + column + c);
            vec_store(x, vec_mul(beta, vec_sub(v, vec_mul(fade, vec_load(x)))));
            vec_store(o, vec_mul(fade, vec_load(o)));
        }
    }
    correct_strip(b);
    for (size_t top = 0; top < b->rows; top += TILE_ROWS)
        multiply_tiles(b->shares + top * SPAN_COLUMNS, SPAN_COLUMNS, b->corrections, STRIP, TILE_ROWS, top + TILE_ROWS,
                       b->outputs + top * STRIP, STRIP, true);
    for (size_t t = 0; t < b->rows; t++) {
        const vec_t rest = vec_set1(b->rest[t]);
        for (size_t c = 0; c < STRIP; c += LANES) {
            float *x = b->corrections + t * STRIP + c;
            vec_store(x, vec_mul(rest, vec_load(x)));
        }
        memcpy(b->o + t * b->v_width + column, b->outputs + t * STRIP, STRIP * sizeof *b->o);
    }
    for (size_t i = 0; i < size * STRIP; i += LANES) vec_store(b->state + i, vec_mul(faded, vec_load(b->state + i)));
    multiply_tiles(b->turned, SPAN_COLUMNS, b->corrections, STRIP, whole(size, TILE_ROWS), b->rows, b->state, STRIP,
                   true);
    for (size_t i = 0; i < size; i++) memcpy(to + i * v_size + column, b->state + i * STRIP, width * sizeof *to);
}

/* Takes a K head and its V heads through a span. */
FD_INLINE void delta_span(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r, const fd_delta_span_t *s,
                          size_t head, span_chunk_t *b) {
    const size_t group = d->v_heads / d->k_heads, state = d->k_size * d->v_size, n = (size_t)s->n;
    float *sums = r->sums + (size_t)s->target * d->v_heads * state;
    const float *from = r->sums + (size_t)s->source * d->v_heads * state;
    for (size_t first = 0; first < n; first += b->n, from = sums) {
        b->n = n - first < SPAN_TOKENS ? n - first : SPAN_TOKENS;
        b->rows = whole(b->n, TILE_ROWS);
        prepare_k_head(dtype, d, r, s, head, first, b);
        for (size_t h = head * group; h < (head + 1) * group; h++) {
            prepare_v_head(dtype, d, r, s, h, first, b);
            for (size_t c = 0; c < d->v_size; c += STRIP) advance_strip(d, b, from + h * state, sums + h * state, c);
            for (size_t t = 0; t < b->n; t++) {
                const size_t row = (size_t)s->first + first + t;
                gate_head(dtype, d, b->o + t * b->v_width, delta_z(dtype, d, at(dtype, r->y, row * r->y_stride), h),
                          (void *)at(dtype, r->out, (row * d->v_heads + h) * d->v_size));
            }
        }
    }
    if (!n && from != sums)
        memcpy(sums + head * group * state, from + head * group * state, group * state * sizeof *sums);
    keep_inputs(dtype, d, r, s, head * d->k_size, d->q.first + head * d->q.step, d->k_size);
    keep_inputs(dtype, d, r, s, (d->k_heads + head) * d->k_size, d->k.first + head * d->k.step, d->k_size);
    keep_inputs(dtype, d, r, s, 2 * d->k_heads * d->k_size + head * group * d->v_size, d->v.first + head * d->v.step,
                group * d->v_size);
}

FD_INLINE fd_status_t delta_spans(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r, size_t head,
                                  size_t n) {
    enum { BUFFERS = 17, ALIGNED = 16 };
    const size_t k_rows = whole(d->k_size, TILE_ROWS), v_width = whole(d->v_size, STRIP), tokens = SPAN_TOKENS;
    const size_t square = tokens * SPAN_COLUMNS;
    span_chunk_t b = {.v_width = v_width};
    const struct {
        float **buffer;
        size_t numbers;
    } buffers[BUFFERS] = {
        {&b.q, tokens * d->k_size}, {&b.k, tokens * d->k_size},       {&b.turned, k_rows * SPAN_COLUMNS},
        {&b.of_keys, square},       {&b.of_queries, square},          {&b.lower, square},
        {&b.shares, square},        {&b.v, tokens * v_width},         {&b.o, tokens * v_width},
        {&b.state, k_rows * STRIP}, {&b.corrections, tokens * STRIP}, {&b.outputs, tokens * STRIP},
        {&b.beta, SPAN_COLUMNS},    {&b.fade, SPAN_COLUMNS},          {&b.rest, SPAN_COLUMNS},
        {&b.total, SPAN_COLUMNS},   {&b.low, SPAN_COLUMNS},
    };
    size_t total = 0;
    for (int i = 0; i < BUFFERS; i++) total += whole(buffers[i].numbers, ALIGNED);
    float *memory = aligned_alloc(ALIGNED * sizeof *memory, total * sizeof *memory);
    if (!memory) return FD_INTERNAL;
    memset(memory, 0, total * sizeof *memory);
    for (size_t i = 0, at = 0; i < BUFFERS; at += whole(buffers[i++].numbers, ALIGNED))
        *buffers[i].buffer = memory + at;
    for (size_t h = head; h < head + n; h++)
        for (size_t i = 0; i < r->n_spans; i++) delta_span(dtype, d, r, &r->spans[i], h, &b);
    free(memory);
    return FD_OK;
}
