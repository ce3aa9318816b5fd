/* Integer kernels for AVX-512 with VNNI, 16 lanes. Float formats are those of AVX-512. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")
#endif

#include "vec_avx512.h"

FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) { return rows > 4 ? 2 : 4; }
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }

/* int8 is multiplied in pairs of 16 bits, vpdpwssd; int4 in fours of 8 bits, vpdpbusd. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 8 : 16; }
FD_INLINE float kv_levels(fd_kv_dtype_t format, int is_v) { return format == FD_KV_INT8 ? 32767.0f : is_v ? 255.0f : 127.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return 2; }

FD_INLINE vec_t kv_part(fd_kv_dtype_t format, vec_t words, int part) {
    const __m512i x = vec_ints(words);
    if (format == FD_KV_INT8) return vec_bits(part ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(0xff)));
    return vec_bits(_mm512_and_si512(part ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(0xf)));
}
/* vpdpbusd takes one side unsigned: what is stored against the query's signs, the weights against V. In assembly because gcc 12 copies the
 * sum before the intrinsic, which costs as much as the product. */
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (format == FD_KV_INT8)
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    else if (is_v)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(y), "v"(x));
    else
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    const __m512i y = _mm512_cvtps_epi32(x);
    if (format == FD_KV_INT8) {
        _mm256_storeu_si256((__m256i *)to + i, _mm512_cvtepi32_epi16(y));
        return;
    }
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    _mm_storeu_si128((__m128i *)to + i, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(y), order));
}
/* Lane by lane, the sum of those weights of 8 bits that lie in vectors [first, last). */
FD_INLINE vec_t kv_sum_weights(const void *weights, uint32_t first, uint32_t last) {
    const uint32_t seen = ~0u << 4 * first & ~0u >> (32 - 4 * last); /* words of four weights */
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < 2; i++) {
        const __m512i w = _mm512_maskz_loadu_epi32((__mmask16)(seen >> 16 * i), (const uint8_t *)weights + 64 * i);
        sum = _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi8(1));
    }
    return vec_from_int(vec_bits(sum));
}

#include "tiles_simd.h"
#include "attend_simd.h"

#define FD_KERNELS(name, dtype)                                                                                        \
    FD_BLOCKS(name, dtype)                                                                                             \
    void fd_attend_##name##_avx512vnni(const fd_attend_t *a) { attend(dtype, a, name##_blocks); }

FD_KERNELS(int8, FD_KV_INT8)
FD_KERNELS(int4, FD_KV_INT4)
FD_KERNELS(int8_int4, FD_KV_INT8_INT4)

const fd_kv_ops_t fd_kv_ops_avx512vnni[FD_KV_DTYPES] = {
    [FD_KV_FP32] = {"avx512vnni", fd_append_fp32_avx512, fd_attend_fp32_avx512},
    [FD_KV_FP16] = {"avx512vnni", fd_append_fp16_avx512, fd_attend_fp16_avx512},
    [FD_KV_BF16] = {"avx512vnni", fd_append_bf16_avx512, fd_attend_bf16_avx512},
    [FD_KV_INT8] = {"avx512vnni", fd_append_int8_avx512, fd_attend_int8_avx512vnni},
    [FD_KV_INT4] = {"avx512vnni", fd_append_int4_avx512, fd_attend_int4_avx512vnni},
    [FD_KV_INT8_INT4] = {"avx512vnni", fd_append_int8_int4_avx512, fd_attend_int8_int4_avx512vnni},
};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
