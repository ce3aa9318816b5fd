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

#include "vec_avx512.h"

/* sums + y.low x.low + y.high x.high. */
FD_INLINE vec_t vec_add_pairs(vec_t sums, vec_t y, vec_t x) {
    return _mm512_dpbf16_ps(sums, (__m512bh)vec_ints(y), (__m512bh)vec_ints(x));
}
/* The numbers of x and then of y, as bf16. */
FD_INLINE vec_t vec_round_pairs(vec_t x, vec_t y) { return vec_bits((__m512i)_mm512_cvtne2ps_pbh(y, x)); }

#define FD_BF16_PAIRS
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
