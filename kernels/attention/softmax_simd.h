/* Online softmax of a block of query rows over one chunk (attend_simd.h): it turns scores into the weights that
 * multiply V. This file also has the prefetch policy, the default primitives and the types that a block works on. */
#pragma once

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"
#include "cpu/exp2_simd.h"

/* The softmax works on multiples of this many tokens: whole vectors, and whole words of V in every format. */
enum { SOFTMAX_STEP = LANES < 8 ? 8 : LANES };
enum {
    PAGE_VECS = FD_PAGE_TOKENS / LANES, /* vectors that hold one value for each token of a chunk */
    MAX_VECS = FD_COLUMN_LANES / LANES, /* vectors of the widest tile, which is a column wide */
    LINE = 64                           /* bytes of a cache line */
};

/* The best prefetch distance differs between cores, so there are two policies. The default, for cores by Intel,
 * prefetches one chunk ahead into L2 and does not prefetch V during the softmax. The policy for cores by AMD prefetches
 * a few KiB ahead, during the softmax too: so short a distance leaves few requests in flight, and memory would soon be
 * idle. An ISA file that defines FD_PREFETCH_NEAR has AMD's policy and prefetches into L1. An ISA file that defines
 * FD_PREFETCH_BY_VENDOR has the policy of the processor's vendor and prefetches into L2. */
#ifdef FD_PREFETCH_NEAR
enum { PREFETCH_NEAR = 1, PREFETCH_LOCALITY = 3 };
#else
enum { PREFETCH_NEAR = 0, PREFETCH_LOCALITY = 2 };
#endif
#ifdef FD_PREFETCH_BY_VENDOR
enum { PREFETCH_BY_VENDOR = 1 };
#else
enum { PREFETCH_BY_VENDOR = 0 };
#endif
/* Whether tiles prefetch the first lines of the next page while they read the current page, a few lines each. A block
 * of one row reads an int4 page so fast that the start of the next page costs noticeable time, because the hardware
 * prefetcher has to detect a new stream there. Other prefetches then run at a shorter distance. For other formats this
 * costs more than it gains. */
FD_INLINE int prefetch_next_page_early(const fd_kv_dtype_t dtype, const int rows) {
    return PREFETCH_NEAR && dtype == FD_KV_INT4 && rows == 1;
}
/* The prefetch distance in bytes; prefetch_start limits it to one chunk. `near`: see prefetch_near. With one row, tiles
 * of AVX2 read whole lines, and Zen 4 then reads faster at 6 KiB than at 8 KiB or 4 KiB. */
FD_INLINE size_t prefetch_ahead(const fd_kv_dtype_t dtype, const int rows, const int near) {
    const int nearer = prefetch_next_page_early(dtype, rows) || (PREFETCH_BY_VENDOR && rows == 1);
    return near ? (size_t)(nearer ? 6 : 8) << 10 : SIZE_MAX;
}
FD_INLINE int prefetch_in_softmax(const fd_kv_dtype_t dtype, const int rows, const int near) {
    return near && !prefetch_next_page_early(dtype, rows);
}
/* The number of lines of the next page that each tile prefetches. */
FD_INLINE int early_lines_per_tile(const fd_kv_dtype_t dtype, const int rows) {
    return prefetch_next_page_early(dtype, rows) ? 3 : 0;
}

/* Whether K or V of this format is multiplied in integers. An integer format with multipliers of 32 bits is multiplied
 * in fp32, by queries and weights that are not rounded, after kv_unpack has subtracted the zero point. */
FD_INLINE int multiplies_ints(fd_kv_dtype_t format) { return fd_kv_is_int(format) && kv_bits(format) < 32; }

/* vec_exp2_of_float with a polynomial whose degree depends on the format; the largest relative error is 3e-6 for 16-bit
 * multipliers and 9e-5 for 8-bit multipliers, far below their own rounding error. */
FD_INLINE vec_t vec_exp2(const fd_kv_dtype_t format, vec_t x) {
    const vec_t r = vec_fraction(x);
    vec_t p;
    if (multiplies_ints(format) && kv_bits(format) == 8) {
        p = vec_fma(vec_set1(0x1.3baaaep-4f), r, vec_set1(0x1.d23786p-3f));
        p = vec_fma(p, r, vec_set1(0x1.63e65ap-1f));
    } else if (multiplies_ints(format)) {
        p = vec_fma(vec_set1(0x1.b7f738p-7f), r, vec_set1(0x1.abf866p-5f));
        p = vec_fma(p, r, vec_set1(0x1.ee2452p-3f));
        p = vec_fma(p, r, vec_set1(0x1.62d6c6p-1f));
    } else {
        return vec_exp2_of_float(x);
    }
    return vec_scale2(vec_fma(p, r, vec_set1(1.0f)), x, EXP2_FLUSH);
}

/* Loads the scale and the centre (0 for int8) of LANES tokens from their affine words. */
FD_INLINE void load_affine(const fd_kv_dtype_t format, const uint8_t *p, vec_t *scale, vec_t *centre) {
    const vec_t x = vec_load((const float *)p);
    *scale = format == FD_KV_INT8 ? x : vec_and_bits(x, 0xffff0000u);
    *centre = format == FD_KV_INT8 ? vec_zero() : vec_low_bf16(x);
}

/* Default primitives. An ISA file replaces one by defining FD_OWN_<NAME> and the function kv_<name> before it includes
 * this file. */

/* Stores a query row of a format that is multiplied in floats as multipliers. */
#ifndef FD_OWN_STORE_QUERY
FD_INLINE void kv_store_query(fd_kv_dtype_t format, void *to, const float *q, uint32_t head_size) {
    memcpy(to, q, head_size * sizeof *q);
}
#endif
/* The sizes of query elements, or (`is_v`) of weights, which are not negative. Integer multipliers are scaled so that
 * the largest size becomes kv_qmax. */
#ifndef FD_OWN_SIZE
FD_INLINE vec_t kv_size(fd_kv_dtype_t format, int is_v, vec_t x) { return is_v ? x : vec_abs(x); }
#endif
/* Stores vectors [i, i + 4) of a query row's integers as multipliers. */
#ifndef FD_OWN_STORE_MULTIPLIERS4
FD_INLINE void kv_store_multipliers4(fd_kv_dtype_t format, void *to, uint32_t i, const vec_t *x) {
    for (uint32_t j = 0; j < 4; j++) kv_store_multipliers(format, to, i + j, x[j]);
}
#endif
/* Stores vector i of a row's weights for a float format as multipliers. */
#ifndef FD_OWN_STORE_FLOAT_WEIGHTS
FD_INLINE void kv_store_float_weights(fd_kv_dtype_t format, void *to, uint32_t i, vec_t w) {
    vec_store((float *)to + i * LANES, w);
}
#endif
/* Sums the weights of vectors [first, last) as stored, lane by lane. An ISA that rounds weights to 8 bits or to bf16
 * must replace it; for other ISAs nothing calls it. */
#ifndef FD_OWN_SUM_WEIGHTS
FD_INLINE vec_t kv_sum_weights(fd_kv_dtype_t format, const void *weights, uint32_t first, uint32_t last) {
    return vec_zero();
}
#endif
/* The integer, as kv_unpack returns it for V, that represents 0 (chunk.h: the zero point). */
#ifndef FD_OWN_V_ZERO_POINT
FD_INLINE int kv_v_zero_point(fd_kv_dtype_t format) { return fd_zero_point(format); }
#endif
/* Stores vectors [first, last) of a row's weights for an integer format as multipliers: w times `inverse`, rounded.
 * With FD_HAS_STORE_WEIGHTS4 the ISA file defines kv_store_weights4, which stores four vectors at once; this then
 * stores all vectors of the row, as zeros outside [first, last). */
#ifdef FD_HAS_STORE_WEIGHTS4
FD_INLINE void kv_store_weights(fd_kv_dtype_t format, void *to, uint32_t first, uint32_t last, const vec_t *w,
                                vec_t inverse) {
    FD_UNROLL
    for (uint32_t i = 0; i < PAGE_VECS; i += 4) {
        vec_t x[4];
        FD_UNROLL
        for (uint32_t j = i; j < i + 4; j++) x[j - i] = j >= first && j < last ? vec_mul(w[j], inverse) : vec_zero();
        kv_store_weights4((uint8_t *)to + i * LANES, x);
    }
}
#else
FD_INLINE void kv_store_weights(fd_kv_dtype_t format, void *to, uint32_t first, uint32_t last, const vec_t *w,
                                vec_t inverse) {
    for (uint32_t i = first; i < last; i++) kv_store_multipliers(format, to, i, vec_mul(w[i], inverse));
}
#endif

/* The bytes of a query row's multipliers: kv_parts(format) times 32 bits for each word of K. */
FD_INLINE size_t q_row_bytes(fd_kv_dtype_t format, uint32_t head_size) {
    return head_size / fd_word_elems(format) * kv_parts(format) * sizeof(uint32_t);
}

/* Interleaves the multipliers of a block's rows: word 0 of every row, then word 1 of every row, and so on. Before that,
 * each row lies as the functions above stored it, STORED_ROW_BYTES after the row before it. */
enum { STORED_ROW_BYTES = FD_MAX_HEAD_SIZE * sizeof(float) };
#ifndef FD_OWN_PACK_QUERY_ROWS
FD_INLINE void kv_pack_query_rows(uint8_t *block, const uint8_t *rows, uint32_t n_rows, size_t row_bytes) {
    const uint32_t row_stride = STORED_ROW_BYTES / sizeof(uint32_t), n = (uint32_t)(row_bytes / sizeof(uint32_t)),
                   *from = (const uint32_t *)rows;
    uint32_t *to = (uint32_t *)block, w = 0;
#ifdef FD_HAS_INTERLEAVE4
    if (n_rows % 4 == 0)
        for (; w + LANES <= n; w += LANES)
            for (uint32_t r = 0; r < n_rows; r += 4)
                interleave4(to + w * n_rows + r, n_rows, from + r * row_stride + w, row_stride);
#endif
    for (; w < n; w++)
        for (uint32_t r = 0; r < n_rows; r++) to[w * n_rows + r] = from[r * row_stride + w];
}
#endif

/* The softmax state of a query row. A true score is q_scale times a score (or m) in this state. */
typedef struct {
    float l[LANES];    /* sum of weights, lane by lane */
    float bias[LANES]; /* integer formats: sum of weights times the offsets of V, lane by lane */
    float m;           /* the largest score so far */
    float q_scale;     /* the scale of the query's integers; 1 for float formats */
    float q_sum; /* the sum of the query's integers, or of its floats where an integer format is multiplied in fp32 */
} row_state_t;

/* The weights of a block in one chunk. */
typedef struct {
    float of[MAX_BLOCK][FD_PAGE_TOKENS] __attribute__((aligned(64))); /* scores, then weights as multipliers for V */
    float rescale[LANES] __attribute__((aligned(64)));                /* the factor for acc of each row */
    float scale[MAX_BLOCK]; /* integer formats: the factor for the products of each row's weights */
} weights_t;

/* The work of one block in one chunk: to compute its weights, to add weights times V for some dimensions, or both. */
typedef struct {
    const uint8_t *chunk;
    const uint8_t *next;      /* the chunk that comes next, to be prefetched; may equal `chunk` */
    const uint8_t *next_page; /* the part of the next page that this chunk's tiles prefetch (early_lines_per_tile) */
    size_t chunk_bytes;
    uint32_t index, n_blocks; /* index of this block among the panel's blocks, which take turns at prefetching */
    uint32_t rows, head_size, v_size;
    int v_in_k; /* fd_attend_t.v_in_k */
    weights_t *weights;
    int weighs;        /* whether to compute `weights` */
    uint32_t from, to; /* the dimensions of V to add; `from` begins a column, and `to` ends one or is v_size */
    const uint8_t *v;  /* V from dimension `from` on */
    uint32_t lo, hi;   /* tokens [lo, hi) that at least one row sees */
    int full;          /* whether every row sees every token */
    struct {
        uint32_t lo, hi;
    } visible[MAX_BLOCK]; /* tokens [lo, hi) that each row sees; not set if `full` */
    const uint8_t *q;     /* multipliers of all rows (kv_pack_query_rows) */
    row_state_t *state;   /* [rows] */
    float *acc;           /* [rows][v_size] */
    int by_amd;           /* whether the processor is by AMD; only set if PREFETCH_BY_VENDOR */
    int adjusts;          /* whether adjust_scores (adjust_simd.h) has anything to do; it reads the fields below */
    const fd_attend_t *a;
    uint32_t head, row; /* the KV head, and the block's first row in it */
    uint64_t base;      /* position of the chunk's first token */
    /* NULL, or where the block adds index scores in place of attention, and the weights of its rows */
    float *index_scores;
    const float *index_weights;
} block_t;

/* Attends a block to a chunk; there is one such function for each KV format and number of rows. */
typedef void (*block_fn)(const block_t *b);

/* Whether a block prefetches a few KiB ahead, not one chunk. */
FD_INLINE int prefetch_near(const block_t *b) { return PREFETCH_BY_VENDOR ? b->by_amd : PREFETCH_NEAR; }

/* Returns the address from which tile number `tile` prefetches while it reads from byte `at` of the chunk on. A panel
 * with one block prefetches prefetch_ahead() bytes further on, in the next chunk if need be. Two blocks read the same
 * chunk one after the other, and each prefetches half of every tile of the next chunk, `half_tile` bytes, at half the
 * speed at which it reads (ahead_step): a whole tile at once asks for more lines than a core can wait for. A chunk
 * whose V is a part of K is read twice, as K and as V, and each time half of the next chunk is prefetched. If there are
 * more blocks, or `half_tile` is 0, they take turns, tile by tile; a block whose turn it is not prefetches the lines
 * that it reads itself, which costs less than a branch in the tile's loop. */
FD_INLINE const uint8_t *prefetch_start(const fd_kv_dtype_t dtype, const int rows, const block_t *b, size_t at,
                                        uint32_t tile, size_t half_tile) {
    if (b->v_in_k) at /= 2;
    else if (b->n_blocks == 2 && half_tile) return b->next + at + b->index * half_tile;
    if (b->v_in_k && b->n_blocks == 1) return b->next + at;
    if (b->n_blocks > 1) return (tile % b->n_blocks == b->index ? b->next : b->chunk) + at;
    const size_t max_ahead = prefetch_ahead(dtype, rows, prefetch_near(b)),
                 ahead = max_ahead < b->chunk_bytes ? max_ahead : b->chunk_bytes;
    return at + ahead < b->chunk_bytes ? b->chunk + at + ahead : b->next + (at + ahead - b->chunk_bytes);
}

/* Prefetches one tile's share of the next page's first lines. `tile` counts columns, those of K first, then those of
 * V. */
FD_INLINE void prefetch_next_page(const fd_kv_dtype_t dtype, const int rows, const block_t *b, uint32_t tile) {
    const int lines = early_lines_per_tile(dtype, rows);
    FD_UNROLL
    for (int i = 0; i < lines; i++)
        __builtin_prefetch(b->next_page + (tile * (uint32_t)lines + (uint32_t)i) * LINE, 0, PREFETCH_LOCALITY);
}

/* x holds one value for each of tokens [i * LANES, (i + 1) * LANES). Replaces those outside [lo, hi) by `fill`. */
FD_INLINE vec_t mask_tokens(vec_t x, uint32_t i, uint32_t lo, uint32_t hi, float fill) {
    const uint32_t base = i * LANES, from = lo > base ? lo - base : 0, to = hi > base ? hi - base : 0;
    const uint64_t below_to = to >= LANES ? ~UINT64_C(0) : (UINT64_C(1) << to) - 1,
                   below_from = from >= LANES ? ~UINT64_C(0) : (UINT64_C(1) << from) - 1;
    return vec_select(x, below_to & ~below_from, fill);
}

/* The affine words of V of tokens [t, ...) up to the end of their column. */
FD_INLINE const uint8_t *v_affine(const fd_kv_dtype_t dtype, const block_t *b, uint32_t t) {
    return b->chunk +
           (b->v_in_k ? fd_chunk_k_affine(dtype, b->head_size, t) : fd_chunk_v_affine(dtype, b->head_size, t));
}

/* Adds the index scores of a block's rows in one chunk, whose products with the index keys are its scores. */
FD_INLINE void add_index_scores(const int rows, const block_t *b) {
    for (uint32_t i = 0; i < PAGE_VECS; i++) {
        vec_t sum = vec_load(b->index_scores + i * LANES);
        for (int r = 0; r < rows; r++)
            sum = vec_fma(vec_max(vec_load(&b->weights->of[r][i * LANES]), vec_zero()), vec_set1(b->index_weights[r]),
                          sum);
        vec_store(b->index_scores + i * LANES, sum);
    }
}

/* Online softmax of a block over one chunk. Replaces the scores of tokens [lo, hi) by weights, with their factors, and
 * updates m, l and bias. */
FD_INLINE void online_softmax(const fd_kv_dtype_t dtype, const int rows, const int full, const block_t *b) {
    float (*scores)[FD_PAGE_TOKENS] = b->weights->of, *rescale = b->weights->rescale, *weight_scale = b->weights->scale;
    const fd_kv_dtype_t format = fd_v_format(dtype);
    const uint32_t first = full ? 0 : b->lo / SOFTMAX_STEP * SOFTMAX_STEP / LANES;
    const uint32_t last = full ? PAGE_VECS : (b->hi + SOFTMAX_STEP - 1) / SOFTMAX_STEP * SOFTMAX_STEP / LANES;
    float log2_rescale[LANES] = {0};
    for (int r = 0; r < rows; r++) {
        if (!full && b->visible[r].lo >= b->visible[r].hi) continue; /* log2_rescale 0 leaves acc unchanged */
        row_state_t *state = &b->state[r];
        vec_t max = vec_set1(-INFINITY);
        for (uint32_t i = first; i < last; i++) {
            vec_t s = vec_load(&scores[r][i * LANES]);
            if (!full) {
                s = mask_tokens(s, i, b->visible[r].lo, b->visible[r].hi, -INFINITY);
                vec_store(&scores[r][i * LANES], s);
            }
            max = vec_max(s, max); /* ignores NaN in s */
        }
        if (!vec_any_above(max, vec_set1(state->m))) continue; /* usually m stays */
        const float m = vec_reduce_max(max);
        log2_rescale[r] = (state->m - m) * (state->q_scale * LOG2_E);
        state->m = m;
    }
    vec_store(rescale, vec_exp2(format, vec_load(log2_rescale)));

    const uint8_t *ahead = prefetch_start(dtype, rows, b, fd_chunk_v_affine(dtype, b->head_size, 0), 0, 0);
    vec_t scale[PAGE_VECS], offset[PAGE_VECS];
    const int has_offset = format == FD_KV_INT4 || (format == FD_KV_INT8 && kv_bits(format) == 16);
    /* Weights rounded to bf16 are summed as rounded, so that the normalised weights add up to 1. */
    const int rounded_sum = format == FD_KV_BF16 && kv_parts(format) == 1;
    if (fd_kv_is_int(format)) {
        for (uint32_t i = first; i < last; i++) {
            const size_t at = i * LANES * sizeof(uint32_t);
            if (at % LINE == 0) __builtin_prefetch(ahead + at, 0, PREFETCH_LOCALITY);
            load_affine(format, v_affine(dtype, b, i * LANES), &scale[i], &offset[i]);
            if (kv_bits(format) == 16)
                offset[i] = vec_fma(scale[i], vec_set1(-(float)kv_v_zero_point(format)), offset[i]);
            if (full) continue;
            scale[i] = mask_tokens(scale[i], i, b->lo, b->hi, 0.0f);
            offset[i] = mask_tokens(offset[i], i, b->lo, b->hi, 0.0f);
        }
    }
    const uint8_t *v_ahead = prefetch_start(dtype, rows, b, fd_chunk_v(dtype, b->head_size), 0, 0);
    const int in_softmax = prefetch_in_softmax(dtype, rows, prefetch_near(b));
    for (int r = 0; r < rows; r++) {
        row_state_t *state = &b->state[r];
        float *weights = scores[r];
        weight_scale[r] = 0.0f;
        if (!full && b->visible[r].lo >= b->visible[r].hi) {
            memset(weights, 0, sizeof b->weights->of[r]);
            continue;
        }
        const vec_t m = vec_set1(state->m), to_log2 = vec_set1(state->q_scale * LOG2_E);
        vec_t sum = vec_zero(), bias = vec_zero(), max = vec_zero(), w[PAGE_VECS];
        for (uint32_t i = first; i < last; i++) {
            if (in_softmax) __builtin_prefetch(v_ahead, 0, PREFETCH_LOCALITY), v_ahead += LINE;
            const vec_t p = vec_exp2(format, vec_mul(vec_sub(vec_load(&weights[i * LANES]), m), to_log2));
            if (!rounded_sum) sum = vec_add(sum, p);
            if (fd_kv_is_int(format)) {
                if (has_offset) bias = vec_fma(p, offset[i], bias);
                w[i] = vec_mul(p, scale[i]);
                max = vec_max(max, kv_size(format, 1, w[i]));
            } else {
                kv_store_float_weights(format, weights, i, p);
            }
        }
        if (rounded_sum) sum = kv_sum_weights(format, weights, first, last);
        vec_store(state->l, vec_fma(vec_load(state->l), vec_set1(rescale[r]), sum));
        if (fd_kv_is_int(format)) {
            const float largest = vec_reduce_max(max), qmax = kv_qmax(format, 1);
            const int nonzero = largest >= FD_TINY;
            const vec_t inverse = vec_set1(nonzero ? qmax / largest : 0.0f);
            weight_scale[r] = nonzero ? largest * (1.0f / qmax) : 0.0f;
            kv_store_weights(format, weights, first, last, w, inverse);
            if (kv_bits(format) == 8 &&
                kv_v_zero_point(
                    format)) /* the weights as rounded: their error times the zero point would be V's largest */
                bias = vec_fma(kv_sum_weights(format, weights, first, last),
                               vec_set1(-(float)kv_v_zero_point(format) * weight_scale[r]), bias);
            vec_store(state->bias, vec_fma(vec_load(state->bias), vec_set1(rescale[r]), bias));
        }
    }
}
