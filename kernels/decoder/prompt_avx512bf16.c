/* AVX-512 with BF16: products of bf16 pairs. The other dtypes take the functions of AVX-512. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16"))),   \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#endif

#include "vec_avx512bf16.h"

#define TILE_VECTORS 4
#include "prompt_simd.h"

FD_PROMPT_FUNCTIONS(bf16, FD_ACT_BF16, 1)
extern const fd_prompt_ops_t fd_prompt_bf16_avx512bf16;
const fd_prompt_ops_t fd_prompt_bf16_avx512bf16 = {block_words_bf16, pack_bf16, attend_bf16};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
