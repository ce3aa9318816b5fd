/* Numbers and rows of activations, in fp32, fp16 or bf16, to and from fp32; written with the vec_* primitives of the
 * including file.
 */
#pragma once

#include <string.h>

#include "compiler.h"
#include "half.h"
#include "region/formats.h"

FD_INLINE vec_t load(const uint32_t dtype, const void *p, size_t i) {
    if (dtype == FD_ACT_FP32) return vec_load((const float *)p + i);
    return dtype == FD_ACT_FP16 ? vec_load_fp16((const uint16_t *)p + i) : vec_load_bf16((const uint16_t *)p + i);
}
FD_INLINE void store(const uint32_t dtype, void *p, size_t i, vec_t x) {
    if (dtype == FD_ACT_FP32) vec_store((float *)p + i, x);
    else if (dtype == FD_ACT_FP16) vec_store_fp16((uint16_t *)p + i, x);
    else vec_store_bf16((uint16_t *)p + i, x);
}
FD_INLINE float load_one(const uint32_t dtype, const void *p, size_t i) {
    if (dtype == FD_ACT_FP32) return ((const float *)p)[i];
    const uint16_t half = ((const uint16_t *)p)[i];
    return dtype == FD_ACT_FP16 ? fd_fp16_to_fp32(half) : fd_bf16_to_fp32(half);
}
FD_INLINE void store_one(const uint32_t dtype, void *p, size_t i, float x) {
    if (dtype == FD_ACT_FP32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = dtype == FD_ACT_FP16 ? fd_fp32_to_fp16(x) : fd_fp32_to_bf16(x);
}
FD_INLINE const void *at(const uint32_t dtype, const void *p, size_t i) {
    return (const uint8_t *)p + i * fd_act_bytes(dtype);
}

FD_INLINE void load_act(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale) {
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

#define NO_BIAS (-0.0f) /* x + -0 is x for every x; x + 0 would turn -0 into 0 */

/* o = (acc + bias) / l, or 0 if l is 0. */
FD_INLINE void finish_row(void *o, const float *acc, float bias, float l, uint32_t n, uint32_t act_dtype) {
    if (l == 0.0f) {
        memset(o, 0, n * fd_act_bytes(act_dtype));
        return;
    }
    const float scale = 1.0f / l;
    const vec_t x = vec_set1(scale), y = vec_set1(bias);
    uint32_t i = 0;
    if (act_dtype == FD_ACT_FP32) {
        float *to = o;
        for (; i + LANES <= n; i += LANES) vec_store(to + i, vec_mul(vec_add(vec_load(acc + i), y), x));
        for (; i < n; i++) to[i] = (acc[i] + bias) * scale;
    } else if (act_dtype == FD_ACT_FP16) {
        uint16_t *to = o;
        for (; i + LANES <= n; i += LANES) vec_store_fp16(to + i, vec_mul(vec_add(vec_load(acc + i), y), x));
        for (; i < n; i++) to[i] = fd_fp32_to_fp16((acc[i] + bias) * scale);
    } else {
        uint16_t *to = o;
        for (; i + LANES <= n; i += LANES) vec_store_bf16(to + i, vec_mul(vec_add(vec_load(acc + i), y), x));
        for (; i < n; i++) to[i] = fd_fp32_to_bf16((acc[i] + bias) * scale);
    }
}
