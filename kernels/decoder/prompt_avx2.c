/* AVX2 with FMA and F16C, 8 lanes. */
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

#define TILE_VECTORS 2
#include "prompt_simd.h"

FD_PROMPT_FN(fp32, avx2, FD_ACT_FP32, 0)
FD_PROMPT_FN(fp16, avx2, FD_ACT_FP16, 0)
FD_PROMPT_FN(bf16, avx2, FD_ACT_BF16, 0)
fd_prompt_fn *const fd_prompt_avx2[FD_ACT_DTYPES] = {
    [FD_ACT_FP32] = fd_prompt_fp32_avx2, [FD_ACT_FP16] = fd_prompt_fp16_avx2, [FD_ACT_BF16] = fd_prompt_bf16_avx2};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
