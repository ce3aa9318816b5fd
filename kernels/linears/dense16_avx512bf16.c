/* AVX-512 with BF16: products of bf16 rows and bf16 weights. */
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
#include "dense16_simd.h"

extern const fd_dense16_ops_t fd_dense16_avx512bf16;
FD_DENSE16(avx512bf16)

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
