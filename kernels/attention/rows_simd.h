/* The row conversions that append.h asks for, written with the vec_* primitives of the including file. */
#ifndef FD_ROWS_SIMD_H
#define FD_ROWS_SIMD_H

#include "chunk.h"

FD_INLINE void row_to_fp16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store_fp16(dst + i, vec_saturate_fp16(vec_load(src + i)));
    if (i < n) vec_store_fp16_half(dst + i, vec_saturate_fp16(vec_load_half(src + i)));
}

FD_INLINE void row_to_bf16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store_bf16(dst + i, vec_load(src + i));
    if (i < n) vec_store_bf16_half(dst + i, vec_load_half(src + i));
}

/* dst[i] = round(clip((src[i] - centre) * inverse, lowest, highest)) + zero. NaN becomes one of the limits. */
FD_INLINE void row_to_codes(void *dst, const int as_words, const float *src, uint32_t n, float centre, float inverse,
                            float lowest, float highest, int zero) {
    uint8_t *bytes = dst;
    uint32_t *words = dst;
    const vec_t c = vec_set1(centre), f = vec_set1(inverse), lo = vec_set1(lowest), hi = vec_set1(highest);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vec_t x = vec_min(vec_max(vec_mul(vec_sub(vec_load(src + i), c), f), lo), hi);
        if (as_words) vec_store_int(words + i, x, zero);
        else vec_store_u8(bytes + i, x, zero);
    }
    if (i == n) return;
    const vec_t x = vec_min(vec_max(vec_mul(vec_sub(vec_load_half(src + i), c), f), lo), hi);
    if (as_words) vec_store_int_half(words + i, x, zero);
    else vec_store_u8_half(bytes + i, x, zero);
}

FD_INLINE uint32_t row_to_int8(void *dst, const int as_words, const float *src, uint32_t n) {
    vec_t max = vec_zero();
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) max = vec_max(vec_abs(vec_load(src + i)), max);
    if (i < n) max = vec_max(vec_abs(vec_load_half(src + i)), max);
    const float amax = vec_reduce_max(max);
    const int tiny = amax < FD_TINY;
    row_to_codes(dst, as_words, src, n, 0.0f, tiny ? 0.0f : 127.0f / amax, -127.0f, 127.0f, fd_zero_point(FD_KV_INT8));
    return fd_float_bits(tiny ? 0.0f : amax / 127.0f);
}

FD_INLINE uint32_t row_to_int4(void *dst, const int as_words, const float *src, uint32_t n) {
    const vec_t first = vec_set1(src[0]);
    vec_t min = first, max = first;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        min = vec_min(vec_load(src + i), min);
        max = vec_max(vec_load(src + i), max);
    }
    for (; i < n; i++) {
        min = vec_min(vec_set1(src[i]), min);
        max = vec_max(vec_set1(src[i]), max);
    }
    const uint32_t word = fd_int4_affine(-vec_reduce_max(vec_sub(vec_zero(), min)), vec_reduce_max(max));
    row_to_codes(dst, as_words, src, n, fd_bits_float(word << 16), fd_int4_inverse(word), -8.0f, 7.0f,
                 fd_zero_point(FD_KV_INT4));
    return word;
}

#endif
