/* Kernels for AVX-512 with VNNI and BF16. The fp32 kernel is that of AVX-512. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni")

#define FD_PREFETCH_NEAR /* a CPU with BF16 but without AMX is usually by AMD, Zen 4 or later */
#include "kv_vnni.h"

#include "tiles_simd.h"
#include "attend_simd.h"

FD_ATTEND(fp16, FD_KV_FP16, avx512bf16, 8)
FD_ATTEND(bf16, FD_KV_BF16, avx512bf16, 8)
FD_ATTEND(int8, FD_KV_INT8, avx512bf16, 8)
FD_ATTEND(int4, FD_KV_INT4, avx512bf16, 8)
FD_ATTEND(int8_int4, FD_KV_INT8_INT4, avx512bf16, 8)

/* This ISA has no fp32 kernel of its own. */
#define fd_attend_fp32_avx512bf16 fd_attend_fp32_avx512
#define FD_KV_OPS(name, dtype, text) [dtype] = {"avx512bf16", fd_append_##name##_avx512, fd_attend_##name##_avx512bf16},
const fd_kv_ops_t fd_kv_ops_avx512bf16[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

FD_END_TARGET
#endif
