/* Online softmax over one chunk, a block of query rows at a time (attend_simd.h): scores become the weights that V is
 * multiplied by. */
#ifndef FD_SOFTMAX_SIMD_H
#define FD_SOFTMAX_SIMD_H

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"

enum { SOFTMAX_STEP = LANES < 8 ? 8 : LANES }; /* whole vectors, and whole words of V in every format */
enum {
    PAGE_VECS = FD_PAGE_TOKENS / LANES,
    MAX_VECS = FD_COLUMN_LANES / LANES /* of a tile, at most a column wide */,
    LINE = 64
};

/* Cores differ in how they like to be told what to read, so an ISA says which it is for. Intel's: a chunk ahead, into
 * L2, and not while there is arithmetic between two matrices. AMD's: shortly before, into L1, and always, for what they
 * have asked for is little and soon there. */
#ifdef FD_PREFETCH_NEAR
enum { PREFETCH_NEAR = 1, PREFETCH_LOCALITY = 3 };
#else
enum { PREFETCH_NEAR = 0, PREFETCH_LOCALITY = 2 };
#endif
/* A lone row is through a page of int4 so soon that the jump to the next page is felt: whatever prefetches a plain
 * stream in hardware has to find out where it goes on. So the next page's first lines are asked for a few at a time
 * while this one is read, and everything else is asked for a little later. Other formats gain less from that than it
 * costs them. */
FD_INLINE int prefetch_next_page_early(const fd_kv_dtype_t dtype, const int rows) {
    return PREFETCH_NEAR && dtype == FD_KV_INT4 && rows == 1;
}
/* In bytes; a chunk at most. */
FD_INLINE size_t prefetch_ahead(const fd_kv_dtype_t dtype, const int rows) {
    return PREFETCH_NEAR ? (prefetch_next_page_early(dtype, rows) ? 6 : 8) << 10 : SIZE_MAX;
}
FD_INLINE int prefetch_in_softmax(const fd_kv_dtype_t dtype, const int rows) {
    return PREFETCH_NEAR && !prefetch_next_page_early(dtype, rows);
}
/* Lines from the next page's start on that a tile asks for. */
FD_INLINE int early_lines_per_tile(const fd_kv_dtype_t dtype, const int rows) {
    return prefetch_next_page_early(dtype, rows) ? 3 : 0;
}

#define LOG2_E 0x1.715476p+0f
#define EXP2_FLUSH -96.0f /* below it, where products of the result would soon be subnormal (and slow), it is 0 */

/* 2^x for x <= 0: 2^n p(x - n), n = floor(x), p a polynomial with p(0) = 1. Below EXP2_FLUSH, -infinity included, and
 * of NaN it is 0. Largest relative error: 1.5e-7 for floats; 3e-6 for integers of 16 bits and 9e-5 for those of 8, far
 * below what they lose anyway. */
FD_INLINE vec_t vec_exp2(const fd_kv_dtype_t format, vec_t x) {
    const vec_t r = vec_fraction(x);
    vec_t p;
    if (fd_kv_is_int(format) && kv_bits(format) == 8) {
        p = vec_fma(vec_set1(0x1.3baaaep-4f), r, vec_set1(0x1.d23786p-3f));
        p = vec_fma(p, r, vec_set1(0x1.63e65ap-1f));
    } else if (fd_kv_is_int(format)) {
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

/* How an ISA stores a row of multipliers of floats, and the weights of integer formats, unless it has defined a way of
 * its own. */
#ifndef FD_OWN_STORE_QUERY
FD_INLINE void kv_store_query(fd_kv_dtype_t format, void *to, const float *q, uint32_t head_size) {
    memcpy(to, q, head_size * sizeof *q);
}
#endif
/* Vectors [i, i + 4) of a query's integers. */
#ifndef FD_OWN_STORE_MULTIPLIERS4
FD_INLINE void kv_store_multipliers4(fd_kv_dtype_t format, void *to, uint32_t i, const vec_t *x) {
    for (uint32_t j = 0; j < 4; j++) kv_store_multipliers(format, to, i + j, x[j]);
}
#endif
#ifndef FD_OWN_STORE_FLOAT_WEIGHTS
FD_INLINE void kv_store_float_weights(fd_kv_dtype_t format, void *to, uint32_t i, vec_t w) {
    vec_store((float *)to + i * LANES, w);
}
#endif
/* Lane by lane, the sum of the weights of vectors [first, last) as they are stored; where they are stored as floats
 * nobody asks. */
#ifndef FD_OWN_SUM_WEIGHTS
FD_INLINE vec_t kv_sum_weights(fd_kv_dtype_t format, const void *weights, uint32_t first, uint32_t last) {
    return vec_zero();
}
#endif
/* What V's integers stand for 0 as, once they are multiplied. */
#ifndef FD_OWN_V_ZERO_POINT
FD_INLINE int kv_v_zero_point(fd_kv_dtype_t format) { return fd_zero_point(format); }
#endif
#ifdef FD_HAS_STORE_WEIGHTS4 /* four vectors at a time (kv_store_weights4): all of a row, those outside [first, last)  \
                                zero */
FD_INLINE void kv_store_weights(fd_kv_dtype_t format, void *to, uint32_t first, uint32_t last, const vec_t *w,
                                vec_t inverse) {
    vec_t x[PAGE_VECS];
    FD_UNROLL
    for (uint32_t i = 0; i < PAGE_VECS; i++) x[i] = i >= first && i < last ? vec_mul(w[i], inverse) : vec_zero();
    FD_UNROLL
    for (uint32_t i = 0; i < PAGE_VECS; i += 4) kv_store_weights4((uint8_t *)to + i * LANES, x + i);
}
#else
FD_INLINE void kv_store_weights(fd_kv_dtype_t format, void *to, uint32_t first, uint32_t last, const vec_t *w,
                                vec_t inverse) {
    for (uint32_t i = first; i < last; i++) kv_store_multipliers(format, to, i, vec_mul(w[i], inverse));
}
#endif

/* Bytes of multipliers that a query row is: kv_parts(format) times 32 bits for every word of K. */
FD_INLINE size_t q_row_bytes(fd_kv_dtype_t format, uint32_t head_size) {
    return head_size / fd_word_elems(format) * kv_parts(format) * sizeof(uint32_t);
}

/* Puts the multipliers of a block's rows, each as the functions above have stored it, word by word: a word of every
 * row, then the next. */
enum { STORED_ROW_BYTES = FD_MAX_HEAD_SIZE * sizeof(float) /* bytes from a row to the next before */ };
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

/* What a panel keeps of a query row. Scores and m are in units of `unit`, which float formats have 1. */
typedef struct {
    float l[LANES], bias[LANES]; /* sums by lane: of weights; of weights times V's offsets */
    float m, q_scale, q_sum;     /* q_sum: of the query's integers */
} row_state_t;

/* One block's work in one chunk. */
typedef struct {
    const uint8_t *chunk, *next; /* next: prefetched; may be the same */
    const uint8_t *next_page;    /* of the next page, what this chunk's tiles ask for (early_lines_per_tile) */
    size_t chunk_bytes;          /* of a chunk */
    uint32_t index, n_blocks;    /* of the panel's blocks, which take turns at prefetching */
    uint32_t rows, head_size;
    uint32_t lo, hi; /* tokens that some row sees */
    int full;        /* every row sees every token */
    struct {
        uint32_t lo, hi;
    } visible[MAX_BLOCK]; /* by the row; not set if `full` */
    const uint8_t *q;     /* multipliers of all rows (kv_pack_query_rows) */
    row_state_t *state;   /* [rows] */
    float *acc;           /* [rows][head_size] */
} block_t;

typedef void (*block_fn)(const block_t *b);

/* Where to begin to prefetch, as many bytes as are read meanwhile, the first of them at byte `at` of the chunk:
 * prefetch_ahead further on, in the next chunk if need be. The blocks of a panel read a chunk one after the other, so
 * they prefetch the next one in turns, tile by tile; whose turn it is not asks for what it is about to read: that costs
 * less than a branch in the loop. */
FD_INLINE const uint8_t *prefetch_start(const fd_kv_dtype_t dtype, const int rows, const block_t *b, size_t at,
                                        uint32_t tile) {
    if (b->n_blocks > 1) return (tile % b->n_blocks == b->index ? b->next : b->chunk) + at;
    const size_t max_ahead = prefetch_ahead(dtype, rows),
                 ahead = max_ahead < b->chunk_bytes ? max_ahead : b->chunk_bytes;
    return at + ahead < b->chunk_bytes ? b->chunk + at + ahead : b->next + (at + ahead - b->chunk_bytes);
}

/* Asks for its share of the next page's start. `tile`: of those of 32 lanes, of K and V in turn. */
FD_INLINE void prefetch_next_page(const fd_kv_dtype_t dtype, const int rows, const block_t *b, uint32_t tile) {
    const int lines = early_lines_per_tile(dtype, rows);
    FD_UNROLL
    for (int i = 0; i < lines; i++)
        __builtin_prefetch(b->next_page + (tile * (uint32_t)lines + (uint32_t)i) * LINE, 0, PREFETCH_LOCALITY);
}

/* Lanes [i * LANES, (i + 1) * LANES) of x that are of tokens [lo, hi), elsewhere `fill`. */
FD_INLINE vec_t mask_tokens(vec_t x, uint32_t i, uint32_t lo, uint32_t hi, float fill) {
    const uint32_t base = i * LANES, from = lo > base ? lo - base : 0, to = hi > base ? hi - base : 0;
    const uint64_t below_to = to >= LANES ? ~UINT64_C(0) : (UINT64_C(1) << to) - 1,
                   below_from = from >= LANES ? ~UINT64_C(0) : (UINT64_C(1) << from) - 1;
    return vec_select(x, below_to & ~below_from, fill);
}

/* Online softmax: scores of [lo, hi) become multipliers for V in place; m, l and rest are brought up to date;
 * rescale[r] is what acc must be multiplied by, weight_scale[r] (integers) what the products must be. */
FD_INLINE void online_softmax(const fd_kv_dtype_t dtype, const int rows, const int full, const block_t *b,
                              float scores[][FD_PAGE_TOKENS], float *rescale, float *weight_scale) {
    const fd_kv_dtype_t format = fd_v_format(dtype);
    const uint32_t first = full ? 0 : b->lo / SOFTMAX_STEP * SOFTMAX_STEP / LANES;
    const uint32_t last = full ? PAGE_VECS : (b->hi + SOFTMAX_STEP - 1) / SOFTMAX_STEP * SOFTMAX_STEP / LANES;
    float log2_rescale[LANES] = {0};
    for (int r = 0; r < rows; r++) {
        if (!full && b->visible[r].lo >= b->visible[r].hi) continue; /* acc stays as it is */
        row_state_t *state = &b->state[r];
        vec_t max = vec_set1(-INFINITY);
        for (uint32_t i = first; i < last; i++) {
            vec_t s = vec_load(&scores[r][i * LANES]);
            if (!full) {
                s = mask_tokens(s, i, b->visible[r].lo, b->visible[r].hi, -INFINITY);
                vec_store(&scores[r][i * LANES], s);
            }
            max = vec_max(s, max); /* NaN is passed over */
        }
        if (!vec_any_above(max, vec_set1(state->m))) continue; /* as a rule: the maximum has been seen */
        const float m = vec_reduce_max(max);
        log2_rescale[r] = (state->m - m) * (state->q_scale * LOG2_E);
        state->m = m;
    }
    vec_store(rescale, vec_exp2(format, vec_load(log2_rescale)));

    const uint8_t *affine = b->chunk + fd_chunk_v_affine(dtype, b->head_size, 0);
    const uint8_t *ahead = prefetch_start(dtype, rows, b, fd_chunk_v_affine(dtype, b->head_size, 0), 0);
    vec_t scale[PAGE_VECS], offset[PAGE_VECS];
    const int has_offset = format == FD_KV_INT4 || (format == FD_KV_INT8 && kv_bits(format) == 16);
    const int rounded_sum = format == FD_KV_BF16 &&
                            kv_parts(format) == 1; /* l is of the weights as rounded, so that they add up to 1 */
    if (fd_kv_is_int(format)) {
        for (uint32_t i = first; i < last; i++) {
            const size_t at = i * LANES * sizeof(uint32_t);
            if (at % LINE == 0) __builtin_prefetch(ahead + at, 0, PREFETCH_LOCALITY);
            kv_affine(format, affine + at, &scale[i], &offset[i]);
            if (kv_bits(format) == 16)
                offset[i] = vec_fma(scale[i], vec_set1(-(float)kv_v_zero_point(format)), offset[i]);
            if (full) continue;
            scale[i] = mask_tokens(scale[i], i, b->lo, b->hi, 0.0f);
            offset[i] = mask_tokens(offset[i], i, b->lo, b->hi, 0.0f);
        }
    }
    const uint8_t *v_ahead = prefetch_start(dtype, rows, b, fd_chunk_v(dtype, b->head_size), 0);
    for (int r = 0; r < rows; r++) {
        row_state_t *state = &b->state[r];
        float *weights = scores[r];
        weight_scale[r] = 0.0f;
        if (!full && b->visible[r].lo >= b->visible[r].hi) {
            memset(weights, 0, sizeof scores[r]);
            continue;
        }
        const vec_t m = vec_set1(state->m), to_log2 = vec_set1(state->q_scale * LOG2_E);
        vec_t sum = vec_zero(), bias = vec_zero(), max = vec_zero(), w[PAGE_VECS];
        for (uint32_t i = first; i < last; i++) {
            if (prefetch_in_softmax(dtype, rows)) __builtin_prefetch(v_ahead, 0, PREFETCH_LOCALITY), v_ahead += LINE;
            const vec_t p = vec_exp2(format, vec_mul(vec_sub(vec_load(&weights[i * LANES]), m), to_log2));
            if (!rounded_sum) sum = vec_add(sum, p);
            if (fd_kv_is_int(format)) {
                if (has_offset) bias = vec_fma(p, offset[i], bias);
                w[i] = vec_mul(p, scale[i]);
                max = vec_max(max, w[i]);
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

#endif
