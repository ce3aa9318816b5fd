/* The vec_* primitives with 8 lanes of AVX2, FMA and F16C. ISA files include this within their target. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "compiler.h"

typedef __m256 vec_t;

enum { LANES = 8 };

FD_INLINE vec_t vec_zero(void) { return _mm256_setzero_ps(); }
FD_INLINE vec_t vec_set1(float x) { return _mm256_set1_ps(x); }
FD_INLINE vec_t vec_load(const float *p) { return _mm256_loadu_ps(p); }
FD_INLINE void vec_store(float *p, vec_t x) { _mm256_storeu_ps(p, x); }
FD_INLINE vec_t vec_add(vec_t x, vec_t y) { return _mm256_add_ps(x, y); }
FD_INLINE vec_t vec_sub(vec_t x, vec_t y) { return _mm256_sub_ps(x, y); }
FD_INLINE vec_t vec_mul(vec_t x, vec_t y) { return _mm256_mul_ps(x, y); }
FD_INLINE vec_t vec_div(vec_t x, vec_t y) { return _mm256_div_ps(x, y); }
FD_INLINE vec_t vec_fma(vec_t x, vec_t y, vec_t z) { return _mm256_fmadd_ps(x, y, z); }
FD_INLINE vec_t vec_max(vec_t x, vec_t y) { return _mm256_max_ps(x, y); }
FD_INLINE vec_t vec_min(vec_t x, vec_t y) { return _mm256_min_ps(x, y); }
FD_INLINE vec_t vec_abs(vec_t x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
FD_INLINE float vec_reduce_max(vec_t x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
FD_INLINE float vec_reduce_add(vec_t x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
FD_INLINE vec_t vec_round(vec_t x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* x - floor(x). */
FD_INLINE vec_t vec_fraction(vec_t x) { return _mm256_sub_ps(x, _mm256_floor_ps(x)); }
/* y times 2^floor(x), or 0 where x is below `limit` or NaN; y and the result are normal. */
FD_INLINE vec_t vec_scale2(vec_t y, vec_t x, float limit) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), 23);
    const vec_t scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
    return _mm256_and_ps(scaled, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GE_OQ));
}
FD_INLINE int vec_any_above(vec_t x, vec_t y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ)) != 0; }
FD_INLINE vec_t vec_bits(__m256i x) { return _mm256_castsi256_ps(x); }
FD_INLINE __m256i vec_ints(vec_t x) { return _mm256_castps_si256(x); }
FD_INLINE vec_t vec_from_int(vec_t x) { return _mm256_cvtepi32_ps(vec_ints(x)); }
FD_INLINE vec_t vec_add_int(vec_t x, vec_t y) { return vec_bits(_mm256_add_epi32(vec_ints(x), vec_ints(y))); }
FD_INLINE vec_t vec_and_bits(vec_t x, uint32_t bits) {
    return vec_bits(_mm256_and_si256(vec_ints(x), _mm256_set1_epi32((int)bits)));
}
/* The bf16 in the low half of every lane. */
FD_INLINE vec_t vec_low_bf16(vec_t x) { return vec_bits(_mm256_slli_epi32(vec_ints(x), 16)); }
/* Copies the 32 bits at p into every lane. */
FD_INLINE vec_t vec_broadcast(const void *p) { return _mm256_broadcast_ss(p); }
/* Pins the computation of x to this point (vec_avx512.h). */
FD_INLINE vec_t vec_pin(vec_t x) {
    __asm__ volatile("" : "+x"(x));
    return x;
}
/* Lane i is that of x where bit i is set, else `fill`. */
FD_INLINE vec_t vec_select(vec_t x, uint64_t bits, float fill) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)(bits & 0xff)), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}

FD_INLINE vec_t vec_load_fp16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
FD_INLINE vec_t vec_load_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
FD_INLINE void vec_store_fp16(void *p, vec_t x) { _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
FD_INLINE void vec_store_bf16(void *p, vec_t x) {
    const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i y = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
/* Rounds to nearest even; every lane fits into 16 bits. */
FD_INLINE __m128i vec_to_int16(vec_t x) {
    const __m256i y = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}
FD_INLINE void vec_store_u8(void *p, vec_t x, int zero) {
    const __m128i words = _mm_add_epi16(vec_to_int16(x), _mm_set1_epi16((short)zero));
    _mm_storel_epi64(p, _mm_packus_epi16(words, words));
}
FD_INLINE void vec_store_int(void *p, vec_t x, int zero) {
    _mm256_storeu_si256(p, _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(zero)));
}

#include "vec_no_halves.h"
