/* What linear_simd.h needs, with AVX-512 VNNI: a vector has a tile's 16 outputs, and vpdpbusd adds 4 inputs of each. An
 * ISA's file includes this within its target. */
#pragma once

#include "linear_kinds.h"
#include "cpu/vec_avx512.h"

#define FD_ROUND_64_BYTES

typedef __m512i ivec_t;

enum { MAX_ROWS = 8 };

FD_INLINE vec_t vec_from_ints(ivec_t x) { return _mm512_cvtepi32_ps(x); }
FD_INLINE ivec_t ivec_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
FD_INLINE ivec_t ivec_set1(int32_t x) { return _mm512_set1_epi32(x); }
FD_INLINE ivec_t ivec_add(ivec_t x, ivec_t y) { return _mm512_add_epi32(x, y); }
FD_INLINE ivec_t ivec_shift(ivec_t x, unsigned by) { return _mm512_slli_epi32(x, by); }

/* The numbers of an even chunk, whose codes are at `w`, and of the chunk after it. */
FD_INLINE void unpack_chunks(const uint8_t *w, const uint8_t *table, const kind_t kind, ivec_t *even, ivec_t *odd) {
    const ivec_t low = _mm512_set1_epi8(15), both = ivec_load(w);
    *even = _mm512_and_si512(both, low);
    *odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    if (kind != CODES) return;
    const ivec_t numbers = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    *even = _mm512_shuffle_epi8(numbers, *even);
    *odd = _mm512_shuffle_epi8(numbers, *odd);
}

FD_INLINE ivec_t dot_fours(ivec_t sum, ivec_t q, ivec_t x) { return _mm512_dpbusd_epi32(sum, q, x); }

#define UNROLL_CHUNKS
#include "linear_fours.h"
#include "linear_simd.h"
