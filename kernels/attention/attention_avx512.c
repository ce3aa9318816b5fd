/* Kernels for AVX-512 F, BW, DQ and VL, 16 lanes. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512)

#include "kv_avx512.h"

/* A tile is a column wide. At most 16 of the 32 registers hold sums; the parts of a vector of K or V and a broadcast
 * multiplier fit into the others. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) { return 2; }
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }

/* Integers are multiplied as 16-bit pairs, by vpmaddwd and vpaddd. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 16; }
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return 32767.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) {
    return format == FD_KV_INT4 ? 4 : format == FD_KV_INT8 || format == FD_KV_BF16 ? 2 : 1;
}

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    if (format == FD_KV_FP32 || format == FD_KV_FP16) return words;
    const __m512i x = vec_ints(words);
    if (format == FD_KV_BF16)
        return vec_bits(part == 0 ? _mm512_slli_epi32(x, 16) : _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
    if (format == FD_KV_INT8)
        return vec_bits(part ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(0xff)));
    if (part == 3) return vec_bits(_mm512_srli_epi16(x, 12));
    return vec_bits(_mm512_and_si512(part ? _mm512_srli_epi16(x, part == 1 ? 8 : 4) : x, _mm512_set1_epi16(0xf)));
}
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (!fd_kv_is_int(format)) return vec_fma(x, y, sum);
    return vec_bits(_mm512_add_epi32(vec_ints(sum), _mm512_madd_epi16(vec_ints(x), vec_ints(y))));
}
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    _mm256_storeu_si256((__m256i *)to + i, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

#include "tiles_simd.h"
#include "attend_simd.h"
#include "rows_simd.h"
#include "append.h"

#define FD_KERNELS(name, dtype, text) FD_ATTEND(name, dtype, avx512, 8) FD_APPEND(name, dtype, avx512)
FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"avx512", fd_append_##name##_avx512, fd_attend_##name##_avx512},
const fd_kv_ops_t fd_kv_ops_avx512[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

const fd_vec_ops_t fd_vec_ops_avx512 = {load_act, merge, finish};

FD_END_TARGET
#endif
