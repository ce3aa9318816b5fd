/* AVX-512 with BF16: products of bf16 pairs. The other dtypes take the functions of AVX-512. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512bf16")

#include "cpu/vec_avx512bf16.h"

#define TILE_VECTORS 4
#include "prompt_simd.h"

FD_PROMPT_FUNCTIONS(bf16, FD_ACT_BF16, 1)
extern const fd_prompt_ops_t fd_prompt_bf16_avx512bf16;
const fd_prompt_ops_t fd_prompt_bf16_avx512bf16 = {"avx512bf16", block_words_bf16, pack_bf16, attend_bf16};

FD_END_TARGET
#endif
