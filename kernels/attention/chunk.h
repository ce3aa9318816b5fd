/* The layout of a chunk, which is K and V of FD_PAGE_TOKENS tokens of one KV head in one layer. Every ISA uses it.
 *
 * Both products of attention sum over an index: scores sum over dimensions, outputs sum over tokens. K and V are stored
 * so that neighbouring lanes of a vector register hold neighbouring results, and no sum crosses lanes:
 *
 *   K  sum index: dimensions, lanes: tokens        head_size / E words deep, 128 lanes wide
 *   V  sum index: tokens,     lanes: dimensions    128 / E words deep, v_size lanes wide
 *
 * Each matrix is cut into columns of 32 lanes. A column is [depth][32] words, and the columns follow each other in
 * memory; the last column of V is narrower where 32 does not divide v_size.
 *
 * A word holds E consecutive elements along the sum index, which a kernel unpacks by a shift and a mask:
 *
 *   fp32  1 element in 32 bits
 *   fp16  1 element in 16 bits
 *   bf16  2 elements in 32 bits, the first in the low half
 *   int8  4 elements in 32 bits, in bytes 0, 2, 1, 3
 *   int4  8 elements in 32 bits, in the low nibbles of bytes 0, 2, 1, 3, then in the high nibbles of the same bytes
 *
 * Bytes 0 and 2 hold neighbouring elements, so masking the other bytes off leaves 16-bit pairs that vpmaddwd can
 * multiply.
 *
 * Integer formats store one more word for each token and matrix, its affine word:
 *
 *   int8  the scale in fp32                      x = scale * (stored - 128)          scale = max |x| / 127
 *   int4  the scale in bf16 (high half) and      x = scale * (stored - 8) + centre   both by least squares
 *         the centre in bf16 (low half)                                              (fd_int4_grid, fd_int4_fit)
 *
 * The affine words of K are the last row of each column of K; the affine words of V are 128 words between K and V. So a
 * kernel reads a chunk from its first byte to its last without a gap, which hardware prefetchers can follow.
 *
 * Where V is the first elements of K (latent attention), a chunk is K alone, and kernels put V into the layout above
 * when they read it (values_simd.h). int8-int4, which stores the two differently, cannot store such a K.
 *
 * int8-int4 stores K as int8 does and V as int4 does; every other format stores K and V alike. A Hadamard
 * transform (cpu/hadamard.h) is applied to K before it is rounded to integers, and to Q; to V before it is rounded to
 * int4, or with K where it is a part of K, and to O. The caller may have applied it (FD_HADAMARD_QK, FD_HADAMARD_VO).
 *
 * Rounding is to nearest even. fp16 saturates at +-65504, because an infinity in the cache would turn every later
 * output of its sequence into NaN; bf16 has the range of fp32 and need not saturate. fp32, fp16 and bf16 keep
 * subnormals and NaN. An int8 token whose max |x| is below FD_TINY is stored as zeros with scale 0, because 127 / max
 * |x| would overflow. An int4 token whose scale would be below FD_TINY is stored with
 * scale 0.
 */
#pragma once

#include "attention.h"
#include "cpu/compiler.h"
#include "cpu/hadamard.h"
#include "cpu/half.h"
#include "region/region.h"

#define FD_COLUMN_LANES 32u
#define FD_TINY 1e-33f /* 65535 / FD_TINY is finite; 65535 is the largest multiplier of any kernel (kv_qmax) */

/* The format of K and the format of V. Functions on words take one of these (`format`, never FD_KV_INT8_INT4);
 * functions on chunks take the KV format of the cache (`dtype`).
 *
 * A switch over a format has a case for each enumerator and no default, so that the compiler (-Wswitch) names every
 * switch that lacks a new format. */
FD_INLINE fd_kv_dtype_t fd_k_format(fd_kv_dtype_t dtype) { return dtype == FD_KV_INT8_INT4 ? FD_KV_INT8 : dtype; }
FD_INLINE fd_kv_dtype_t fd_v_format(fd_kv_dtype_t dtype) { return dtype == FD_KV_INT8_INT4 ? FD_KV_INT4 : dtype; }

/* Whether the format stores integers; K and V of a dtype agree in this. */
FD_INLINE int fd_kv_is_int(fd_kv_dtype_t dtype) {
    switch (fd_k_format(dtype)) {
    case FD_KV_INT8:
    case FD_KV_INT4: return 1;
    case FD_KV_FP32:
    case FD_KV_FP16:
    case FD_KV_BF16: return 0;
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}

/* The bits of an element, the bytes of a word, and E of the list above. */
FD_INLINE uint32_t fd_elem_bits(fd_kv_dtype_t format) {
    switch (format) {
    case FD_KV_FP32: return 32;
    case FD_KV_FP16:
    case FD_KV_BF16: return 16;
    case FD_KV_INT8: return 8;
    case FD_KV_INT4: return 4;
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}
FD_INLINE size_t fd_word_bytes(fd_kv_dtype_t format) { return format == FD_KV_FP16 ? 2 : 4; }
FD_INLINE uint32_t fd_word_elems(fd_kv_dtype_t format) {
    return (uint32_t)(8 * fd_word_bytes(format) / fd_elem_bits(format));
}

/* The lowest bit of element i in its word. */
FD_INLINE uint32_t fd_elem_shift(fd_kv_dtype_t format, uint32_t i) {
    const uint32_t swapped = (i & 1u) << 1 | (i >> 1 & 1u); /* bytes 0, 2, 1, 3 */
    switch (format) {
    case FD_KV_FP32:
    case FD_KV_FP16: return 0;
    case FD_KV_BF16: return i % 2 * 16;
    case FD_KV_INT8: return swapped * 8;
    case FD_KV_INT4: return swapped * 8 + i % 8 / 4 * 4;
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}

/* fd_lane_offset: bytes from the start of a matrix, `depth` words deep, to lane `lane` of its first row.
 * fd_lane_stride: bytes from there to the same lane of the next row; the matrix is `lanes` lanes wide. */
FD_INLINE size_t fd_lane_offset(fd_kv_dtype_t format, uint32_t depth, uint32_t lane) {
    const uint32_t in_column = lane % FD_COLUMN_LANES;
    return ((size_t)(lane - in_column) * depth + in_column) * fd_word_bytes(format);
}
FD_INLINE size_t fd_lane_stride(fd_kv_dtype_t format, uint32_t lanes, uint32_t lane) {
    const uint32_t remaining = lanes - lane / FD_COLUMN_LANES * FD_COLUMN_LANES;
    return (remaining < FD_COLUMN_LANES ? remaining : FD_COLUMN_LANES) * fd_word_bytes(format);
}

/* The depth of a column in words. A column of K of an integer format has one more word, the row of affine words. */
FD_INLINE uint32_t fd_k_depth(fd_kv_dtype_t format, uint32_t head_size) {
    return head_size / fd_word_elems(format) + fd_kv_is_int(format);
}
FD_INLINE uint32_t fd_v_depth(fd_kv_dtype_t format) { return FD_PAGE_TOKENS / fd_word_elems(format); }

/* Byte offsets in a chunk: the affine words of token t, the start of V, and the end of the chunk. A chunk whose V is a
 * part of K ends where the affine words of V would begin. */
FD_INLINE size_t fd_chunk_k_affine(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t t) {
    const uint32_t depth = fd_k_depth(fd_k_format(dtype), head_size);
    return fd_lane_offset(fd_k_format(dtype), depth, t) + (depth - 1) * FD_COLUMN_LANES * sizeof(uint32_t);
}
FD_INLINE size_t fd_chunk_v_affine(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t t) {
    return fd_lane_offset(fd_k_format(dtype), fd_k_depth(fd_k_format(dtype), head_size), FD_PAGE_TOKENS) +
           t * sizeof(uint32_t);
}
FD_INLINE size_t fd_v_affine_bytes(fd_kv_dtype_t dtype) {
    return fd_kv_is_int(dtype) ? FD_PAGE_TOKENS * sizeof(uint32_t) : 0;
}
FD_INLINE size_t fd_chunk_v(fd_kv_dtype_t dtype, uint32_t head_size) {
    return fd_chunk_v_affine(dtype, head_size, 0) + fd_v_affine_bytes(dtype);
}
FD_INLINE size_t fd_chunk_end(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t v_size, int v_in_k) {
    if (v_in_k) return fd_chunk_v_affine(dtype, head_size, 0);
    const fd_kv_dtype_t format = fd_v_format(dtype);
    return fd_chunk_v(dtype, head_size) + (size_t)v_size * fd_v_depth(format) * fd_word_bytes(format);
}

/* A stored integer represents scale * (stored - zero point) + centre; scale and centre come from an affine word. */
static inline int fd_zero_point(fd_kv_dtype_t format) { return format == FD_KV_INT8 ? 128 : 8; }

/* Whether a kernel transforms Q and K, and whether it transforms V and O (cpu/hadamard.h). `hadamard` says what its
 * caller does. */
FD_INLINE int fd_transforms_qk(fd_kv_dtype_t dtype, uint32_t hadamard) {
    return fd_kv_is_int(fd_k_format(dtype)) && !(hadamard & FD_HADAMARD_QK);
}
FD_INLINE int fd_transforms_vo(fd_kv_dtype_t dtype, int v_in_k, uint32_t hadamard) {
    if (v_in_k) return fd_transforms_qk(dtype, hadamard);
    return fd_v_format(dtype) == FD_KV_INT4 && !(hadamard & FD_HADAMARD_VO);
}
/* Transforms a row of Q or K from `src` to `x`; the part of K that is V too, if any, apart from the rest, so that the
 * transform of O undoes it. */
FD_INLINE void fd_transform_qk(float *x, const float *src, uint32_t head_size, uint32_t v_size, int v_in_k) {
    const uint32_t first = v_in_k ? v_size : head_size;
    fd_hadamard(x, src, first);
    fd_hadamard(x + first, src + first, head_size - first);
}

/* How the values of an int4 token become integers. With `fine` integers in a step,
 *
 *   fine integer   f = round((x - centre) * inverse), clipped to FD_INT4_FINE_MAX
 *   code           n = round(f / FD_INT4_FINE), clipped to -8..7
 *
 * The steps cover FD_INT4_COVER of the token's range: the few values beyond them lose less than all others gain.
 * fd_int4_fit then chooses the scale and the centre that the codes fit best. The sums that it needs are sums of
 * integers below 2^24, so every ISA gets the same scale and centre, whatever the order in which it adds. */
#define FD_INT4_COVER 0.95f
#define FD_INT4_FINE 256.0f
#define FD_INT4_FINE_MAX 4095.0f
typedef struct {
    float step, inverse, centre; /* inverse is FD_INT4_FINE / step, or 0 if all values are stored as the centre */
} fd_int4_grid_t;

/* Sums over a token's elements: of codes, squared codes, fine integers, and codes times fine integers. */
typedef struct {
    float n, nn, f, nf;
} fd_int4_sums_t;

/* The grid of a token whose values lie in [min, max]. */
static inline fd_int4_grid_t fd_int4_grid(float min, float max) {
    const float half_step = (max - min) / 30.0f;
    const float centre = fd_bits_float((uint32_t)fd_fp32_to_bf16(max * 0.5f + min * 0.5f + half_step) << 16);
    const float above = (max - centre) / 7.0f, below = (centre - min) / 8.0f;
    const float step = (above > below ? above : below) * FD_INT4_COVER;
    return (fd_int4_grid_t){step, step < FD_TINY ? 0.0f : FD_INT4_FINE / step, centre};
}

/* The affine word of a token of `size` elements: the least-squares centre, rounded to bf16, then the least-squares
 * scale for this centre. The quotients of_centre and of_scale depend on the sums alone, so that a core divides while
 * it computes the rest. */
static inline uint32_t fd_int4_fit(fd_int4_grid_t grid, fd_int4_sums_t sums, uint32_t size) {
    const double n = sums.n, nn = sums.nn, f = sums.f, nf = sums.nf, unit = (double)grid.step / FD_INT4_FINE;
    const double determinant = size * nn - n * n;
    if (grid.inverse == 0.0f || !(determinant > 0)) return fd_fp32_to_bf16(grid.centre);
    const double of_centre = unit / determinant, of_scale = unit / nn;
    const uint32_t centre = fd_fp32_to_bf16((float)(grid.centre + (nn * f - n * nf) * of_centre));
    const double moved = ((double)fd_bits_float(centre << 16) - grid.centre) / unit;
    const float scale = (float)((nf - moved * n) * of_scale);
    return (scale >= FD_TINY ? (uint32_t)fd_fp32_to_bf16(scale) << 16 : 0u) | centre;
}

/* The positions [start, end) that query token j of a block sees. */
FD_INLINE uint64_t fd_visible_end(const fd_attend_t *a, uint32_t j) { return (uint64_t)a->q_pos + j + 1; }

FD_INLINE uint64_t fd_visible_start(const fd_attend_t *a, uint32_t j) {
    const uint64_t end = fd_visible_end(a, j), start = a->window && end > a->window ? end - a->window : 0;
    if (!a->segment) return start;
    const uint64_t segment = (end - 1) / a->segment * a->segment;
    return segment > start ? segment : start;
}

/* The byte offset of query row `row` of KV head `head` in q, and in o. */
FD_INLINE size_t fd_row_offset(const fd_attend_t *a, uint32_t head, uint32_t row, size_t head_stride,
                               size_t token_stride, uint32_t size) {
    const uint32_t token = a->q_len == 1 ? 0 : row / a->group,
                   in_group = row - token * a->group; /* decode (q_len 1) skips the division */
    return head * head_stride + token * token_stride + (size_t)in_group * size * fd_act_bytes(a->act_dtype);
}
FD_INLINE size_t fd_q_offset(const fd_attend_t *a, uint32_t head, uint32_t row) {
    return fd_row_offset(a, head, row, a->q_head_stride, a->q_token_stride, a->head_size);
}
FD_INLINE size_t fd_o_offset(const fd_attend_t *a, uint32_t head, uint32_t row) {
    return fd_row_offset(a, head, row, a->o_head_stride, a->o_token_stride, a->v_size);
}

/* Clips positions [start, end) to the tokens [*lo, *hi) of the chunk whose first token is at position `base`. The
 * result is empty if *lo >= *hi. */
FD_INLINE void fd_clip(uint64_t start, uint64_t end, uint64_t base, uint32_t *lo, uint32_t *hi) {
    *lo = start <= base ? 0 : start - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(start - base);
    *hi = end <= base ? 0 : end - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(end - base);
}
