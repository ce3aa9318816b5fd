/* The vector kernels, written once against the vectors of the ISA's file that includes this.
 *
 * That file defines `vec_t` of LANES floats or 32-bit integers, the vec_* and kv_* primitives on it, MAX_BLOCK (most query rows a
 * register tile holds; block_rows(dtype) of them are used) and tile_vecs(dtype, rows) (how many vectors of K or V go with
 * that many rows before registers run out). Every function here is inlined into an entry point that fixes dtype and rows, so
 * those parameters cost nothing.
 *
 * Blocking. Query rows (all heads of the group, all tokens of the query block) are cut into panels, panels into blocks. A panel walks
 * the chunks; in each, a block
 *   1. scores 64 tokens in tiles of registers: a vector of K is loaded and taken apart once for all rows of the block;
 *   2. masks what a row must not see, updates m and l, turns scores into weights (online softmax, one step a chunk);
 *   3. adds weights times V in tiles of registers, again one load for all rows.
 * As they go, the tiles prefetch the next chunk front to back, each step as many bytes as it reads itself. In that order, not in
 * the tiles' own: the hardware would fetch the neighbours of every line as well, and all traffic would fall into the first tile.
 *
 * Integer formats multiply in integers. A query row is rounded to 16-bit integers once, the weights of a row in a chunk
 * once a chunk, each scaled by its own largest; products of a chunk are summed exactly in 32 bits. (255 * 32767 * 256 < 2^31.)
 * An ISA may say that 8 bits are enough for a format (kv_bits). With x = scale * stored + offset, the scales of V go into
 * the weights before they are rounded; the offsets give the same for every dimension and are added at the end.
 *
 * Garbage beyond the causal limit: K's tokens are in lanes of their own, which step 2 overwrites with -infinity before anything is
 * computed from them; V beyond the last token that some row of the block sees is not read, or (integers) multiplied by zero.
 */
#ifndef FD_ATTEND_SIMD_H
#define FD_ATTEND_SIMD_H

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"

/* Before a loop whose trip count is constant once inlined: only then do arrays of vectors become registers. */
#ifdef __clang__
#define FD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL _Pragma("GCC unroll 8")
#endif

enum { PANEL_ROWS = 32, PAGE_VECS = FD_PAGE_TOKENS / LANES, PREFETCH_LOCALITY = 2, LINE = 64 };
enum { WORD_TOKENS = LANES < 8 ? 8 : LANES }; /* whole vectors, and whole words of V in every format */
enum { Q_STRIDE = FD_MAX_CHUNK_HEAD * sizeof(float), WEIGHT_STRIDE = FD_PAGE_TOKENS * sizeof(float) };

#define LOG2_E 0x1.715476p+0f
#define EXP2_FLUSH -96.0f /* below it, where products of the result would soon be subnormal (and slow), it is 0 */

/* 2^x for x <= 0: 2^n p(x - n), n = floor(x), p a polynomial with p(0) = 1. Below EXP2_FLUSH, -infinity included, and of NaN it is 0.
 * Largest relative error: 1.5e-7 for floats; 3e-6 for int8 and 9e-5 for int4, far below what 16 and 8 bits lose anyway. */
FD_INLINE vec_t vec_exp2(const fd_kv_dtype_t dtype, vec_t x) {
    const vec_t r = vec_fraction(x);
    vec_t p;
    if (dtype == FD_KV_INT4 && kv_bits(dtype) == 8) {
        p = vec_fma(vec_set1(0x1.3baaaep-4f), r, vec_set1(0x1.d23786p-3f));
        p = vec_fma(p, r, vec_set1(0x1.63e65ap-1f));
    } else if (fd_kv_is_int(dtype)) {
        p = vec_fma(vec_set1(0x1.b7f738p-7f), r, vec_set1(0x1.abf866p-5f));
        p = vec_fma(p, r, vec_set1(0x1.ee2452p-3f));
        p = vec_fma(p, r, vec_set1(0x1.62d6c6p-1f));
    } else {
        p = vec_fma(vec_set1(0x1.e97502p-10f), r, vec_set1(0x1.277854p-7f));
        p = vec_fma(p, r, vec_set1(0x1.c91ce6p-5f));
        p = vec_fma(p, r, vec_set1(0x1.ebdb56p-3f));
        p = vec_fma(p, r, vec_set1(0x1.62e4bap-1f));
    }
    return vec_scale2(vec_fma(p, r, vec_set1(1.0f)), x, EXP2_FLUSH);
}

/* What a panel keeps of a query row. Scores and m are in units of `unit`, which float formats have 1. */
typedef struct {
    float l[LANES], rest[LANES]; /* sums by lane: of weights; of weights times V's offsets */
    float m, unit, q_sum;        /* q_sum: of the query's integers */
} row_state_t;

/* One block's work in one chunk. */
typedef struct {
    const uint8_t *chunk, *next;    /* next: prefetched; may be the same */
    uint32_t index, n_blocks;       /* of the panel's blocks, which take turns at prefetching */
    uint32_t head_size;
    uint32_t lo, hi;                /* tokens that some row sees */
    int full;                       /* every row sees every token */
    uint64_t visible[MAX_BLOCK];    /* bit t: the row sees token t */
    const uint8_t *q;               /* [rows][Q_STRIDE] multipliers: fp32, or integers of kv_bits */
    row_state_t *state;             /* [rows] */
    float *acc;                     /* [rows][head_size] */
} block_t;

/* Where tile `tile` of K (offset 0) or V (offset: where V starts) begins to prefetch while it takes `steps` steps of `step` bytes.
 * If it is not its turn it asks for what it is about to read: that costs less than a branch in the loop. */
FD_INLINE const uint8_t *prefetch_start(const block_t *b, size_t offset, uint32_t tile, uint32_t steps, size_t step) {
    return tile % b->n_blocks == b->index ? b->next + offset + tile * steps * step : b->chunk + offset;
}

/* sum[r][i] += multiplier of row r times lanes [i * LANES, (i + 1) * LANES) of a matrix (chunk.h), over its words [from, to), or only
 * the parts of them that `parts` has a bit for. A lone row sums even and odd parts apart, for the latency; so sum has two then. */
FD_INLINE void multiply(const fd_kv_dtype_t dtype, const int is_v, const int rows, const int vecs, const int half, const int parts,
                        const uint8_t *matrix, size_t stride, uint32_t from, uint32_t to, const uint8_t *multipliers,
                        const size_t multiplier_stride, const uint8_t *ahead, vec_t sum[][MAX_VECS]) {
    const size_t vec_bytes = LANES * fd_word_bytes(dtype), step = vecs * vec_bytes;
    matrix += from * stride;
    multipliers += (size_t)from * kv_parts(dtype) * sizeof(float);
    for (uint32_t s = from; s < to; s++, matrix += stride, multipliers += kv_parts(dtype) * sizeof(float)) {
        FD_UNROLL
        for (size_t line = 0; line < step; line += LINE) __builtin_prefetch(ahead + line, 0, PREFETCH_LOCALITY);
        ahead += step;
        vec_t words[MAX_VECS];
        FD_UNROLL
        for (int i = 0; i < vecs; i++)
            words[i] = half ? kv_load_half(dtype, matrix) : kv_load(dtype, matrix + i * vec_bytes);
        FD_UNROLL
        for (int u = 0; u < kv_parts(dtype); u++) {
            if (!(parts >> u & 1)) continue;
            vec_t x[MAX_VECS];
            FD_UNROLL
            for (int i = 0; i < vecs; i++) x[i] = kv_part(dtype, words[i], u);
            FD_UNROLL
            for (int r = 0; r < rows; r++) {
                const vec_t y = vec_broadcast(multipliers + r * multiplier_stride + u * sizeof(float));
                const int to_sum = rows == 1 ? u & 1 : r;
                FD_UNROLL
                for (int i = 0; i < vecs; i++) sum[to_sum][i] = kv_multiply_add(dtype, is_v, x[i], y, sum[to_sum][i]);
            }
        }
    }
}

FD_INLINE int n_sums(const fd_kv_dtype_t dtype, const int rows) { return rows == 1 && kv_parts(dtype) > 1 ? 2 : rows; }

/* What a lone row has summed apart. */
FD_INLINE vec_t total(const fd_kv_dtype_t dtype, const int rows, vec_t sum[][MAX_VECS], int r, int i) {
    if (n_sums(dtype, rows) == rows) return sum[r][i];
    return fd_kv_is_int(dtype) ? vec_add_int(sum[0][i], sum[1][i]) : vec_add(sum[0][i], sum[1][i]);
}

/* Tokens [t0, t0 + vecs * LANES): scores[r][t] = sum_d q[d][r] K[d][t]. */
FD_INLINE void score_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const block_t *b, uint32_t t0,
                          float scores[][FD_PAGE_TOKENS]) {
    const size_t word = fd_word_bytes(dtype);
    const uint32_t steps = b->head_size / fd_word_elems(dtype);
    const uint8_t *ahead = prefetch_start(b, 0, t0 / (vecs * LANES), steps, vecs * LANES * word);
    vec_t sum[MAX_BLOCK][MAX_VECS];
    FD_UNROLL
    for (int r = 0; r < n_sums(dtype, rows); r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) sum[r][i] = vec_zero();
    multiply(dtype, 0, rows, vecs, 0, -1, b->chunk + t0 * word, FD_PAGE_TOKENS * word, 0, steps, b->q, Q_STRIDE, ahead, sum);
    FD_UNROLL
    for (int i = 0; i < vecs; i++) {
        const uint32_t t = t0 + i * LANES;
        vec_t scale = vec_zero(), offset = vec_zero();
        if (fd_kv_is_int(dtype)) {
            kv_affine(dtype, b->chunk + fd_chunk_k_affine(dtype, b->head_size) + t * sizeof(uint32_t), &scale, &offset);
            offset = vec_fma(scale, vec_set1(-(float)fd_zero_point(dtype)), offset);
        }
        FD_UNROLL
        for (int r = 0; r < rows; r++) {
            vec_t s = total(dtype, rows, sum, r, i);
            if (fd_kv_is_int(dtype)) s = vec_fma(vec_from_int(s), scale, vec_mul(offset, vec_set1(b->state[r].q_sum)));
            vec_store(&scores[r][t], s);
        }
    }
}

/* Online softmax: scores of [lo, hi) become multipliers for V in place; m, l and rest are brought up to date; rescale[r] is what
 * acc must be multiplied by, unit[r] (integers) what the products must be. */
FD_INLINE void soft_max(const fd_kv_dtype_t dtype, const int rows, const int full, const block_t *b,
                        float scores[][FD_PAGE_TOKENS], float *rescale, float *unit) {
    const uint32_t first = full ? 0 : b->lo / WORD_TOKENS * WORD_TOKENS / LANES;
    const uint32_t last = full ? PAGE_VECS : (b->hi + WORD_TOKENS - 1) / WORD_TOKENS * WORD_TOKENS / LANES;
    float change[LANES] = {0};
    for (int r = 0; r < rows; r++) {
        if (!b->visible[r]) continue; /* 0: acc stays as it is */
        row_state_t *state = &b->state[r];
        vec_t max = vec_set1(-INFINITY);
        for (uint32_t i = first; i < last; i++) {
            vec_t s = vec_load(&scores[r][i * LANES]);
            if (!full) {
                s = vec_keep(s, b->visible[r] >> i * LANES, -INFINITY);
                vec_store(&scores[r][i * LANES], s);
            }
            max = vec_max(s, max); /* NaN is passed over */
        }
        if (!vec_any_above(max, vec_set1(state->m))) continue; /* as a rule: the maximum has been seen */
        const float m = vec_reduce_max(max);
        change[r] = (state->m - m) * (state->unit * LOG2_E);
        state->m = m;
    }
    vec_store(rescale, vec_exp2(dtype, vec_load(change)));

    vec_t scale[PAGE_VECS], offset[PAGE_VECS];
    if (fd_kv_is_int(dtype)) {
        const uint64_t seen = ~UINT64_C(0) << b->lo & ~UINT64_C(0) >> (FD_PAGE_TOKENS - b->hi);
        for (uint32_t i = first; i < last; i++) {
            kv_affine(dtype, b->chunk + fd_chunk_v_affine(dtype, b->head_size) + i * LANES * sizeof(uint32_t), &scale[i], &offset[i]);
            if (kv_bits(dtype) == 16) offset[i] = vec_fma(scale[i], vec_set1(-(float)fd_zero_point(dtype)), offset[i]);
            if (full) continue;
            scale[i] = vec_keep(scale[i], seen >> i * LANES, 0.0f);
            offset[i] = vec_keep(offset[i], seen >> i * LANES, 0.0f);
        }
    }
    for (int r = 0; r < rows; r++) {
        row_state_t *state = &b->state[r];
        float *weights = scores[r];
        unit[r] = 0.0f;
        if (!b->visible[r]) {
            memset(weights, 0, sizeof scores[r]);
            continue;
        }
        const vec_t m = vec_set1(state->m), to_log2 = vec_set1(state->unit * LOG2_E);
        vec_t sum = vec_zero(), rest = vec_zero(), max = vec_zero(), w[PAGE_VECS];
        for (uint32_t i = first; i < last; i++) {
            const vec_t p = vec_exp2(dtype, vec_mul(vec_sub(vec_load(&weights[i * LANES]), m), to_log2));
            sum = vec_add(sum, p);
            if (fd_kv_is_int(dtype)) {
                rest = vec_fma(p, offset[i], rest);
                w[i] = vec_mul(p, scale[i]);
                max = vec_max(max, w[i]);
            } else {
                vec_store(&weights[i * LANES], p);
            }
        }
        vec_store(state->l, vec_fma(vec_load(state->l), vec_set1(rescale[r]), sum));
        if (fd_kv_is_int(dtype)) {
            const float largest = vec_reduce_max(max), levels = kv_levels(dtype, 1);
            const int any = largest >= FD_TINY;
            const vec_t inverse = vec_set1(any ? levels / largest : 0.0f);
            unit[r] = any ? largest / levels : 0.0f;
            for (uint32_t i = first; i < last; i++) kv_store_multipliers(dtype, weights, i, vec_mul(w[i], inverse));
            if (kv_bits(dtype) == 8) /* the weights as rounded: their error times the zero point would be V's largest */
                rest = vec_fma(kv_sum_weights(weights, first, last), vec_set1(-(float)fd_zero_point(dtype) * unit[r]), rest);
            vec_store(state->rest, vec_fma(vec_load(state->rest), vec_set1(rescale[r]), rest));
        }
    }
}

/* Dimensions [d0, d0 + vecs * LANES), or LANES / 2 of them if `half`:
 * acc[r][d] = rescale[r] acc[r][d] + sum over [lo, hi) of weights[r][t] V[t][d]. */
FD_INLINE void value_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const int half, const block_t *b, uint32_t d0,
                          float weights[][FD_PAGE_TOKENS], const float *rescale, const float *unit) {
    const size_t word = fd_word_bytes(dtype), stride = b->head_size * word, offset = fd_chunk_v(dtype, b->head_size);
    const uint32_t elems = fd_word_elems(dtype);
    const uint8_t *v = b->chunk + offset + d0 * word, *w = (const uint8_t *)weights;
    const uint8_t *ahead = prefetch_start(b, offset, d0 / (vecs * LANES), FD_PAGE_TOKENS / elems, vecs * LANES * word);
    vec_t sum[MAX_BLOCK][MAX_VECS];
    FD_UNROLL
    for (int r = 0; r < n_sums(dtype, rows); r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) {
            const float *acc = b->acc + (size_t)r * b->head_size + d0 + i * LANES;
            if (fd_kv_is_int(dtype) || r >= rows) sum[r][i] = vec_zero();
            else sum[r][i] = vec_mul(half ? vec_load_half(acc) : vec_load(acc), vec_set1(rescale[r]));
        }
    uint32_t from = b->lo / elems, to = (b->hi + elems - 1) / elems;
    if (dtype == FD_KV_BF16) { /* a word at the edge may hold a token that nobody sees, and that token a NaN */
        if (b->lo % 2) multiply(dtype, 1, rows, vecs, half, 2, v, stride, from, from + 1, w, WEIGHT_STRIDE, v, sum), from++;
        if (b->hi % 2) to--, multiply(dtype, 1, rows, vecs, half, 1, v, stride, to, to + 1, w, WEIGHT_STRIDE, v, sum);
    }
    multiply(dtype, 1, rows, vecs, half, -1, v, stride, from, to, w, WEIGHT_STRIDE, ahead, sum);
    FD_UNROLL
    for (int r = 0; r < rows; r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) {
            float *acc = b->acc + (size_t)r * b->head_size + d0 + i * LANES;
            vec_t x = total(dtype, rows, sum, r, i);
            if (fd_kv_is_int(dtype)) {
                const vec_t old = vec_mul(half ? vec_load_half(acc) : vec_load(acc), vec_set1(rescale[r]));
                x = vec_fma(vec_from_int(x), vec_set1(unit[r]), old);
            }
            if (half)
                vec_store_half(acc, x);
            else
                vec_store(acc, x);
        }
}

FD_INLINE void attend_block(const fd_kv_dtype_t dtype, const int rows, const block_t *b) {
    float scores[MAX_BLOCK][FD_PAGE_TOKENS] __attribute__((aligned(64)));
    float rescale[LANES] __attribute__((aligned(64))), unit[MAX_BLOCK];

    if (fd_kv_is_int(dtype) && !b->index)
        for (uint32_t line = 0; line < 2 * FD_PAGE_TOKENS * sizeof(uint32_t); line += LINE)
            __builtin_prefetch(b->next + fd_chunk_k_affine(dtype, b->head_size) + line, 0, PREFETCH_LOCALITY);

    const int vecs = tile_vecs(dtype, rows), score_vecs = vecs < PAGE_VECS ? vecs : PAGE_VECS;
    const uint32_t step = (uint32_t)score_vecs * LANES;
    for (uint32_t t = b->lo / step * step; t < b->hi; t += step) score_tile(dtype, rows, score_vecs, b, t, scores);

    if (b->full)
        soft_max(dtype, rows, 1, b, scores, rescale, unit);
    else
        soft_max(dtype, rows, 0, b, scores, rescale, unit);

    const uint32_t whole = b->head_size / LANES;
    uint32_t i = 0;
    for (; i + vecs <= whole; i += vecs) value_tile(dtype, rows, vecs, 0, b, i * LANES, scores, rescale, unit);
    if (vecs > 4 && i + 4 <= whole) value_tile(dtype, rows, 4, 0, b, i * LANES, scores, rescale, unit), i += 4;
    if (vecs > 2 && i + 2 <= whole) value_tile(dtype, rows, 2, 0, b, i * LANES, scores, rescale, unit), i += 2;
    if (vecs > 1 && i + 1 <= whole) value_tile(dtype, rows, 1, 0, b, i * LANES, scores, rescale, unit), i += 1;
    if (b->head_size % LANES) value_tile(dtype, rows, 1, 1, b, i * LANES, scores, rescale, unit);
}

typedef void (*block_fn)(const block_t *b);

/* [rows - 1], of one KV dtype; block_rows(dtype) says how many are used. */
#define FD_BLOCK(name, dtype, rows) \
    static void attend_##name##_block##rows(const block_t *b) { attend_block(dtype, rows, b); }

/* First query row and rows of block `i` of the `n` that rows [0, rows) are cut into, as evenly as can be. */
FD_INLINE uint32_t block_row(uint32_t rows, uint32_t n, uint32_t i) { return (uint32_t)((uint64_t)rows * i / n); }

/* A query row as a kernel multiplies by it, and its state before the first chunk. */
FD_INLINE void begin_row(const fd_kv_dtype_t dtype, const float *q, uint32_t head_size, uint8_t *multipliers, row_state_t *state) {
    memset(state, 0, sizeof *state);
    state->m = -INFINITY;
    state->unit = 1.0f;
    if (!fd_kv_is_int(dtype)) {
        memcpy(multipliers, q, head_size * sizeof *q);
        return;
    }
    float padded[FD_MAX_CHUNK_HEAD + LANES] __attribute__((aligned(64)));
    memcpy(padded, q, head_size * sizeof *q);
    memset(padded + head_size, 0, LANES * sizeof *q);
    vec_t max = vec_zero(), sum = vec_zero();
    for (uint32_t d = 0; d < head_size; d += LANES) max = vec_max(max, vec_abs(vec_load(padded + d)));
    const float largest = vec_reduce_max(max), levels = kv_levels(dtype, 0);
    if (largest >= FD_TINY) state->unit = largest / levels;
    const vec_t inverse = vec_set1(largest >= FD_TINY ? levels / largest : 0.0f);
    for (uint32_t d = 0; d < head_size; d += LANES) {
        const vec_t x = vec_round(vec_mul(vec_load(padded + d), inverse));
        sum = vec_add(sum, x);
        kv_store_multipliers(dtype, multipliers, d / LANES, x);
    }
    state->q_sum = vec_reduce_add(sum);
}

/* What the row's sums give in the end. */
FD_INLINE void end_row(const fd_kv_dtype_t dtype, const row_state_t *state, uint32_t head_size, float *m, float *l, float *acc) {
    *m = state->m * state->unit;
    *l = vec_reduce_add(vec_load(state->l));
    if (!fd_kv_is_int(dtype)) return;
    const float rest = vec_reduce_add(vec_load(state->rest));
    for (uint32_t d = 0; d < head_size; d++) acc[d] += rest;
}

/* Rows [row0, row0 + rows) of the query, rows <= PANEL_ROWS. */
FD_INLINE void attend_panel(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks, uint32_t row0, uint32_t rows) {
    uint8_t q[PANEL_ROWS * Q_STRIDE] __attribute__((aligned(64)));
    row_state_t state[PANEL_ROWS];
    const uint32_t most = block_rows(dtype), n_blocks = (rows + most - 1) / most, head_size = a->head_size;
    for (uint32_t r = 0; r < rows; r++)
        begin_row(dtype, a->q + (size_t)(row0 + r) * head_size, head_size, q + r * Q_STRIDE, &state[r]);

    const uint64_t start = fd_row_start(a, row0 / a->group), end = fd_row_end(a, (row0 + rows - 1) / a->group);
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint64_t base = a->first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start) continue;
        if (base >= end) break;
        const uint8_t *next = c + 1 < a->n_chunks && base + FD_PAGE_TOKENS < end ? a->chunks[c + 1] : a->chunks[c];
        for (uint32_t i = 0; i < n_blocks; i++) {
            const uint32_t r0 = block_row(rows, n_blocks, i), n = block_row(rows, n_blocks, i + 1) - r0;
            block_t b = {.chunk = a->chunks[c], .next = next, .index = i, .n_blocks = n_blocks, .head_size = head_size, .lo = FD_PAGE_TOKENS, .full = 1};
            for (uint32_t r = 0; r < n; r++) {
                const uint32_t j = (row0 + r0 + r) / a->group;
                uint32_t lo, hi;
                fd_clip(fd_row_start(a, j), fd_row_end(a, j), base, &lo, &hi);
                b.full &= lo == 0 && hi == FD_PAGE_TOKENS;
                if (lo >= hi) continue;
                b.visible[r] = (~UINT64_C(0) << lo) & (~UINT64_C(0) >> (FD_PAGE_TOKENS - hi));
                if (lo < b.lo) b.lo = lo;
                if (hi > b.hi) b.hi = hi;
            }
            if (b.lo >= b.hi) continue;
            b.q = q + r0 * Q_STRIDE;
            b.state = state + r0;
            b.acc = a->acc + (size_t)(row0 + r0) * head_size;
            blocks[n - 1](&b);
        }
    }
    for (uint32_t r = 0; r < rows; r++)
        end_row(dtype, &state[r], head_size, a->m + row0 + r, a->l + row0 + r, a->acc + (size_t)(row0 + r) * head_size);
}

/* `blocks` are of the KV dtype. */
FD_INLINE void attend(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks) {
    const uint32_t rows = a->q_len * a->group;
    memset(a->acc, 0, (size_t)rows * a->head_size * sizeof *a->acc);
    for (uint32_t r = 0; r < rows; r += PANEL_ROWS)
        attend_panel(dtype, a, blocks, r, rows - r < PANEL_ROWS ? rows - r : PANEL_ROWS);
}

#endif
