/* 2^x, written with the vec_* primitives of the including file. */
#pragma once

#include "compiler.h"

#define LOG2_E 0x1.715476p+0f
#define EXP2_FLUSH -96.0f /* vec_exp2 is 0 below this: products of smaller weights may be subnormal, hence slow */

/* 2^x for x <= 0, computed as 2^n p(x - n) with n = floor(x) and a polynomial p with p(0) = 1; the largest relative
 * error is 1.5e-7. The result is 0 for NaN and below EXP2_FLUSH, -infinity included. */
FD_INLINE vec_t vec_exp2_of_float(vec_t x) {
    const vec_t r = vec_fraction(x);
    vec_t p = vec_fma(vec_set1(0x1.e97502p-10f), r, vec_set1(0x1.277854p-7f));
    p = vec_fma(p, r, vec_set1(0x1.c91ce6p-5f));
    p = vec_fma(p, r, vec_set1(0x1.ebdb56p-3f));
    p = vec_fma(p, r, vec_set1(0x1.62e4bap-1f));
    return vec_scale2(vec_fma(p, r, vec_set1(1.0f)), x, EXP2_FLUSH);
}
