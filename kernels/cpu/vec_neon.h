/* The vec_* primitives with 4 lanes of Armv8.0-A's Advanced SIMD, which converts fp16 but cannot multiply it. */
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "compiler.h"

typedef float32x4_t vec_t;

enum { LANES = 4 };

/* Pins the computation of x to this point (vec_avx512.h). */
FD_INLINE vec_t vec_pin(vec_t x) {
    __asm__ volatile("" : "+w"(x));
    return x;
}
FD_INLINE vec_t vec_zero(void) { return vdupq_n_f32(0.0f); }
FD_INLINE vec_t vec_set1(float x) { return vdupq_n_f32(x); }
FD_INLINE vec_t vec_load(const float *p) { return vld1q_f32(p); }
FD_INLINE void vec_store(float *p, vec_t x) { vst1q_f32(p, x); }
FD_INLINE vec_t vec_add(vec_t x, vec_t y) { return vaddq_f32(x, y); }
FD_INLINE vec_t vec_sub(vec_t x, vec_t y) { return vsubq_f32(x, y); }
FD_INLINE vec_t vec_mul(vec_t x, vec_t y) { return vmulq_f32(x, y); }
FD_INLINE vec_t vec_div(vec_t x, vec_t y) { return vdivq_f32(x, y); }
FD_INLINE vec_t vec_fma(vec_t x, vec_t y, vec_t z) { return vfmaq_f32(z, x, y); }
/* Returns y if x or y is NaN, as on x86; fmax would return NaN, and fmaxnm the number. */
FD_INLINE vec_t vec_max(vec_t x, vec_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
FD_INLINE vec_t vec_min(vec_t x, vec_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
FD_INLINE vec_t vec_abs(vec_t x) { return vabsq_f32(x); }
FD_INLINE float vec_reduce_max(vec_t x) { return vmaxvq_f32(x); }
FD_INLINE float vec_reduce_add(vec_t x) { return vaddvq_f32(x); }
FD_INLINE vec_t vec_round(vec_t x) { return vrndnq_f32(x); }
/* x - floor(x). */
FD_INLINE vec_t vec_fraction(vec_t x) { return vsubq_f32(x, vrndmq_f32(x)); }
FD_INLINE vec_t vec_bits(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
FD_INLINE uint32x4_t vec_ints(vec_t x) { return vreinterpretq_u32_f32(x); }
/* y times 2^floor(x), or 0 where x is below `limit` or NaN; y and the result are normal. */
FD_INLINE vec_t vec_scale2(vec_t y, vec_t x, float limit) {
    const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_s32(vcvtmq_s32_f32(x)), 23);
    return vec_bits(vandq_u32(vaddq_u32(vec_ints(y), exponent), vcgeq_f32(x, vdupq_n_f32(limit))));
}
FD_INLINE int vec_any_above(vec_t x, vec_t y) { return vmaxvq_u32(vcgtq_f32(x, y)) != 0; }
FD_INLINE vec_t vec_from_int(vec_t x) { return vcvtq_f32_s32(vreinterpretq_s32_f32(x)); }
FD_INLINE vec_t vec_add_int(vec_t x, vec_t y) { return vec_bits(vaddq_u32(vec_ints(x), vec_ints(y))); }
FD_INLINE vec_t vec_and_bits(vec_t x, uint32_t bits) { return vec_bits(vandq_u32(vec_ints(x), vdupq_n_u32(bits))); }
/* The bf16 in the low half of every lane. */
FD_INLINE vec_t vec_low_bf16(vec_t x) { return vec_bits(vshlq_n_u32(vec_ints(x), 16)); }
/* Copies the 32 bits at p into every lane. */
FD_INLINE vec_t vec_broadcast(const void *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return vec_bits(vdupq_n_u32(x));
}
/* Lane i is that of x where bit i is set, else `fill`. */
FD_INLINE vec_t vec_select(vec_t x, uint64_t bits, float fill) {
    static const uint32_t lane[LANES] = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32((uint32_t)bits), vld1q_u32(lane)), x, vdupq_n_f32(fill));
}

FD_INLINE vec_t vec_load_fp16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
FD_INLINE vec_t vec_load_bf16(const void *p) { return vec_bits(vshll_n_u16(vld1_u16(p), 16)); }
FD_INLINE void vec_store_fp16(void *p, vec_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
FD_INLINE void vec_store_bf16(void *p, vec_t x) {
    const uint32x4_t u = vec_ints(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}
/* Rounds to nearest even; every lane plus `zero` fits into a byte. */
FD_INLINE void vec_store_u8(void *p, vec_t x, int zero) {
    const int16x4_t words = vmovn_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(zero)));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(p, &bytes, sizeof bytes);
}
FD_INLINE void vec_store_int(void *p, vec_t x, int zero) {
    vst1q_s32(p, vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(zero)));
}

#include "vec_no_halves.h"
