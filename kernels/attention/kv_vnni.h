/* The kv_* primitives for AVX-512 with VNNI, and with BF16 if the file that includes this uses bf16 formats. ISA files
 * include this within their target.
 *
 * Integers are multiplied as groups of four 8-bit integers (vpdpbusd), which takes half as many instructions as 16-bit
 * pairs. Queries and weights are rounded as coarsely as int8 rounds K and V, and add as much to the error. bf16 is
 * multiplied in pairs (vdpbf16ps) by queries and weights rounded to bf16, as flash attention on GPUs does; these
 * products treat subnormals as zeros.
 *
 * The products are written in assembly, because gcc 12 copies the sum before each intrinsic, and that copy costs as
 * much as the product.
 */
#pragma once

#include "kv_avx512.h"

/* A tile is a column wide; at most 16 of the 32 registers hold sums. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) { return 2; }
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }

FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 8; }
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return is_v ? 255.0f : 127.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 2 : 1; }

/* vpdpbusd multiplies unsigned by signed integers. In scores the stored integers of K are the unsigned side and the
 * query the signed side; in outputs the weights are unsigned, so kv_unpack makes int8 V signed, with zero point 0. */
#define FD_OWN_V_ZERO_POINT
FD_INLINE int kv_v_zero_point(fd_kv_dtype_t format) { return format == FD_KV_INT8 ? 0 : fd_zero_point(format); }

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    const __m512i x = vec_ints(words);
    if (format == FD_KV_INT8 && is_v) return vec_bits(_mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)));
    if (format == FD_KV_INT4)
        return vec_bits(_mm512_and_si512(part ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(0xf)));
    return words;
}
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (format == FD_KV_FP16) return vec_fma(x, y, sum);
    if (format == FD_KV_BF16) __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    else if (is_v) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(y), "v"(x));
    else __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}

FD_INLINE void store_rounded_bf16(void *to, vec_t x) {
    __m256i y;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(y) : "v"(x));
    _mm256_storeu_si256(to, y);
}
#define FD_OWN_STORE_QUERY
FD_INLINE void kv_store_query(fd_kv_dtype_t format, void *to, const float *q, uint32_t head_size) {
    if (format != FD_KV_BF16) {
        memcpy(to, q, head_size * sizeof *q);
        return;
    }
    uint32_t d = 0;
    for (; d + LANES <= head_size; d += LANES) store_rounded_bf16((uint16_t *)to + d, vec_load(q + d));
    if (d < head_size) store_rounded_bf16((uint16_t *)to + d, vec_load_half(q + d));
}
/* Stores vector i of a query row's integers in the byte order of chunk.h's words. */
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    store_word_bytes((__m128i *)to + i, _mm512_cvtps_epi32(x));
}
/* Stores four vectors of 8-bit integers in that order. The pack instructions work within 128-bit lanes, so each 128-bit
 * lane then has one word of each vector; `words` restores the order of the words. */
FD_INLINE void store_packed(void *to, const vec_t *x, const int is_signed) {
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i order = _mm512_broadcast_i32x4(word_order());
    const __m512i x01 = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const __m512i x23 = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    const __m512i bytes = is_signed ? _mm512_packs_epi16(x01, x23) : _mm512_packus_epi16(x01, x23);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(words, _mm512_shuffle_epi8(bytes, order)));
}
#define FD_OWN_STORE_MULTIPLIERS4
/* Stores all at once, because the 64-byte load of kv_pack_query_rows would stall behind several narrower stores. */
FD_INLINE void kv_store_multipliers4(fd_kv_dtype_t format, void *to, uint32_t i, const vec_t *x) {
    store_packed((__m128i *)to + i, x, 1);
}
#define FD_HAS_STORE_WEIGHTS4
FD_INLINE void kv_store_weights4(uint8_t *to, const vec_t *x) { store_packed(to, x, 0); }
#define FD_OWN_STORE_FLOAT_WEIGHTS
FD_INLINE void kv_store_float_weights(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    if (format == FD_KV_BF16) store_rounded_bf16((__m256i *)to + i, x);
    else vec_store((float *)to + i * LANES, x);
}
#define FD_OWN_SUM_WEIGHTS
FD_INLINE vec_t kv_sum_weights(fd_kv_dtype_t format, const void *weights, uint32_t first, uint32_t last) {
    const uint32_t elems = format == FD_KV_BF16 ? 2 : 4,
                   words = LANES / elems; /* words that hold a vector of weights */
    const uint64_t mask = ~UINT64_C(0) << words * first & ~UINT64_C(0) >> (64 - words * last);
    vec_t sum = vec_zero();
    FD_UNROLL
    for (uint32_t i = 0; i < FD_PAGE_TOKENS / elems / LANES; i++) {
        const vec_t w =
            vec_bits(_mm512_maskz_loadu_epi32((__mmask16)(mask >> i * LANES), (const uint32_t *)weights + i * LANES));
        if (format == FD_KV_BF16) sum = kv_multiply_add(format, 1, w, vec_bits(_mm512_set1_epi16(0x3f80)), sum);
        else sum = kv_multiply_add(format, 1, vec_bits(_mm512_set1_epi8(1)), w, sum);
    }
    return format == FD_KV_BF16 ? sum : vec_from_int(sum);
}
