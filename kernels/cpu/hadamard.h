/* The Hadamard transform of Q and K before they are rounded to integers, and of V before it is rounded to int4.
 * kernels/linears transforms activations in the same way.
 *
 * A query or a key has a few channels that are many times as large as the others, and they set the scale of its
 * integers. A Hadamard transform is orthogonal, so it leaves every score as it was, and it spreads such a channel over
 * all channels of its block (QuaRot, arXiv 2404.00456). O is a sum of rows of V, so the same transform of O, which is
 * its own inverse, undoes that of V.
 */
#pragma once

#include <math.h>
#include <stdint.h>

#include "compiler.h"

#define FD_HADAMARD_MAX 128u /* elements of the largest block */

typedef float fd_v8_t __attribute__((vector_size(32), aligned(4), may_alias));

/* The first three stages of a Hadamard transform, within eight elements. */
FD_INLINE void fd_hadamard_eight(fd_v8_t *x) {
    const fd_v8_t ones = {1, -1, 1, -1, 1, -1, 1, -1}, twos = {1, 1, -1, -1, 1, 1, -1, -1},
                  fours = {1, 1, 1, 1, -1, -1, -1, -1};
    fd_v8_t y = *x;
    y = y * ones + __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6);
    y = y * twos + __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5);
    *x = y * fours + __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3);
}

/* The vectors of a transform: 16 lanes wide in a file that includes this within the target of AVX-512. */
#ifdef __AVX512F__
enum { HADAMARD_LANES = 16 };
typedef float fd_hadamard_vec_t __attribute__((vector_size(64), aligned(4), may_alias));

/* The first four stages, within sixteen elements. */
FD_INLINE void fd_hadamard_lanes(fd_hadamard_vec_t *x) {
    const fd_hadamard_vec_t ones = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                            twos = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                            fours = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                            eights = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    fd_hadamard_vec_t y = *x;
    y = y * ones + __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    y = y * twos + __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    y = y * fours + __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    *x = y * eights + __builtin_shufflevector(y, y, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}
#else
enum { HADAMARD_LANES = 8 };
typedef fd_v8_t fd_hadamard_vec_t;

FD_INLINE void fd_hadamard_lanes(fd_hadamard_vec_t *x) { fd_hadamard_eight(x); }
#endif

/* Transforms a block of `size` elements, a power of two of at least HADAMARD_LANES, from `src` to `x`, which may be the
 * same. If the block does not fit into eight vectors, its last stage goes through memory. */
FD_INLINE void fd_hadamard_block(float *x, const float *src, const uint32_t size) {
    enum { IN_REGISTERS = 8 * HADAMARD_LANES };
    const float scale = 1.0f / sqrtf((float)size);
    const uint32_t part = size < IN_REGISTERS ? size : IN_REGISTERS, n = part / HADAMARD_LANES;
    for (uint32_t at = 0; at < size; at += part) {
        fd_hadamard_vec_t y[8];
        FD_UNROLL
        for (uint32_t i = 0; i < n; i++) {
            y[i] = *(const fd_hadamard_vec_t *)(src + at + i * HADAMARD_LANES);
            fd_hadamard_lanes(&y[i]);
        }
        FD_UNROLL
        for (uint32_t half = 1; half < n; half *= 2) {
            FD_UNROLL
            for (uint32_t i = 0; i < n; i++) {
                if (i & half) continue;
                const fd_hadamard_vec_t a = y[i], b = y[i + half];
                y[i] = a + b, y[i + half] = a - b;
            }
        }
        FD_UNROLL
        for (uint32_t i = 0; i < n; i++)
            *(fd_hadamard_vec_t *)(x + at + i * HADAMARD_LANES) = y[i] * (part == size ? scale : 1.0f);
    }
    if (part == size) return;
    _Static_assert(FD_HADAMARD_MAX <= 2 * IN_REGISTERS, "one stage is left at most");
    FD_UNROLL
    for (uint32_t i = 0; i < part; i += HADAMARD_LANES) {
        const fd_hadamard_vec_t a = *(fd_hadamard_vec_t *)(x + i), b = *(fd_hadamard_vec_t *)(x + i + part);
        *(fd_hadamard_vec_t *)(x + i) = (a + b) * scale, *(fd_hadamard_vec_t *)(x + i + part) = (a - b) * scale;
    }
}

/* Transforms src [n], n a multiple of 8, to x, which may be the same, in blocks of a power of two: of FD_HADAMARD_MAX
 * elements while as many are left, then of the number that is left. */
FD_SHARED void fd_hadamard(float *x, const float *src, uint32_t n) {
    for (; n >= FD_HADAMARD_MAX; x += FD_HADAMARD_MAX, src += FD_HADAMARD_MAX, n -= FD_HADAMARD_MAX)
        fd_hadamard_block(x, src, FD_HADAMARD_MAX);
    if (n & 64) fd_hadamard_block(x, src, 64), x += 64, src += 64;
    if (n & 32) fd_hadamard_block(x, src, 32), x += 32, src += 32;
    if (n & 16) fd_hadamard_block(x, src, 16), x += 16, src += 16;
    if (!(n & 8)) return;
    fd_v8_t y = *(const fd_v8_t *)src;
    fd_hadamard_eight(&y);
    *(fd_v8_t *)x = y * (1.0f / sqrtf(8.0f));
}

/* Adds the transform of n elements that all are `value`: only the first element of each block is not 0. */
FD_INLINE void fd_add_hadamard(float *x, uint32_t n, float value) {
    for (uint32_t size = FD_HADAMARD_MAX; size >= 8; size /= 2)
        for (; n >= size; x += size, n -= size) *x += value * sqrtf((float)size);
}
