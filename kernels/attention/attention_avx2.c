/* Kernels for AVX2 with FMA and F16C, 8 lanes. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "vec_avx2.h"

/* At most 12 of the 16 registers hold sums; the others hold 2 vectors of K or V and a broadcast multiplier. Formats
 * that must be unpacked need more of the others. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) {
    const int unpacked = format != FD_KV_FP32 && format != FD_KV_FP16;
    return rows > (unpacked ? 2 : 3) ? 2 : 4;
}
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return dtype == FD_KV_FP32 || dtype == FD_KV_FP16 ? 6 : 4; }

/* ---- Words of K and V (chunk.h) ---- */

FD_INLINE vec_t kv_load(fd_kv_dtype_t format, const uint8_t *p) {
    return format == FD_KV_FP16 ? vec_load_fp16(p) : _mm256_loadu_ps((const float *)p);
}

/* Loads the scale and the centre (0 for int8) of LANES tokens. */
FD_INLINE void kv_affine(fd_kv_dtype_t format, const void *p, vec_t *scale, vec_t *centre) {
    const __m256i x = _mm256_loadu_si256(p);
    *scale = vec_bits(format == FD_KV_INT8 ? x : _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
    *centre = format == FD_KV_INT8 ? vec_zero() : vec_bits(_mm256_slli_epi32(x, 16));
}

/* Integers are multiplied as 16-bit pairs, by vpmaddwd and vpaddd. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 16; }
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return 32767.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) {
    return format == FD_KV_INT4 ? 4 : format == FD_KV_INT8 || format == FD_KV_BF16 ? 2 : 1;
}

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    if (format == FD_KV_FP32 || format == FD_KV_FP16) return words;
    const __m256i x = vec_ints(words);
    if (format == FD_KV_BF16)
        return vec_bits(part == 0 ? _mm256_slli_epi32(x, 16) : _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
    if (format == FD_KV_INT8)
        return vec_bits(part ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(0xff)));
    if (part == 3) return vec_bits(_mm256_srli_epi16(x, 12));
    return vec_bits(_mm256_and_si256(part ? _mm256_srli_epi16(x, part == 1 ? 8 : 4) : x, _mm256_set1_epi16(0xf)));
}
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (!fd_kv_is_int(format)) return vec_fma(x, y, sum);
    return vec_bits(_mm256_add_epi32(vec_ints(sum), _mm256_madd_epi16(vec_ints(x), vec_ints(y))));
}
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    _mm_storeu_si128((__m128i *)to + i, vec_to_int16(x));
}

/* With 8 lanes there are no half vectors, because head sizes are multiples of 8; the templates need these names. */
FD_INLINE vec_t vec_load_half(const float *p) { return vec_load(p); }
FD_INLINE void vec_store_half(float *p, vec_t x) { vec_store(p, x); }
FD_INLINE void vec_store_fp16_half(void *p, vec_t x) { vec_store_fp16(p, x); }
FD_INLINE void vec_store_bf16_half(void *p, vec_t x) { vec_store_bf16(p, x); }
FD_INLINE void vec_store_u8_half(void *p, vec_t x, int zero) { vec_store_u8(p, x, zero); }
FD_INLINE void vec_store_int_half(void *p, vec_t x, int zero) { vec_store_int(p, x, zero); }
FD_INLINE vec_t kv_load_half(fd_kv_dtype_t format, const uint8_t *p) { return kv_load(format, p); }

#include "tiles_simd.h"
#include "attend_simd.h"
#include "rows_simd.h"
#include "append.h"

#define FD_KERNELS(name, dtype, text)                                                                                  \
    FD_BLOCK(name, dtype, 1);                                                                                          \
    FD_BLOCK(name, dtype, 2);                                                                                          \
    FD_BLOCK(name, dtype, 3);                                                                                          \
    FD_BLOCK(name, dtype, 4);                                                                                          \
    FD_BLOCK(name, dtype, 5);                                                                                          \
    FD_BLOCK(name, dtype, 6);                                                                                          \
    static const block_fn name##_blocks[MAX_BLOCK] = {                                                                 \
        attend_##name##_block1, attend_##name##_block2, attend_##name##_block3,                                        \
        attend_##name##_block4, attend_##name##_block5, attend_##name##_block6,                                        \
    };                                                                                                                 \
    static void fd_attend_##name##_avx2(const fd_attend_t *a) { attend(dtype, a, name##_blocks); }                     \
    static void fd_append_##name##_avx2(uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t,               \
                                        const float *k, const float *v) {                                              \
        append(dtype, chunk, head_size, v_size, t, k, v);                                                              \
    }

FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"avx2", fd_append_##name##_avx2, fd_attend_##name##_avx2},
const fd_kv_ops_t fd_kv_ops_avx2[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

const fd_vec_ops_t fd_vec_ops_avx2 = {load_act, merge, finish};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
