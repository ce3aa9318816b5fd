/* AVX2 with FMA and F16C, 8 lanes. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#include "cpu/vec_avx2.h"

#define TILE_VECTORS 2
#include "delta_simd.h"
#include "prompt_simd.h"
#include "reduction_simd.h"
#include "row_ops_simd.h"

FD_PROMPT(avx2)
FD_ROW_OPS(avx2)
FD_DELTA(avx2)
FD_SUM_PARTS(avx2)

FD_END_TARGET
#endif
