/* The vectors of AVX-512 with BF16: vec_avx512.h, and products of bf16 pairs. */
#pragma once

#include "vec_avx512.h"

/* sums + y.low x.low + y.high x.high. */
FD_INLINE vec_t vec_add_pairs(vec_t sums, vec_t y, vec_t x) {
    return _mm512_dpbf16_ps(sums, (__m512bh)vec_ints(y), (__m512bh)vec_ints(x));
}
/* The numbers of x and then of y, as bf16. */
FD_INLINE vec_t vec_round_pairs(vec_t x, vec_t y) { return vec_bits((__m512i)_mm512_cvtne2ps_pbh(y, x)); }

#define FD_BF16_PAIRS
