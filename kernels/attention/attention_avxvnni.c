/* Integer kernels for AVX-VNNI, 8 lanes: Intel's processors from Alder Lake to Arrow Lake, Sierra Forest and others
 * that have VNNI without AVX-512. Float formats use AVX2's kernels. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#include "kv_avx2.h"

FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return is_v ? 255.0f : 127.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 2 : 1; }

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    return unpack_bytes(format, is_v, words, part);
}
/* Written in assembly: in the form of AVX-VNNI, which assemblers otherwise choose only if AVX-512 is off, and without
 * the copy of the sum that gcc 12 makes before an intrinsic. */
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (is_v) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(y), "x"(x));
    else __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
    return sum;
}

#include "tiles_simd.h"
#include "attend_simd.h"

FD_ATTEND(int8, FD_KV_INT8, avxvnni, 6)
FD_ATTEND(int4, FD_KV_INT4, avxvnni, 6)
FD_ATTEND(int8_int4, FD_KV_INT8_INT4, avxvnni, 6)

#define fd_attend_fp32_avxvnni fd_attend_fp32_avx2
#define fd_attend_fp16_avxvnni fd_attend_fp16_avx2
#define fd_attend_bf16_avxvnni fd_attend_bf16_avx2
#define FD_KV_OPS(name, dtype, text) [dtype] = {"avxvnni", fd_append_##name##_avx2, fd_attend_##name##_avxvnni},
const fd_kv_ops_t fd_kv_ops_avxvnni[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

FD_END_TARGET
#endif
