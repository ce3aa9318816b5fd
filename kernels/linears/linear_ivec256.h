/* The integer vectors of linear_simd.h with 256 bits, for AVX2 and AVX-VNNI: a vector has 8 of a tile's 16 outputs. An
 * ISA's file includes this within its target. */
#pragma once

#include "linear_kinds.h"
#include "cpu/vec_avx2.h"

typedef __m256i ivec_t;

FD_INLINE vec_t vec_from_ints(ivec_t x) { return _mm256_cvtepi32_ps(x); }
FD_INLINE ivec_t ivec_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
FD_INLINE ivec_t ivec_set1(int32_t x) { return _mm256_set1_epi32(x); }
FD_INLINE ivec_t ivec_add(ivec_t x, ivec_t y) { return _mm256_add_epi32(x, y); }
FD_INLINE ivec_t ivec_shift(ivec_t x, int by) { return _mm256_slli_epi32(x, by); }

/* The numbers of an even chunk, whose codes are at `w`, and of the chunk after it. */
FD_INLINE void unpack_chunks(const uint8_t *w, const uint8_t *table, const kind_t kind, ivec_t *even, ivec_t *odd) {
    const ivec_t low = _mm256_set1_epi8(15), both = ivec_load(w);
    *even = _mm256_and_si256(both, low);
    *odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    if (kind != CODES) return;
    const ivec_t numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    *even = _mm256_shuffle_epi8(numbers, *even);
    *odd = _mm256_shuffle_epi8(numbers, *odd);
}
