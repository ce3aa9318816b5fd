/* Appending a token to a chunk, once for all ISAs. The file that includes this defines before, for n elements (a multiple of 8):
 *
 *   void row_to_fp16(uint16_t *dst, const float *src, uint32_t n)      saturating
 *   void row_to_bf16(uint16_t *dst, const float *src, uint32_t n)
 *   uint32_t row_to_int8(uint8_t *dst, const float *src, uint32_t n)   returns the affine word, as does
 *   uint32_t row_to_int4(uint8_t *dst, const float *src, uint32_t n)
 */
#ifndef FD_APPEND_H
#define FD_APPEND_H

#include <string.h>

#include "chunk.h"

/* A row in its format: fp32, the bits of fp16 or bf16, or the stored integers. */
typedef union {
    float fp32[FD_MAX_CHUNK_HEAD];
    uint16_t half[FD_MAX_CHUNK_HEAD];
    uint8_t code[FD_MAX_CHUNK_HEAD];
} row_t;

/* Returns the affine word, of integers. */
FD_INLINE uint32_t convert_row(const fd_kv_dtype_t format, row_t *dst, const float *src, uint32_t n) {
    if (format == FD_KV_INT8) return row_to_int8(dst->code, src, n);
    if (format == FD_KV_INT4) return row_to_int4(dst->code, src, n);
    if (format == FD_KV_FP16) row_to_fp16(dst->half, src, n);
    else if (format == FD_KV_BF16) row_to_bf16(dst->half, src, n);
    else memcpy(dst->fp32, src, n * sizeof *src);
    return 0;
}

/* K: whole words, one of every row of a column. */
FD_INLINE void store_k(const fd_kv_dtype_t format, uint8_t *matrix, uint32_t head_size, uint32_t t, const row_t *k) {
    matrix += fd_lane_offset(format, fd_k_depth(format, head_size), t);
    if (format == FD_KV_FP16) {
        for (uint32_t d = 0; d < head_size; d++) ((uint16_t *)matrix)[d * FD_COLUMN_LANES] = k->half[d];
        return;
    }
    uint32_t *to = (uint32_t *)matrix;
    for (uint32_t d = 0; d < head_size; d += fd_word_elems(format), to += FD_COLUMN_LANES) {
        const uint8_t *c = k->code + d;
        if (format == FD_KV_FP32) *to = fd_float_bits(k->fp32[d]);
        if (format == FD_KV_BF16) *to = k->half[d] | (uint32_t)k->half[d + 1] << 16;
        if (format == FD_KV_INT8) *to = c[0] | (uint32_t)c[2] << 8 | (uint32_t)c[1] << 16 | (uint32_t)c[3] << 24;
        if (format == FD_KV_INT4)
            *to = (c[0] | c[4] << 4) | (uint32_t)(c[2] | c[6] << 4) << 8 | (uint32_t)(c[1] | c[5] << 4) << 16 |
                  (uint32_t)(c[3] | c[7] << 4) << 24;
    }
}

/* V: the token's part of every word of a row, dimensions [d, d + n), a column's. */
FD_INLINE void store_v_column(const fd_kv_dtype_t format, uint8_t *words, uint32_t t, const row_t *v, uint32_t d, uint32_t n) {
    if (format == FD_KV_FP32) memcpy(words, v->fp32 + d, n * sizeof *v->fp32);
    if (format == FD_KV_FP16) memcpy(words, v->half + d, n * sizeof *v->half);
    if (format == FD_KV_BF16)
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)words)[2 * i + t % 2] = v->half[d + i];
    if (format == FD_KV_INT8)
        for (uint32_t i = 0; i < n; i++) words[4 * i + fd_word_byte(t)] = v->code[d + i];
    if (format == FD_KV_INT4) {
        const uint32_t shift = t % 8 / 4 * 4;
        for (uint32_t i = 0; i < n; i++) {
            uint8_t *byte = &words[4 * i + fd_word_byte(t)];
            *byte = (uint8_t)((*byte & 0xf0u >> shift) | v->code[d + i] << shift);
        }
    }
}

FD_INLINE void store_v(const fd_kv_dtype_t format, uint8_t *matrix, uint32_t head_size, uint32_t t, const row_t *v) {
    const uint32_t depth = fd_v_depth(format), row = t / fd_word_elems(format);
    for (uint32_t d = 0; d < head_size; d += FD_COLUMN_LANES) {
        uint8_t *words = matrix + fd_lane_offset(format, depth, d) + row * fd_lane_stride(format, head_size, d);
        if (d + FD_COLUMN_LANES <= head_size) store_v_column(format, words, t, v, d, FD_COLUMN_LANES);
        else store_v_column(format, words, t, v, d, head_size - d);
    }
}

FD_INLINE void append(const fd_kv_dtype_t dtype, uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k, const float *v) {
    const fd_kv_dtype_t k_format = fd_k_format(dtype), v_format = fd_v_format(dtype);
    row_t row;
    const uint32_t k_word = convert_row(k_format, &row, k, head_size);
    store_k(k_format, chunk, head_size, t, &row);
    const uint32_t v_word = convert_row(v_format, &row, v, head_size);
    store_v(v_format, chunk + fd_chunk_v(dtype, head_size), head_size, t, &row);
    if (!fd_kv_is_int(dtype)) return;
    *(uint32_t *)(chunk + fd_chunk_k_affine(dtype, head_size, t)) = k_word;
    *(uint32_t *)(chunk + fd_chunk_v_affine(dtype, head_size, t)) = v_word;
}

#endif
