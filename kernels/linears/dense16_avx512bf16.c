/* AVX-512 with BF16: products of bf16 rows and bf16 weights. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512bf16")

#include "cpu/vec_avx512bf16.h"

#define TILE_VECTORS 4
#include "dense16_simd.h"

extern const fd_dense16_ops_t fd_dense16_avx512bf16;
FD_DENSE16(avx512bf16)

FD_END_TARGET
#endif
