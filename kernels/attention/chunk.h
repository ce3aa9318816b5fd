/* The layout of a chunk: K and V of FD_PAGE_TOKENS tokens of one KV head in one layer. The same for every ISA.
 *
 * K and V are matrices that a kernel multiplies from the left, by queries and by softmax weights. Both are stored so
 * that a vector register holds consecutive results (lanes) and no product needs a sum across lanes:
 *
 *   K  sums over dimensions, lanes are tokens:      head_size / E words deep, 128 wide
 *   V  sums over tokens,     lanes are dimensions:  128 / E words deep, head_size wide
 *
 * Either is cut into columns of 32 lanes, one behind the other, each [depth][32] words; V's last one is narrower where
 * 32 does not divide head_size. Integers have a word more a token, its affine word: K's in a last row of each column,
 * V's in 128 words between K and V. So a kernel reads a chunk from its first byte to its last, without a gap: hardware
 * prefetchers follow that, and lose their way at every step aside.
 *
 * A word holds E consecutive elements of the sum's index, so that a kernel takes them apart with a shift and a mask:
 *
 *   fp32  1 in 32 bits
 *   fp16  1 in 16 bits
 *   bf16  2 in 32 bits, the first in the low half
 *   int8  4 in 32 bits, in the bytes 0, 2, 1, 3
 *   int4  8 in 32 bits, in the low nibbles of bytes 0, 2, 1, 3, then in the high ones
 *
 * int8-int4 has K as int8 has it and V as int4 has it; every other format is that of both.
 *
 * Bytes 0 and 2 are thus two neighbours in 16-bit halves once the others are masked off, as vpmaddwd wants them.
 *
 * An affine word is, of int8, the fp32 scale; of int4, the scale in bf16 (high half) and the centre in bf16 (low half).
 *
 *   int8  x = scale * (stored - 128)             scale = max |x| / 127
 *   int4  x = scale * (stored - 8) + centre      scale = (max - min) / 15, centre = (min + max + scale) / 2
 *
 * fp16 saturates: what is beyond +-65504 is stored as +-65504, for an infinity in the cache would turn every later
 * output of its sequence into NaN. bf16 has fp32's range and does not; subnormals are kept. Everything is rounded to
 * nearest even. int8: a token whose max |x| is below FD_TINY is stored as zeros with scale 0 (127 / max |x| would
 * overflow). int4: a token whose values differ by less than FD_TINY from their centre has scale 0. NaN is kept by fp32,
 * fp16 and bf16.
 */
#ifndef FD_CHUNK_H
#define FD_CHUNK_H

#include "attention.h"
#include "half.h"
#include "region.h"

#define FD_COLUMN_LANES 32u
#define FD_TINY 1e-33f /* 65535, the most levels that a kernel has, divided by it is finite */

#define FD_INLINE static inline __attribute__((always_inline))

/* Before a loop whose trip count is constant once inlined: only then do arrays of vectors become registers. */
#ifdef __clang__
#define FD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL _Pragma("GCC unroll 8")
#endif

/* The formats of K and of V: what handles words takes one of these (`format`), what handles chunks the cache's own
 * (`dtype`). */
FD_INLINE fd_kv_dtype_t fd_k_format(fd_kv_dtype_t dtype) { return dtype == FD_KV_INT8_INT4 ? FD_KV_INT8 : dtype; }
FD_INLINE fd_kv_dtype_t fd_v_format(fd_kv_dtype_t dtype) { return dtype == FD_KV_INT8_INT4 ? FD_KV_INT4 : dtype; }

/* K and V are both of integers, or neither is. */
FD_INLINE int fd_kv_is_int(fd_kv_dtype_t dtype) { return dtype >= FD_KV_INT8; }

/* E of the list above, and bytes of a word. */
FD_INLINE uint32_t fd_word_elems(fd_kv_dtype_t format) {
    return format == FD_KV_BF16 ? 2 : format == FD_KV_INT8 ? 4 : format == FD_KV_INT4 ? 8 : 1;
}

FD_INLINE size_t fd_word_bytes(fd_kv_dtype_t format) { return format == FD_KV_FP16 ? 2 : 4; }

/* In bytes: from the start of a matrix `depth` words deep to lane `lane` of its first row; from there to the same lane
 * of the next row, where the matrix is `lanes` wide. */
FD_INLINE size_t fd_lane_offset(fd_kv_dtype_t format, uint32_t depth, uint32_t lane) {
    const uint32_t in_column = lane % FD_COLUMN_LANES;
    return ((size_t)(lane - in_column) * depth + in_column) * fd_word_bytes(format);
}
FD_INLINE size_t fd_lane_stride(fd_kv_dtype_t format, uint32_t lanes, uint32_t lane) {
    const uint32_t remaining = lanes - lane / FD_COLUMN_LANES * FD_COLUMN_LANES;
    return (remaining < FD_COLUMN_LANES ? remaining : FD_COLUMN_LANES) * fd_word_bytes(format);
}

/* Which byte of an int8 or int4 word element i (its low two bits) is in. */
FD_INLINE uint32_t fd_word_byte(uint32_t i) { return (i & 1u) << 1 | (i >> 1 & 1u); }

/* Rows of K's columns, that of the affine words included, and of V's. */
FD_INLINE uint32_t fd_k_depth(fd_kv_dtype_t format, uint32_t head_size) {
    return head_size / fd_word_elems(format) + fd_kv_is_int(format);
}
FD_INLINE uint32_t fd_v_depth(fd_kv_dtype_t format) { return FD_PAGE_TOKENS / fd_word_elems(format); }

/* Byte offsets within a chunk: of token t's affine words, of V, of the chunk's end. */
FD_INLINE size_t fd_chunk_k_affine(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t t) {
    const uint32_t depth = fd_k_depth(fd_k_format(dtype), head_size);
    return fd_lane_offset(fd_k_format(dtype), depth, t) + (depth - 1) * FD_COLUMN_LANES * sizeof(uint32_t);
}
FD_INLINE size_t fd_chunk_v_affine(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t t) {
    return fd_lane_offset(fd_k_format(dtype), fd_k_depth(fd_k_format(dtype), head_size), FD_PAGE_TOKENS) +
           t * sizeof(uint32_t);
}
FD_INLINE size_t fd_chunk_v(fd_kv_dtype_t dtype, uint32_t head_size) {
    return fd_chunk_v_affine(dtype, head_size, fd_kv_is_int(dtype) ? FD_PAGE_TOKENS : 0);
}
FD_INLINE size_t fd_chunk_end(fd_kv_dtype_t dtype, uint32_t head_size) {
    const fd_kv_dtype_t format = fd_v_format(dtype);
    return fd_chunk_v(dtype, head_size) + (size_t)head_size * fd_v_depth(format) * fd_word_bytes(format);
}

/* What a stored integer stands for is scale * (stored - zero point) + centre; of an affine word. */
static inline int fd_zero_point(fd_kv_dtype_t format) { return format == FD_KV_INT8 ? 128 : 8; }

static inline float fd_affine_scale(fd_kv_dtype_t format, uint32_t word) {
    return fd_bits_float(format == FD_KV_INT8 ? word : word & 0xffff0000u);
}

static inline float fd_affine_centre(fd_kv_dtype_t format, uint32_t word) {
    return format == FD_KV_INT8 ? 0.0f : fd_bits_float(word << 16);
}

/* scale and centre of an int4 token whose values lie within [min, max]. Whatever the rounding of both leaves out is
 * clipped. */
static inline uint32_t fd_int4_affine(float min, float max) {
    const float step = (max - min) / 15.0f;
    const uint32_t centre = fd_fp32_to_bf16(max * 0.5f + min * 0.5f + step * 0.5f);
    const float c = fd_bits_float(centre << 16), above = (max - c) / 7.0f, below = (c - min) / 8.0f;
    const float scale = above > below ? above : below;
    return (scale < FD_TINY ? 0u : (uint32_t)fd_fp32_to_bf16(scale) << 16) | centre;
}

static inline float fd_int4_inverse(uint32_t word) {
    const float scale = fd_bits_float(word & 0xffff0000u);
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

/* The positions [start, end) that query row j of a block sees. */
FD_INLINE uint64_t fd_visible_end(const fd_attend_t *a, uint32_t j) { return (uint64_t)a->q_pos + j + 1; }

FD_INLINE uint64_t fd_visible_start(const fd_attend_t *a, uint32_t j) {
    const uint64_t end = fd_visible_end(a, j);
    return a->window && end > a->window ? end - a->window : 0;
}

/* Where query row `row` of KV head `head` is in q and o. */
FD_INLINE size_t fd_act_offset(const fd_attend_t *a, uint32_t head, uint32_t row) {
    const uint32_t token = a->q_len == 1 ? 0 : row / a->group,
                   in_group = row - token * a->group; /* decode need not divide */
    return head * a->q_head_stride + token * a->q_token_stride +
           (size_t)in_group * a->head_size * fd_act_bytes(a->act_dtype);
}

/* Clips positions [start, end) to the tokens [*lo, *hi) of the chunk whose first token is `base`; empty if *lo >= *hi.
 */
FD_INLINE void fd_clip(uint64_t start, uint64_t end, uint64_t base, uint32_t *lo, uint32_t *hi) {
    *lo = start <= base ? 0 : start - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(start - base);
    *hi = end <= base ? 0 : end - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(end - base);
}

#endif
