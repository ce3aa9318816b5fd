/* AVX-512, 16 lanes. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512)

#include "cpu/vec_avx512.h"

#define TILE_VECTORS 4
#include "delta_simd.h"
#include "prompt_simd.h"
#include "reduction_simd.h"
#include "row_ops_simd.h"

FD_PROMPT(avx512)
FD_ROW_OPS(avx512)
FD_DELTA(avx512)
FD_SUM_PARTS(avx512)

FD_END_TARGET
#endif
