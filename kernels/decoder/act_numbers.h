/* Numbers of an activation dtype to and from fp32, written with the vec_* primitives of the including file. */
#pragma once

#include "cpu/half.h"
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
