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

/* fd_int4_sums_t, lane by lane. */
typedef struct {
    vec_t n, nn, f, nf;
} int4_sums_t;

/* The codes of a vector of a row, -8..7 as floats, which are added to the sums. NaN becomes one of the limits. */
FD_INLINE vec_t int4_codes(vec_t x, fd_int4_grid_t grid, int4_sums_t *sums) {
    const vec_t most = vec_set1(FD_INT4_FINE_MAX), least = vec_set1(-FD_INT4_FINE_MAX);
    const vec_t scaled = vec_mul(vec_sub(x, vec_set1(grid.centre)), vec_set1(grid.inverse));
    const vec_t fine = vec_round(vec_min(vec_max(scaled, least), most));
    const vec_t rounded = vec_round(vec_mul(fine, vec_set1(1.0f / FD_INT4_FINE)));
    const vec_t code = vec_min(vec_max(rounded, vec_set1(-8.0f)), vec_set1(7.0f));
    sums->n = vec_add(sums->n, code), sums->nn = vec_fma(code, code, sums->nn);
    sums->f = vec_add(sums->f, fine), sums->nf = vec_fma(code, fine, sums->nf);
    return code;
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
    const fd_int4_grid_t grid = fd_int4_grid(-vec_reduce_max(vec_sub(vec_zero(), min)), vec_reduce_max(max));
    int4_sums_t sums = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    for (i = 0; i + LANES <= n; i += LANES) {
        const vec_t code = int4_codes(vec_load(src + i), grid, &sums);
        if (as_words) vec_store_int((uint32_t *)dst + i, code, fd_zero_point(FD_KV_INT4));
        else vec_store_u8((uint8_t *)dst + i, code, fd_zero_point(FD_KV_INT4));
    }
    if (i < n) {
        /* The lanes beyond the row hold the centre, which adds nothing to the sums. */
        float last[LANES];
        for (uint32_t j = 0; j < LANES; j++) last[j] = i + j < n ? src[i + j] : grid.centre;
        const vec_t code = int4_codes(vec_load(last), grid, &sums);
        if (as_words) vec_store_int_half((uint32_t *)dst + i, code, fd_zero_point(FD_KV_INT4));
        else vec_store_u8_half((uint8_t *)dst + i, code, fd_zero_point(FD_KV_INT4));
    }
    return fd_int4_fit(grid,
                       (fd_int4_sums_t){vec_reduce_add(sums.n), vec_reduce_add(sums.nn), vec_reduce_add(sums.f),
                                        vec_reduce_add(sums.nf)},
                       n);
}

#endif
