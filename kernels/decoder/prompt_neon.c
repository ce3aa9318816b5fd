/* Advanced SIMD of Armv8.0-A, 4 lanes. */
#include "dispatch.h"

#if FD_ARM64
#include "vec_neon.h"

#define TILE_VECTORS 4
#include "prompt_simd.h"

FD_PROMPT_FN(fp32, neon, FD_ACT_FP32, 0)
FD_PROMPT_FN(fp16, neon, FD_ACT_FP16, 0)
FD_PROMPT_FN(bf16, neon, FD_ACT_BF16, 0)
fd_prompt_fn *const fd_prompt_neon[FD_ACT_DTYPES] = {
    [FD_ACT_FP32] = fd_prompt_fp32_neon, [FD_ACT_FP16] = fd_prompt_fp16_neon, [FD_ACT_BF16] = fd_prompt_bf16_neon};
#endif
