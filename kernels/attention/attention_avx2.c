/* Kernels for AVX2 with FMA and F16C, 8 lanes. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#define FD_PREFETCH_BY_VENDOR

#include "kv_avx2.h"

FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return is_v && format == FD_KV_INT8 ? 255.0f : 127.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return format == FD_KV_INT4 || format == FD_KV_BF16 ? 2 : 1; }

/* vpmaddubsw adds two products in 16 bits, with saturation: of bytes 0 and 1 of a word, and of bytes 2 and
 * 3, which are elements 0 and 2, and 1 and 3. The two products of int8 fit if the two multipliers together do not
 * exceed what one of them may be: 255 * 128 < 2^15 in scores, 127 * 256 < 2^15 in outputs, where 128 and 256 are
 * kv_qmax and a half of rounding for each of the two. Two multipliers of opposite signs do not add up. */
#define FD_OWN_SIZE
FD_INLINE vec_t kv_size(fd_kv_dtype_t format, int is_v, vec_t x) {
    if (format != FD_KV_INT8) return is_v ? x : vec_abs(x);
    const vec_t pair = vec_add(x, _mm256_permute_ps(x, 0x4e));
    return is_v ? pair : vec_max(vec_abs(x), vec_abs(pair));
}

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    const __m256i x = vec_ints(words);
    if (format == FD_KV_BF16)
        return vec_bits(part == 0 ? _mm256_slli_epi32(x, 16) : _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
    return unpack_bytes(format, is_v, words, part);
}
/* The products of a part, in pairs: sums of 16 bits. */
FD_INLINE __m256i multiply_pairs(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y) {
    if (format == FD_KV_INT8 && is_v) return _mm256_maddubs_epi16(vec_ints(y), vec_ints(x));
    return _mm256_maddubs_epi16(vec_ints(x), vec_ints(y));
}
/* The addition is volatile assembly, which gcc keeps in its place: it otherwise starts the products of many rows at
 * once and has no register left for some of the sums. A sum that lies in memory waits for its store in every step. Nor
 * does gcc 12 copy the sum before assembly, as it does before some intrinsics. */
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (!fd_kv_is_int(format)) return vec_fma(x, y, sum);
    const __m256i products = _mm256_madd_epi16(multiply_pairs(format, is_v, x, y), _mm256_set1_epi16(1));
    __asm__ volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
}

/* A pair of int4's products is at most 2 * 15 * 127, so 16 bits hold the sum of 8 pairs, as many as 4 words have. */
#define FD_HAS_NARROW_SUMS
FD_INLINE uint32_t kv_narrow_words(fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 4 : 0; }
FD_INLINE vec_t kv_multiply_narrow(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y) {
    return vec_pin(vec_bits(multiply_pairs(format, is_v, x, y)));
}
FD_INLINE vec_t kv_multiply_add_narrow(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t narrow) {
    return vec_pin(vec_bits(_mm256_add_epi16(vec_ints(narrow), multiply_pairs(format, is_v, x, y))));
}
FD_INLINE vec_t kv_widen_add(vec_t narrow, vec_t sum) {
    return vec_bits(_mm256_add_epi32(vec_ints(sum), _mm256_madd_epi16(vec_ints(narrow), _mm256_set1_epi16(1))));
}

#include "tiles_simd.h"
#include "attend_simd.h"
#include "rows_simd.h"
#include "append.h"

#define FD_KERNELS(name, dtype, text) FD_ATTEND(name, dtype, avx2, 6) FD_APPEND(name, dtype, avx2)
FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"avx2", fd_append_##name##_avx2, fd_attend_##name##_avx2},
const fd_kv_ops_t fd_kv_ops_avx2[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

const fd_vec_ops_t fd_vec_ops_avx2 = {load_act, merge, finish};

FD_END_TARGET
#endif
