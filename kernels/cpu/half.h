/* Conversions of fp16 (IEEE 754 binary16) and bf16 in portable C. They round to nearest even, keep subnormals and quiet
 * NaN; F16C and torch give the same results, bit for bit.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#include "compiler.h"

#define FD_FP16_MAX 65504.0f

FD_INLINE uint32_t fd_float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FD_INLINE float fd_bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Has no branches, so that compilers vectorise loops that call it. */
static inline float fd_fp16_to_fp32(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    /* Multiplying by 2^(127 - 15) changes the exponent's bias from 15 to 127 and normalises subnormals. */
    const uint32_t finite = fd_float_bits(fd_bits_float(magnitude << 13) * 0x1p112f);
    const uint32_t infinite = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return fd_bits_float(finite | infinite | quiet | (uint32_t)(h & 0x8000u) << 16);
}

/* Values from 65520 up become infinite, as IEEE 754 requires; a caller that wants saturation clamps x first. */
static inline uint16_t fd_fp32_to_fp16(float x) {
    const uint32_t bits = fd_float_bits(x), sign = bits >> 16 & 0x8000u, u = bits & 0x7fffffffu;
    uint32_t h;
    if (u > 0x7f800000u) h = 0x7e00u | (u >> 13 & 0x3ffu);
    else if (u >= 0x47800000u) /* 65536; the last branch's carry makes [65520, 65536) infinite */ h = 0x7c00u;
    else if (u < 0x38800000u) /* 2^-14; adding 0.5 rounds at the last bit of an fp16 subnormal */
        h = fd_float_bits(fd_bits_float(u) + 0.5f) - 0x3f000000u;
    else h = (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13;
    return (uint16_t)(h | sign);
}

static inline float fd_bf16_to_fp32(uint16_t h) { return fd_bits_float((uint32_t)h << 16); }

static inline uint16_t fd_fp32_to_bf16(float x) {
    const uint32_t u = fd_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
