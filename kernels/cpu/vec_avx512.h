/* The vec_* primitives with 16 lanes of AVX-512 F, BW, DQ and VL. ISA files include this within their target. */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "compiler.h"

typedef __m512 vec_t;

enum { LANES = 16, HALF = 0x00ff };

FD_INLINE vec_t vec_zero(void) { return _mm512_setzero_ps(); }
FD_INLINE vec_t vec_set1(float x) { return _mm512_set1_ps(x); }
FD_INLINE vec_t vec_load(const float *p) { return _mm512_loadu_ps(p); }
FD_INLINE vec_t vec_load_half(const float *p) { return _mm512_maskz_loadu_ps(HALF, p); }
FD_INLINE void vec_store(float *p, vec_t x) { _mm512_storeu_ps(p, x); }
FD_INLINE void vec_store_half(float *p, vec_t x) { _mm512_mask_storeu_ps(p, HALF, x); }
FD_INLINE vec_t vec_add(vec_t x, vec_t y) { return _mm512_add_ps(x, y); }
FD_INLINE vec_t vec_sub(vec_t x, vec_t y) { return _mm512_sub_ps(x, y); }
FD_INLINE vec_t vec_mul(vec_t x, vec_t y) { return _mm512_mul_ps(x, y); }
FD_INLINE vec_t vec_div(vec_t x, vec_t y) { return _mm512_div_ps(x, y); }
FD_INLINE vec_t vec_fma(vec_t x, vec_t y, vec_t z) { return _mm512_fmadd_ps(x, y, z); }
FD_INLINE vec_t vec_max(vec_t x, vec_t y) { return _mm512_max_ps(x, y); }
FD_INLINE vec_t vec_min(vec_t x, vec_t y) { return _mm512_min_ps(x, y); }
FD_INLINE vec_t vec_abs(vec_t x) { return _mm512_abs_ps(x); }
FD_INLINE float vec_reduce_max(vec_t x) { return _mm512_reduce_max_ps(x); }
FD_INLINE float vec_reduce_add(vec_t x) { return _mm512_reduce_add_ps(x); }
FD_INLINE vec_t vec_round(vec_t x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* x - floor(x). */
FD_INLINE vec_t vec_fraction(vec_t x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
/* y times 2^floor(x), or 0 where x is below `limit` or NaN. */
FD_INLINE vec_t vec_scale2(vec_t y, vec_t x, float limit) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), y, x);
}
FD_INLINE int vec_any_above(vec_t x, vec_t y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
FD_INLINE vec_t vec_bits(__m512i x) { return _mm512_castsi512_ps(x); }
FD_INLINE __m512i vec_ints(vec_t x) { return _mm512_castps_si512(x); }
FD_INLINE vec_t vec_from_int(vec_t x) { return _mm512_cvtepi32_ps(vec_ints(x)); }
FD_INLINE vec_t vec_add_int(vec_t x, vec_t y) { return vec_bits(_mm512_add_epi32(vec_ints(x), vec_ints(y))); }
FD_INLINE vec_t vec_and_bits(vec_t x, uint32_t bits) {
    return vec_bits(_mm512_and_si512(vec_ints(x), _mm512_set1_epi32((int)bits)));
}
/* The bf16 in the low half of every lane. */
FD_INLINE vec_t vec_low_bf16(vec_t x) { return vec_bits(_mm512_slli_epi32(vec_ints(x), 16)); }
/* Copies the 32 bits at p into every lane. */
FD_INLINE vec_t vec_broadcast(const void *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return vec_bits(_mm512_set1_epi32(x));
}
/* Lane i is that of x where bit i is set, else `fill`. */
FD_INLINE vec_t vec_select(vec_t x, uint64_t bits, float fill) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)bits, x);
}

FD_INLINE vec_t vec_load_fp16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
FD_INLINE vec_t vec_load_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
FD_INLINE void vec_store_fp16(void *p, vec_t x) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FD_INLINE void vec_store_fp16_half(void *p, vec_t x) {
    _mm_storeu_si128(p, _mm256_cvtps_ph(_mm512_castps512_ps256(x), _MM_FROUND_TO_NEAREST_INT));
}
/* Does not use vcvtneps2bf16, which flushes subnormals to zero. */
FD_INLINE void vec_store_bf16(void *p, vec_t x) {
    const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __m512i y = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(y, 16)));
}
FD_INLINE void vec_store_bf16_half(void *p, vec_t x) {
    uint16_t y[LANES];
    vec_store_bf16(y, x);
    memcpy(p, y, sizeof y / 2);
}
/* Rounded to nearest even; the lanes fit into a byte. */
FD_INLINE void vec_store_u8(void *p, vec_t x, int zero) {
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero))));
}
FD_INLINE void vec_store_u8_half(void *p, vec_t x, int zero) {
    _mm_storel_epi64(p, _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero))));
}

FD_INLINE void vec_store_int(void *p, vec_t x, int zero) {
    _mm512_storeu_si512(p, _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero)));
}
FD_INLINE void vec_store_int_half(void *p, vec_t x, int zero) {
    _mm512_mask_storeu_epi32(p, HALF, _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero)));
}

#define FD_HAS_INTERLEAVE4
/* Interleaves 16 words of four rows, which lie `row_stride` words apart: to[w * stride + r] = word w of row r. */
FD_INLINE void interleave4(uint32_t *to, size_t stride, const uint32_t *from, size_t row_stride) {
    const __m512i x0 = _mm512_loadu_si512(from), x1 = _mm512_loadu_si512(from + row_stride);
    const __m512i x2 = _mm512_loadu_si512(from + 2 * row_stride), x3 = _mm512_loadu_si512(from + 3 * row_stride);
    const __m512i low01 = _mm512_unpacklo_epi32(x0, x1), high01 = _mm512_unpackhi_epi32(x0, x1);
    const __m512i low23 = _mm512_unpacklo_epi32(x2, x3), high23 = _mm512_unpackhi_epi32(x2, x3);
    const __m512i words[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                              _mm512_unpacklo_epi64(high01, high23),
                              _mm512_unpackhi_epi64(high01, high23)}; /* words[i] holds words i, 4 + i, 8 + i, 12 + i */
    FD_UNROLL
    for (size_t i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(to + i * stride), _mm512_castsi512_si128(words[i]));
        _mm_storeu_si128((__m128i *)(to + (4 + i) * stride), _mm512_extracti32x4_epi32(words[i], 1));
        _mm_storeu_si128((__m128i *)(to + (8 + i) * stride), _mm512_extracti32x4_epi32(words[i], 2));
        _mm_storeu_si128((__m128i *)(to + (12 + i) * stride), _mm512_extracti32x4_epi32(words[i], 3));
    }
}

/* Pins the computation of x to this point: the compiler would otherwise move loads past prefetches and past each other
 * (`multiply` in attention/tiles_simd.h says why it must not). */
FD_INLINE vec_t vec_pin(vec_t x) {
    __asm__ volatile("" : "+v"(x));
    return x;
}
