/* The row conversions that append.h asks for, written with the vec_* primitives of the including file. */
#pragma once

#include "chunk.h"

/* The order of the operands keeps NaN. */
FD_INLINE vec_t saturate_fp16(vec_t x) { return vec_max(vec_set1(-FD_FP16_MAX), vec_min(vec_set1(FD_FP16_MAX), x)); }

FD_INLINE void row_to_fp16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store_fp16(dst + i, saturate_fp16(vec_load(src + i)));
    if (i < n) vec_store_fp16_half(dst + i, saturate_fp16(vec_load_half(src + i)));
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

/* A row to convert: `src` to the integers of append.h in `dst`. */
typedef struct {
    const float *src;
    void *dst;
    int as_words;
    uint32_t affine; /* the result */
} int4_row_t;

FD_INLINE void store_int4(const int4_row_t *row, uint32_t i, vec_t code) {
    if (row->as_words) vec_store_int((uint32_t *)row->dst + i, code, fd_zero_point(FD_KV_INT4));
    else vec_store_u8((uint8_t *)row->dst + i, code, fd_zero_point(FD_KV_INT4));
}

/* Converts rows of n elements at once, because each is a long chain of operations that wait for each other. */
FD_INLINE void rows_to_int4(int4_row_t *rows, const uint32_t n_rows, uint32_t n) {
    enum { MOST = 2 };
    vec_t min[MOST], max[MOST];
    fd_int4_grid_t grid[MOST];
    int4_sums_t sums[MOST];
    uint32_t i = 0;
    FD_UNROLL
    for (uint32_t r = 0; r < n_rows; r++) min[r] = max[r] = vec_set1(rows[r].src[0]);
    for (; i + LANES <= n; i += LANES) {
        FD_UNROLL
        for (uint32_t r = 0; r < n_rows; r++) {
            min[r] = vec_min(vec_load(rows[r].src + i), min[r]);
            max[r] = vec_max(vec_load(rows[r].src + i), max[r]);
        }
    }
    for (; i < n; i++) {
        FD_UNROLL
        for (uint32_t r = 0; r < n_rows; r++) {
            min[r] = vec_min(vec_set1(rows[r].src[i]), min[r]);
            max[r] = vec_max(vec_set1(rows[r].src[i]), max[r]);
        }
    }
    FD_UNROLL
    for (uint32_t r = 0; r < n_rows; r++) {
        grid[r] = fd_int4_grid(-vec_reduce_max(vec_sub(vec_zero(), min[r])), vec_reduce_max(max[r]));
        sums[r] = (int4_sums_t){vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    }
    for (i = 0; i + LANES <= n; i += LANES) {
        FD_UNROLL
        for (uint32_t r = 0; r < n_rows; r++)
            store_int4(&rows[r], i, int4_codes(vec_load(rows[r].src + i), grid[r], &sums[r]));
    }
    for (uint32_t r = 0; i < n && r < n_rows; r++) {
        /* The lanes beyond the row hold the centre, which adds nothing to the sums. */
        float last[LANES];
        for (uint32_t j = 0; j < LANES; j++) last[j] = i + j < n ? rows[r].src[i + j] : grid[r].centre;
        const vec_t code = int4_codes(vec_load(last), grid[r], &sums[r]);
        const int zero = fd_zero_point(FD_KV_INT4);
        if (rows[r].as_words) vec_store_int_half((uint32_t *)rows[r].dst + i, code, zero);
        else vec_store_u8_half((uint8_t *)rows[r].dst + i, code, zero);
    }
    FD_UNROLL
    for (uint32_t r = 0; r < n_rows; r++)
        rows[r].affine = fd_int4_fit(grid[r],
                                     (fd_int4_sums_t){vec_reduce_add(sums[r].n), vec_reduce_add(sums[r].nn),
                                                      vec_reduce_add(sums[r].f), vec_reduce_add(sums[r].nf)},
                                     n);
}

FD_SHARED uint32_t row_to_int4(void *dst, int as_words, const float *src, uint32_t n) {
    int4_row_t row = {.src = src, .dst = dst, .as_words = as_words};
    rows_to_int4(&row, 1, n);
    return row.affine;
}

FD_SHARED void row_pair_to_int4(void *k_dst, const float *k, void *v_dst, const float *v, uint32_t n,
                                uint32_t *affine) {
    int4_row_t rows[] = {{.src = k, .dst = k_dst}, {.src = v, .dst = v_dst, .as_words = 1}};
    rows_to_int4(rows, 2, n);
    affine[0] = rows[0].affine, affine[1] = rows[1].affine;
}
