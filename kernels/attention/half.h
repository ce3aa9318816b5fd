/* Two-byte floats in portable C, bit for bit what F16C and torch give: IEEE 754 binary16 and bfloat16, both rounded to
 * nearest even, subnormals kept, NaN quieted.
 */
#ifndef FD_HALF_H
#define FD_HALF_H

#include <stdint.h>
#include <string.h>

#define FD_FP16_MAX 65504.0f

static inline uint32_t fd_float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float fd_bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Without branches, so that compilers vectorise a loop of it. */
static inline float fd_fp16_to_fp32(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    /* Moving the exponent's bias by a multiplication (2^(127-15)) normalises subnormals on the way. */
    const uint32_t finite = fd_float_bits(fd_bits_float(magnitude << 13) * 0x1p112f);
    const uint32_t infinite = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return fd_bits_float(finite | infinite | quiet | (uint32_t)(h & 0x8000u) << 16);
}

/* Values from 65520 up become infinite, as IEEE 754 says; whoever wants saturation clamps first. */
static inline uint16_t fd_fp32_to_fp16(float x) {
    const uint32_t bits = fd_float_bits(x), sign = bits >> 16 & 0x8000u, u = bits & 0x7fffffffu;
    uint32_t h;
    if (u > 0x7f800000u) h = 0x7e00u | (u >> 13 & 0x3ffu);
    else if (u >= 0x47800000u) /* 65536: the binade that rounds up to it is handled by the carry below */ h = 0x7c00u;
    else if (u <
             0x38800000u) /* below 2^-14: adding 0.5 aligns the subnormal's last bit with the sum's and rounds there */
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

#endif
