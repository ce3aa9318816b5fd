/* V of a chunk that stores K alone (fd_attend_t.v_in_k): dimensions of K, put into the layout that V has in other
 * chunks (chunk.h).
 *
 * K and V differ in two ways. Neighbouring words are tokens in K and dimensions in V; elements of a word are dimensions
 * in K and tokens in V. Both change where a square of a few tokens and as many dimensions is transposed. Its rows have
 * 16 bytes, so a vector with several such lanes transposes several squares, which are neighbours in V. Their rows are
 * loaded one by one: a load that inserts a lane is cheaper than a shuffle across lanes.
 */
#pragma once

#include "softmax_simd.h"

enum { VALUES_STEP = 64 }; /* dimensions of V that are taken out of K at a time */

enum { SQUARE_LANE = 16, MOST_SQUARE_VECS = 8 };

/* square_low8 and so on interleave, within each lane, the elements in the low or high halves of the lanes. */
#ifdef __AVX512F__
typedef __m512i square_t;

FD_INLINE square_t square_load(const uint8_t *const row[]) {
    const __m128i *const *lane = (const __m128i *const *)row;
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(lane[0]));
    x = _mm512_inserti32x4(x, _mm_loadu_si128(lane[1]), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128(lane[2]), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128(lane[3]), 3);
}
FD_INLINE square_t square_low16(square_t a, square_t b) { return _mm512_unpacklo_epi16(a, b); }
FD_INLINE square_t square_high16(square_t a, square_t b) { return _mm512_unpackhi_epi16(a, b); }
FD_INLINE square_t square_low32(square_t a, square_t b) { return _mm512_unpacklo_epi32(a, b); }
FD_INLINE square_t square_high32(square_t a, square_t b) { return _mm512_unpackhi_epi32(a, b); }
FD_INLINE square_t square_low64(square_t a, square_t b) { return _mm512_unpacklo_epi64(a, b); }
FD_INLINE square_t square_high64(square_t a, square_t b) { return _mm512_unpackhi_epi64(a, b); }
/* The bytes of each lane, in the order of 16 constants. */
#define square_bytes(x, ...) _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi8(__VA_ARGS__)))
/* The low nibbles of a, with the low nibbles of b above them; and the same of the high nibbles. */
FD_INLINE square_t square_low_nibbles(square_t a, square_t b) {
    const __m512i low = _mm512_set1_epi8(0xf);
    return _mm512_or_si512(_mm512_and_si512(a, low), _mm512_slli_epi16(_mm512_and_si512(b, low), 4));
}
FD_INLINE square_t square_high_nibbles(square_t a, square_t b) {
    const __m512i low = _mm512_set1_epi8(0xf);
    return _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(a, 4), low), _mm512_andnot_si512(low, b));
}
/* Lanes of a and b in turns: the first half of them, then the others. */
FD_INLINE void square_zip_lanes(square_t *a, square_t *b) {
    const square_t x = *a, y = *b;
    *a = _mm512_permutex2var_epi64(x, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), y);
    *b = _mm512_permutex2var_epi64(x, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), y);
}
#else
typedef uint8_t square_t __attribute__((vector_size(16), may_alias));
typedef uint16_t square16_t __attribute__((vector_size(16), may_alias));
typedef uint32_t square32_t __attribute__((vector_size(16), may_alias));
typedef uint64_t square64_t __attribute__((vector_size(16), may_alias));

FD_INLINE square_t square_load(const uint8_t *const row[]) {
    square_t x;
    memcpy(&x, row[0], sizeof x);
    return x;
}
FD_INLINE square_t square_low16(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square16_t)a, (square16_t)b, 0, 8, 1, 9, 2, 10, 3, 11);
}
FD_INLINE square_t square_high16(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square16_t)a, (square16_t)b, 4, 12, 5, 13, 6, 14, 7, 15);
}
FD_INLINE square_t square_low32(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square32_t)a, (square32_t)b, 0, 4, 1, 5);
}
FD_INLINE square_t square_high32(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square32_t)a, (square32_t)b, 2, 6, 3, 7);
}
FD_INLINE square_t square_low64(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square64_t)a, (square64_t)b, 0, 2);
}
FD_INLINE square_t square_high64(square_t a, square_t b) {
    return (square_t)__builtin_shufflevector((square64_t)a, (square64_t)b, 1, 3);
}
#define square_bytes(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
FD_INLINE square_t square_low_nibbles(square_t a, square_t b) { return (a & 0xf) | b << 4; }
FD_INLINE square_t square_high_nibbles(square_t a, square_t b) { return a >> 4 | (b & 0xf0); }
FD_INLINE void square_zip_lanes(square_t *a, square_t *b) {}
#endif

enum { SQUARE_LANES = sizeof(square_t) / SQUARE_LANE };

/* The rows of words of K in a square, and its tokens and dimensions. A row of int4 has two vectors: the words of four
 * tokens each. */
FD_INLINE uint32_t square_rows(const fd_kv_dtype_t format) {
    switch (format) {
    case FD_KV_FP32: return 4;
    case FD_KV_FP16: return 8;
    case FD_KV_BF16: return 2;
    case FD_KV_INT8:
    case FD_KV_INT4: return 1;
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}
FD_INLINE uint32_t square_side(const fd_kv_dtype_t format) { return square_rows(format) * fd_word_elems(format); }
FD_INLINE uint32_t square_row_vecs(const fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 2 : 1; }

/* Exchanges tokens and dimensions of four words of int8, whose bytes are elements 0, 2, 1, 3. */
FD_INLINE square_t transpose_bytes(square_t x) {
    return square_bytes(x, 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
}
/* The same of two pairs of words of bf16. */
FD_INLINE square_t transpose_pairs(square_t x) {
    return square_bytes(x, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
}

/* Transposes the squares in the lanes of x, which has square_rows times square_row_vecs vectors. */
FD_INLINE void transpose_squares(const fd_kv_dtype_t format, square_t *x) {
    square_t y[MOST_SQUARE_VECS];
    switch (format) {
    case FD_KV_FP32:
        y[0] = square_low32(x[0], x[1]), y[1] = square_high32(x[0], x[1]);
        y[2] = square_low32(x[2], x[3]), y[3] = square_high32(x[2], x[3]);
        x[0] = square_low64(y[0], y[2]), x[1] = square_high64(y[0], y[2]);
        x[2] = square_low64(y[1], y[3]), x[3] = square_high64(y[1], y[3]);
        return;
    case FD_KV_FP16:
        FD_UNROLL
        for (int i = 0; i < 4; i++)
            y[i] = square_low16(x[2 * i], x[2 * i + 1]), y[i + 4] = square_high16(x[2 * i], x[2 * i + 1]);
        FD_UNROLL
        for (int i = 0; i < 8; i += 4) { /* the rest is that of fp32, for tokens 0 to 3 and 4 to 7 */
            transpose_squares(FD_KV_FP32, y + i);
            FD_UNROLL
            for (int j = i; j < i + 4; j++) x[j] = y[j];
        }
        return;
    case FD_KV_BF16:
        y[0] = transpose_pairs(x[0]), y[1] = transpose_pairs(x[1]);
        x[0] = square_low64(y[0], y[1]), x[1] = square_high64(y[0], y[1]);
        return;
    case FD_KV_INT8: x[0] = transpose_bytes(x[0]); return;
    case FD_KV_INT4: /* low nibbles of a word are dimensions 0 to 3 of K, and tokens 0 to 3 of V */
        y[0] = square_low_nibbles(x[0], x[1]), y[1] = square_high_nibbles(x[0], x[1]);
        x[0] = transpose_bytes(y[0]), x[1] = transpose_bytes(y[1]);
        square_zip_lanes(&x[0], &x[1]);
        return;
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}

/* Takes a token column of one column of V, `dimensions` wide, out of K. Rows of K are `k_stride` bytes apart, those of
 * V `v_stride`. */
FD_INLINE void take_column(const fd_kv_dtype_t format, const uint8_t *k, size_t k_stride, uint8_t *v, size_t v_stride,
                           uint32_t dimensions) {
    const uint32_t rows = square_rows(format), row_vecs = square_row_vecs(format), side = square_side(format);
    for (uint32_t d = 0; d < dimensions; d += SQUARE_LANES * side) {
        const uint32_t left = (dimensions - d) / side, lanes = left < SQUARE_LANES ? left : SQUARE_LANES;
        for (uint32_t t = 0; t < FD_COLUMN_LANES; t += side) {
            square_t x[MOST_SQUARE_VECS];
            FD_UNROLL
            for (uint32_t i = 0; i < rows * row_vecs; i++) {
                const uint8_t *lane[SQUARE_LANES];
                FD_UNROLL
                for (uint32_t j = 0; j < SQUARE_LANES; j++)
                    lane[j] = k + (d / side + (j < lanes ? j : 0)) * rows * k_stride + i / row_vecs * k_stride +
                              t * fd_word_bytes(format) + i % row_vecs * SQUARE_LANE;
                x[i] = square_load(lane);
            }
            transpose_squares(format, x);
            FD_UNROLL
            for (uint32_t i = 0; i < rows; i++) {
                uint8_t *to = v + (t / fd_word_elems(format) + i) * v_stride + d * fd_word_bytes(format);
                if (lanes == SQUARE_LANES) memcpy(to, x + i * row_vecs, row_vecs * sizeof *x);
                else memcpy(to, x + i * row_vecs, lanes * row_vecs * SQUARE_LANE);
            }
        }
    }
}

/* Writes dimensions [from, to) of V to `values`, as a chunk with a V of its own has them. Tokens behind the first
 * `tokens`, up to a multiple of 32, have undefined values. */
FD_INLINE void take_values(const fd_kv_dtype_t format, const block_t *b, uint32_t tokens, uint8_t *values) {
    const uint32_t k_depth = fd_k_depth(format, b->head_size), v_depth = fd_v_depth(format),
                   elems = fd_word_elems(format);
    const size_t k_stride = fd_lane_stride(format, FD_PAGE_TOKENS, 0);
    for (uint32_t column = b->from; column < b->to; column += FD_COLUMN_LANES)
        for (uint32_t t = 0; t < tokens; t += FD_COLUMN_LANES) {
            const size_t v_stride = fd_lane_stride(format, b->v_size, column);
            const uint8_t *k = b->chunk + fd_lane_offset(format, k_depth, t) + column / elems * k_stride;
            uint8_t *v = values + fd_lane_offset(format, v_depth, column - b->from) + t / elems * v_stride;
            if (v_stride == k_stride) take_column(format, k, k_stride, v, k_stride, FD_COLUMN_LANES);
            else take_column(format, k, k_stride, v, v_stride, (uint32_t)(v_stride / fd_word_bytes(format)));
        }
}
