/* Kernels for AVX-512 F, BW, DQ and VL, 16 lanes. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "chunk.h"
#include "half.h"

typedef __m512 vec_t;

enum { LANES = 16, MAX_BLOCK = 8, MAX_VECS = 8, HALF = 0x00ff };

/* Of the 32 registers at most 16 are sums: 4 vectors of K or V and a broadcast query or weight still fit beside them. */
FD_INLINE int tile_vecs(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }

FD_INLINE vec_t vec_zero(void) { return _mm512_setzero_ps(); }
FD_INLINE vec_t vec_set1(float x) { return _mm512_set1_ps(x); }
FD_INLINE vec_t vec_load(const float *p) { return _mm512_loadu_ps(p); }
FD_INLINE vec_t vec_load_half(const float *p) { return _mm512_maskz_loadu_ps(HALF, p); }
FD_INLINE void vec_store(float *p, vec_t x) { _mm512_storeu_ps(p, x); }
FD_INLINE void vec_store_half(float *p, vec_t x) { _mm512_mask_storeu_ps(p, HALF, x); }
FD_INLINE vec_t vec_add(vec_t x, vec_t y) { return _mm512_add_ps(x, y); }
FD_INLINE vec_t vec_sub(vec_t x, vec_t y) { return _mm512_sub_ps(x, y); }
FD_INLINE vec_t vec_mul(vec_t x, vec_t y) { return _mm512_mul_ps(x, y); }
FD_INLINE vec_t vec_fma(vec_t x, vec_t y, vec_t z) { return _mm512_fmadd_ps(x, y, z); }
FD_INLINE vec_t vec_max(vec_t x, vec_t y) { return _mm512_max_ps(x, y); }
FD_INLINE vec_t vec_abs(vec_t x) { return _mm512_abs_ps(x); }
FD_INLINE float vec_reduce_max(vec_t x) { return _mm512_reduce_max_ps(x); }
FD_INLINE float vec_reduce_add(vec_t x) { return _mm512_reduce_add_ps(x); }
FD_INLINE vec_t vec_round(vec_t x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* x times 2^n, n integral. */
FD_INLINE vec_t vec_scale2(vec_t x, vec_t n) { return _mm512_scalef_ps(x, n); }
/* y, but 0 where x is below the limit. */
FD_INLINE vec_t vec_zero_below(vec_t y, vec_t x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), y);
}
/* Lane i of x where bit i is set, else fill. */
FD_INLINE vec_t vec_keep(vec_t x, uint64_t bits, float fill) {
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
/* Operands in this order so that NaN stays NaN. */
FD_INLINE vec_t vec_saturate_fp16(vec_t x) {
    return _mm512_max_ps(_mm512_set1_ps(-FD_FP16_MAX), _mm512_min_ps(_mm512_set1_ps(FD_FP16_MAX), x));
}
/* Not vcvtneps2bf16, which flushes subnormals. */
FD_INLINE void vec_store_bf16(void *p, vec_t x) {
    const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    const __m512i y = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(y, 16)));
}
FD_INLINE void vec_store_int8(void *p, vec_t x) { _mm_storeu_si128(p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
FD_INLINE void vec_store_int8_half(void *p, vec_t x) {
    _mm_storel_epi64(p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

FD_INLINE vec_t kv_load(fd_kv_dtype_t dtype, const uint8_t *p) {
    if (dtype == FD_KV_FP32) return _mm512_loadu_ps(p);
    if (dtype == FD_KV_FP16) return vec_load_fp16(p);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
FD_INLINE vec_t kv_load_half(fd_kv_dtype_t dtype, const uint8_t *p) {
    if (dtype == FD_KV_FP32) return _mm512_maskz_loadu_ps(HALF, p);
    if (dtype == FD_KV_FP16) return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

#include "attend_simd.h"

#define FD_KERNELS(name, dtype)                                                                                        \
    FD_BLOCK(name, dtype, 1) FD_BLOCK(name, dtype, 2) FD_BLOCK(name, dtype, 3) FD_BLOCK(name, dtype, 4)                \
    FD_BLOCK(name, dtype, 5) FD_BLOCK(name, dtype, 6) FD_BLOCK(name, dtype, 7) FD_BLOCK(name, dtype, 8)                \
    static const block_fn name##_blocks[MAX_BLOCK] = {                                                                 \
        attend_##name##_block1, attend_##name##_block2, attend_##name##_block3, attend_##name##_block4,                \
        attend_##name##_block5, attend_##name##_block6, attend_##name##_block7, attend_##name##_block8,                \
    };                                                                                                                 \
    static void fd_attend_##name##_avx512(const fd_attend_t *a) { attend(a, name##_blocks); }                          \
    static void fd_append_##name##_avx512(uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k,              \
                                          const float *v) {                                                            \
        append(dtype, chunk, head_size, t, k, v);                                                                      \
    }

FD_KERNELS(fp32, FD_KV_FP32)
FD_KERNELS(fp16, FD_KV_FP16)
FD_KERNELS(int8, FD_KV_INT8)

const fd_kv_ops_t fd_kv_ops_avx512[FD_KV_DTYPES] = {
    [FD_KV_FP32] = {"avx512", fd_append_fp32_avx512, fd_attend_fp32_avx512},
    [FD_KV_FP16] = {"avx512", fd_append_fp16_avx512, fd_attend_fp16_avx512},
    [FD_KV_INT8] = {"avx512", fd_append_int8_avx512, fd_attend_int8_avx512},
};

const fd_vec_ops_t fd_vec_ops_avx512 = {load_act, store_act, merge, finish};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
