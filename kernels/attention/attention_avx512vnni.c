/* Integer kernels for AVX-512 with VNNI. Float formats use AVX-512's kernels. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni")

#include "kv_vnni.h"

#include "tiles_simd.h"
#include "attend_simd.h"

FD_ATTEND(int8, FD_KV_INT8, avx512vnni, 8)
FD_ATTEND(int4, FD_KV_INT4, avx512vnni, 8)
FD_ATTEND(int8_int4, FD_KV_INT8_INT4, avx512vnni, 8)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"avx512vnni", fd_append_##name##_avx512, fd_attend_##name##_avx512vnni},
const fd_kv_ops_t fd_kv_ops_avx512vnni[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

FD_END_TARGET
#endif
