/* The kv_* primitives that AVX2 shares with AVX-VNNI. ISA files include this within their target. */
#pragma once

#include "chunk.h"
#include "cpu/vec_avx2.h"

enum { MAX_BLOCK = 6 };

/* At most 12 of the 16 registers hold sums; the others hold 2 vectors of K or V and a broadcast multiplier. Formats
 * that must be unpacked need more of the others. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) {
    const int unpacked = format != FD_KV_FP32 && format != FD_KV_FP16;
    return rows > (unpacked ? 2 : 3) ? 2 : 4;
}
/* gcc keeps some of the sums of six rows by two vectors in memory, and two blocks of three rows are faster. */
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return dtype == FD_KV_FP32 || dtype == FD_KV_FP16 ? 5 : 4; }

/* Integers are multiplied as groups of four bytes, unsigned times signed. In scores the stored integers of K are the
 * unsigned side and the query the signed side. In outputs of int8 the weights are the unsigned side, and kv_unpack
 * makes V signed, with zero point 0. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 8; }

#define FD_OWN_V_ZERO_POINT
FD_INLINE int kv_v_zero_point(fd_kv_dtype_t format) { return format == FD_KV_INT8 ? 0 : fd_zero_point(format); }

/* kv_unpack of integer formats. */
FD_INLINE vec_t unpack_bytes(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    const __m256i x = vec_ints(words);
    if (format == FD_KV_INT8 && is_v) return vec_bits(_mm256_xor_si256(x, _mm256_set1_epi8((char)0x80)));
    if (format == FD_KV_INT4)
        return vec_bits(_mm256_and_si256(part ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(0xf)));
    return words;
}

/* A byte shuffle that puts elements into the byte order of int8 and int4 words. */
FD_INLINE __m128i word_order(void) { return _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15); }
/* Stores vector i of a query row's integers in that order. */
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    const __m128i words = vec_to_int16(x);
    _mm_storel_epi64((__m128i *)((uint8_t *)to + i * LANES),
                     _mm_shuffle_epi8(_mm_packs_epi16(words, words), word_order()));
}
/* Stores four vectors of 8-bit integers in that order. The pack instructions work within 128-bit lanes, so each 128-bit
 * lane then has one word of each vector; `words` restores the order of the words. */
FD_INLINE void store_packed(void *to, const vec_t *x, const int is_signed) {
    const __m256i words = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i x01 = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
    const __m256i x23 = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
    const __m256i bytes = is_signed ? _mm256_packs_epi16(x01, x23) : _mm256_packus_epi16(x01, x23);
    const __m256i ordered = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(word_order()));
    _mm256_storeu_si256(to, _mm256_permutevar8x32_epi32(ordered, words));
}
#define FD_OWN_STORE_MULTIPLIERS4
FD_INLINE void kv_store_multipliers4(fd_kv_dtype_t format, void *to, uint32_t i, const vec_t *x) {
    store_packed((uint8_t *)to + i * LANES, x, 1);
}
#define FD_HAS_STORE_WEIGHTS4
FD_INLINE void kv_store_weights4(uint8_t *to, const vec_t *x) { store_packed(to, x, 0); }
/* Weights outside of [first, last) are stored as zeros (kv_store_weights). */
#define FD_OWN_SUM_WEIGHTS
FD_INLINE vec_t kv_sum_weights(fd_kv_dtype_t format, const void *weights, uint32_t first, uint32_t last) {
    __m256i sum = _mm256_setzero_si256();
    FD_UNROLL
    for (uint32_t i = 0; i < FD_PAGE_TOKENS; i += 32)
        sum = _mm256_add_epi32(sum, _mm256_sad_epu8(_mm256_loadu_si256((const __m256i *)((const uint8_t *)weights + i)),
                                                    _mm256_setzero_si256()));
    return _mm256_cvtepi32_ps(sum);
}
