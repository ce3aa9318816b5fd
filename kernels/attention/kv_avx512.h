/* The kv_* primitives of AVX-512's F, BW, DQ and VL. ISA files include this within their target. */
#pragma once

#include "chunk.h"
#include "cpu/vec_avx512.h"

enum { MAX_BLOCK = 8 };

/* A byte shuffle that puts 16 elements into the byte order of int8 and int4 words. */
FD_INLINE __m128i word_order(void) { return _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15); }
/* Stores the low bytes of 16 integers in that order. */
FD_INLINE void store_word_bytes(void *to, __m512i x) {
    _mm_storeu_si128(to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x), word_order()));
}

#define FD_OWN_LOAD_HALF
FD_INLINE vec_t kv_load_half(fd_kv_dtype_t format, const uint8_t *p) {
    if (format == FD_KV_FP16) return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
    return _mm512_maskz_loadu_ps(HALF, p);
}
