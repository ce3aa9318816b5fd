/* The vec_* primitives in portable C, with 4 lanes: a compiler makes them from what the ABI's baseline has. */
#pragma once

#include <string.h>

#include "compiler.h"
#include "half.h"

typedef float vec_t __attribute__((vector_size(16)));
typedef int32_t ints_t __attribute__((vector_size(16)));
typedef uint32_t words_t __attribute__((vector_size(16)));

enum { LANES = 4 };

FD_INLINE vec_t vec_pin(vec_t x) { return x; }
FD_INLINE vec_t vec_set1(float x) { return (vec_t){x, x, x, x}; }
FD_INLINE vec_t vec_zero(void) { return vec_set1(0.0f); }
FD_INLINE vec_t vec_load(const float *p) {
    vec_t x;
    memcpy(&x, p, sizeof x);
    return x;
}
FD_INLINE void vec_store(float *p, vec_t x) { memcpy(p, &x, sizeof x); }
FD_INLINE vec_t vec_add(vec_t x, vec_t y) { return x + y; }
FD_INLINE vec_t vec_sub(vec_t x, vec_t y) { return x - y; }
FD_INLINE vec_t vec_mul(vec_t x, vec_t y) { return x * y; }
FD_INLINE vec_t vec_div(vec_t x, vec_t y) { return x / y; }
FD_INLINE vec_t vec_fma(vec_t x, vec_t y, vec_t z) { return x * y + z; }
FD_INLINE vec_t vec_bits(words_t x) { return (vec_t)x; }
FD_INLINE words_t vec_ints(vec_t x) { return (words_t)x; }
/* Lanes of x where `mask` is -1, and of y where it is 0. */
FD_INLINE vec_t vec_blend(words_t mask, vec_t x, vec_t y) {
    return vec_bits((mask & vec_ints(x)) | (~mask & vec_ints(y)));
}
FD_INLINE vec_t vec_max(vec_t x, vec_t y) { return vec_blend((words_t)(x > y), x, y); }
FD_INLINE vec_t vec_min(vec_t x, vec_t y) { return vec_blend((words_t)(x < y), x, y); }
FD_INLINE vec_t vec_and_bits(vec_t x, uint32_t bits) { return vec_bits(vec_ints(x) & bits); }
FD_INLINE vec_t vec_abs(vec_t x) { return vec_and_bits(x, 0x7fffffffu); }
FD_INLINE float vec_reduce_max(vec_t x) {
    const float y = x[0] > x[1] ? x[0] : x[1], z = x[2] > x[3] ? x[2] : x[3];
    return y > z ? y : z;
}
FD_INLINE float vec_reduce_add(vec_t x) { return (x[0] + x[1]) + (x[2] + x[3]); }
/* Rounds lanes within 2^22: 1.5 * 2^23 has no fraction bits. x must not be a product that a compiler may fuse with the
 * addition, unless the product is exact. */
FD_INLINE vec_t vec_round(vec_t x) { return x + 0x1.8p23f - 0x1.8p23f; }
/* floor(x) within the range of int32, and any integer outside of it. */
FD_INLINE ints_t vec_floor(vec_t x) {
    const ints_t truncated = __builtin_convertvector(x, ints_t);
    const ints_t above = __builtin_convertvector(truncated, vec_t) > x;
    return (ints_t)((words_t)truncated + (words_t)above); /* unsigned: -infinity becomes INT_MIN, which wraps */
}
FD_INLINE vec_t vec_fraction(vec_t x) { return x - __builtin_convertvector(vec_floor(x), vec_t); }
FD_INLINE vec_t vec_scale2(vec_t y, vec_t x, float limit) {
    return vec_bits((vec_ints(y) + ((words_t)vec_floor(x) << 23)) & (words_t)(x >= limit));
}
FD_INLINE int vec_any_above(vec_t x, vec_t y) {
    const ints_t above = x > y;
    return (above[0] | above[1] | above[2] | above[3]) != 0;
}
FD_INLINE vec_t vec_from_int(vec_t x) { return __builtin_convertvector((ints_t)x, vec_t); }
FD_INLINE vec_t vec_add_int(vec_t x, vec_t y) { return vec_bits(vec_ints(x) + vec_ints(y)); }
/* The bf16 in the low half of every lane. */
FD_INLINE vec_t vec_low_bf16(vec_t x) { return vec_bits(vec_ints(x) << 16); }
FD_INLINE vec_t vec_broadcast(const void *p) {
    float x;
    memcpy(&x, p, sizeof x);
    return vec_set1(x);
}
FD_INLINE vec_t vec_select(vec_t x, uint64_t bits, float fill) {
    const words_t set = (words_t){1, 2, 4, 8} & (uint32_t)bits;
    return vec_blend((words_t)(set != 0), x, vec_set1(fill));
}

FD_INLINE vec_t vec_load_fp16(const void *p) {
    vec_t x;
    for (int i = 0; i < LANES; i++) x[i] = fd_fp16_to_fp32(((const uint16_t *)p)[i]);
    return x;
}
FD_INLINE vec_t vec_load_bf16(const void *p) {
    vec_t x;
    for (int i = 0; i < LANES; i++) x[i] = fd_bf16_to_fp32(((const uint16_t *)p)[i]);
    return x;
}
FD_INLINE void vec_store_fp16(void *p, vec_t x) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)p)[i] = fd_fp32_to_fp16(x[i]);
}
FD_INLINE void vec_store_bf16(void *p, vec_t x) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)p)[i] = fd_fp32_to_bf16(x[i]);
}
FD_INLINE void vec_store_u8(void *p, vec_t x, int zero) {
    for (int i = 0; i < LANES; i++) ((uint8_t *)p)[i] = (uint8_t)((int)vec_round(x)[i] + zero);
}
FD_INLINE void vec_store_int(void *p, vec_t x, int zero) {
    const ints_t y = __builtin_convertvector(vec_round(x), ints_t) + zero;
    memcpy(p, &y, sizeof y);
}

#include "vec_no_halves.h"
