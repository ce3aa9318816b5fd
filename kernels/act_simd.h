/* merge, finish, load_act and store_act (fd_vec_ops_t) against the vectors of the ISA's file that includes this. */
#ifndef FD_ACT_SIMD_H
#define FD_ACT_SIMD_H

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "region.h"

static void merge(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
                  uint32_t head_size) {
    for (uint32_t r = 0; r < rows; r++, acc += head_size, acc2 += head_size) {
        if (l2[r] == 0.0f) continue;
        if (l[r] == 0.0f) { /* its acc may never have been written */
            m[r] = m2[r], l[r] = l2[r];
            memcpy(acc, acc2, head_size * sizeof *acc);
            continue;
        }
        const float max = m2[r] > m[r] ? m2[r] : m[r], scale = expf(m[r] - max), scale2 = expf(m2[r] - max);
        m[r] = max;
        l[r] = l[r] * scale + l2[r] * scale2;
        const vec_t x = vec_set1(scale), x2 = vec_set1(scale2);
        uint32_t d = 0;
        for (; d + LANES <= head_size; d += LANES)
            vec_store(acc + d, vec_fma(vec_load(acc2 + d), x2, vec_mul(vec_load(acc + d), x)));
        for (; d < head_size; d++) acc[d] = acc[d] * scale + acc2[d] * scale2;
    }
}

static void finish(float *acc, const float *l, uint32_t rows, uint32_t head_size) {
    for (uint32_t r = 0; r < rows; r++, acc += head_size) {
        if (l[r] == 0.0f) {
            memset(acc, 0, head_size * sizeof *acc);
            continue;
        }
        const float scale = 1.0f / l[r];
        uint32_t d = 0;
        for (; d + LANES <= head_size; d += LANES) vec_store(acc + d, vec_mul(vec_load(acc + d), vec_set1(scale)));
        for (; d < head_size; d++) acc[d] *= scale;
    }
}

static void load_act(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale) {
    const vec_t x = vec_set1(scale);
    size_t i = 0;
    if (act_dtype == FD_ACT_FP32) {
        const float *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load(from + i), x));
        for (; i < n; i++) dst[i] = scale * from[i];
    } else if (act_dtype == FD_ACT_FP16) {
        const uint16_t *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load_fp16(from + i), x));
        for (; i < n; i++) dst[i] = scale * fd_fp16_to_fp32(from[i]);
    } else {
        const uint16_t *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load_bf16(from + i), x));
        for (; i < n; i++) dst[i] = scale * fd_bf16_to_fp32(from[i]);
    }
}

static void store_act(void *dst, const float *src, size_t n, uint32_t act_dtype) {
    uint16_t *to = dst;
    size_t i = 0;
    if (act_dtype == FD_ACT_FP32) {
        memcpy(dst, src, n * sizeof *src);
    } else if (act_dtype == FD_ACT_FP16) {
        for (; i + LANES <= n; i += LANES) vec_store_fp16(to + i, vec_load(src + i));
        for (; i < n; i++) to[i] = fd_fp32_to_fp16(src[i]);
    } else {
        for (; i + LANES <= n; i += LANES) vec_store_bf16(to + i, vec_load(src + i));
        for (; i < n; i++) to[i] = fd_fp32_to_bf16(src[i]);
    }
}

#endif
