/* Appends a token to a chunk; every ISA uses this code. The including file defines the conversion of a row before it
 * includes this file (rows_simd.h does so). n is a multiple of 8:
 *
 *   void row_to_fp16(uint16_t *dst, const float *src, uint32_t n)                     saturates
 *   void row_to_bf16(uint16_t *dst, const float *src, uint32_t n)
 *   uint32_t row_to_int8(void *dst, int as_words, const float *src, uint32_t n)       returns the affine word
 *   uint32_t row_to_int4(void *dst, int as_words, const float *src, uint32_t n)       returns the affine word
 *   void row_pair_to_int4(void *k_dst, const float *k, void *v_dst, const float *v, uint32_t n, uint32_t *affine)
 *
 * The integer conversions write uint8_t, or uint32_t if `as_words`. row_pair_to_int4 converts K to bytes and V to
 * words.
 */
#pragma once

#include <string.h>

#include "chunk.h"

/* A row after conversion: fp32, the bits of fp16 or bf16, or the stored integers. Integers of K are bytes. Integers of
 * V are 32-bit words, because store_v reads them as words: a load that is wider than the stores before it would wait
 * until those stores have reached the cache. */
typedef union {
    float fp32[FD_MAX_HEAD_SIZE];
    uint16_t half[FD_MAX_HEAD_SIZE];
    uint8_t bytes[FD_MAX_HEAD_SIZE];
    uint32_t words[FD_MAX_HEAD_SIZE];
} converted_row_t;

/* Converts a row to `format`; returns the affine word, or 0 for formats that have none. */
FD_INLINE uint32_t convert_row(const fd_kv_dtype_t format, const int is_v, converted_row_t *dst, const float *src,
                               uint32_t n) {
    switch (format) {
    case FD_KV_FP32: memcpy(dst->fp32, src, n * sizeof *src); return 0;
    case FD_KV_FP16: row_to_fp16(dst->half, src, n); return 0;
    case FD_KV_BF16: row_to_bf16(dst->half, src, n); return 0;
    case FD_KV_INT8: return row_to_int8(dst, is_v, src, n);
    case FD_KV_INT4: return row_to_int4(dst, is_v, src, n);
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}

/* Puts four bytes into the byte order of an int8 word (chunk.h) by exchanging the middle two. */
FD_INLINE uint32_t to_word_order(uint32_t x) { return (x & 0xff0000ffu) | (x & 0xff00u) << 8 | (x >> 8 & 0xff00u); }

/* Writes token t of K: one whole word in each row of the token's column. */
FD_INLINE void store_k(const fd_kv_dtype_t format, uint8_t *matrix, uint32_t head_size, uint32_t t,
                       const converted_row_t *k) {
    matrix += fd_lane_offset(format, fd_k_depth(format, head_size), t);
    if (format == FD_KV_FP16) {
        for (uint32_t d = 0; d < head_size; d++) ((uint16_t *)matrix)[d * FD_COLUMN_LANES] = k->half[d];
        return;
    }
    uint32_t words[FD_MAX_HEAD_SIZE]; /* builds all words first, which vectorises, then scatters them */
    const uint32_t n = head_size / fd_word_elems(format);
    if (format == FD_KV_INT4) {
        for (uint32_t i = 0; i < n; i++) {
            uint64_t x;
            memcpy(&x, k->bytes + 8 * i, sizeof x);
            words[i] = to_word_order((uint32_t)(x | x >> 28));
        }
    } else {
        memcpy(words, k, n * sizeof *words);
        for (uint32_t i = 0; format == FD_KV_INT8 && i < n; i++) words[i] = to_word_order(words[i]);
    }
    for (uint32_t i = 0; i < n; i++) ((uint32_t *)matrix)[i * FD_COLUMN_LANES] = words[i];
}

/* Writes token t of V for dimensions [d, d + n) of one column: the token's bits in each word of one row, at `to`. */
FD_INLINE void store_v_column(const fd_kv_dtype_t format, uint8_t *to, uint32_t t, const converted_row_t *v, uint32_t d,
                              uint32_t n) {
    if (format == FD_KV_FP32) memcpy(to, v->fp32 + d, n * sizeof *v->fp32);
    if (format == FD_KV_FP16) memcpy(to, v->half + d, n * sizeof *v->half);
    if (fd_word_elems(format) == 1) return;
    uint32_t *words = (uint32_t *)to;
    const uint32_t shift = fd_elem_shift(format, t), mask = ((1u << fd_elem_bits(format)) - 1) << shift;
    for (uint32_t i = 0; i < n; i++)
        words[i] = (words[i] & ~mask) | (format == FD_KV_BF16 ? v->half[d + i] : v->words[d + i]) << shift;
}

FD_INLINE void store_v(const fd_kv_dtype_t format, uint8_t *matrix, uint32_t v_size, uint32_t t,
                       const converted_row_t *v) {
    const uint32_t depth = fd_v_depth(format), row = t / fd_word_elems(format);
    for (uint32_t d = 0; d < v_size; d += FD_COLUMN_LANES) {
        uint8_t *words = matrix + fd_lane_offset(format, depth, d) + row * fd_lane_stride(format, v_size, d);
        if (d + FD_COLUMN_LANES <= v_size) store_v_column(format, words, t, v, d, FD_COLUMN_LANES);
        else store_v_column(format, words, t, v, d, v_size - d);
    }
}

FD_INLINE void append_row(const fd_kv_dtype_t dtype, uint8_t *chunk, const uint32_t head_size, const uint32_t v_size,
                          uint32_t t, const float *k, const float *v, uint32_t hadamard) {
    const fd_kv_dtype_t k_format = fd_k_format(dtype), v_format = fd_v_format(dtype);
    converted_row_t k_row, v_row;
    float transformed_k[FD_MAX_HEAD_SIZE] __attribute__((aligned(64)));
    float transformed_v[FD_MAX_HEAD_SIZE] __attribute__((aligned(64)));
    if (fd_transforms_qk(dtype, hadamard)) {
        fd_transform_qk(transformed_k, k, head_size, v_size, !v);
        k = transformed_k;
    }
    if (!v) {
        const uint32_t k_affine = convert_row(k_format, 0, &k_row, k, head_size);
        store_k(k_format, chunk, head_size, t, &k_row);
        if (fd_kv_is_int(dtype)) *(uint32_t *)(chunk + fd_chunk_k_affine(dtype, head_size, t)) = k_affine;
        return;
    }
    if (fd_transforms_vo(dtype, 0, hadamard)) {
        fd_hadamard(transformed_v, v, v_size);
        v = transformed_v;
    }
    uint32_t affine[2];
    if (dtype == FD_KV_INT4 && head_size == v_size) {
        row_pair_to_int4(&k_row, k, &v_row, v, head_size, affine);
    } else {
        affine[0] = convert_row(k_format, 0, &k_row, k, head_size);
        affine[1] = convert_row(v_format, 1, &v_row, v, v_size);
    }
    store_k(k_format, chunk, head_size, t, &k_row);
    store_v(v_format, chunk + fd_chunk_v(dtype, head_size), v_size, t, &v_row);
    if (!fd_kv_is_int(dtype)) return;
    *(uint32_t *)(chunk + fd_chunk_k_affine(dtype, head_size, t)) = affine[0];
    *(uint32_t *)(chunk + fd_chunk_v_affine(dtype, head_size, t)) = affine[1];
}

/* Appends with the usual head size, 128, as a constant, so that the loops unroll. */
FD_INLINE void append(const fd_kv_dtype_t dtype, uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t,
                      const float *k, const float *v, uint32_t hadamard) {
    if (head_size == 128 && v_size == 128) append_row(dtype, chunk, 128, 128, t, k, v, hadamard);
    else append_row(dtype, chunk, head_size, v_size, t, k, v, hadamard);
}

/* Defines fd_append_<name>_<isa>. */
#define FD_APPEND(name, dtype, isa)                                                                                    \
    void fd_append_##name##_##isa(uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t, const float *k,     \
                                  const float *v, uint32_t hadamard) {                                                 \
        append(dtype, chunk, head_size, v_size, t, k, v, hadamard);                                                    \
    }
