/* fd_linear_ops_t.round_row in plain C, which each ISA's file compiles for its target. The largest magnitude is found
 * by comparing bits as integers. This vectorises without -ffast-math, and keeps NaN, whose bits are the largest.
 *
 * The including file defines two functions first:
 *
 *   dot_offset: for the sum that starts each dot product. The weights' zero is subtracted there, and so is the constant
 *   that the ISA adds to the weights to make them signed or unsigned.
 *   dot_steps: the largest multiple with one pass, at most 127.
 */
#pragma once

#include <math.h>
#include <string.h>

#include "linear.h"
#include "cpu/hadamard.h"

/* A block is stored in vectors of the width with which it is loaded next, because a load waits for narrower stores to
 * the same bytes. FD_ROUND_64_BYTES: AVX-512 loads 64 bytes. */
#ifdef FD_ROUND_64_BYTES
typedef float fd_sixteen_floats_t __attribute__((vector_size(64), aligned(4), may_alias));
#endif
typedef int32_t fd_float_bits_t __attribute__((may_alias));

/* Multiplies a block by H, whose element (i, j) is -1 to the number of bits that i and j have in common. */
static inline void hadamard_block(const float *from, float *to) {
    enum { N = FD_LINEAR_BLOCK / 8 };
    fd_v8_t x[N];
    for (int i = 0; i < N; i++) {
        x[i] = ((const fd_v8_t *)from)[i];
        fd_hadamard_eight(&x[i]);
    }
    const fd_v8_t low = x[0] + x[1], low_odd = x[0] - x[1], high = x[2] + x[3], high_odd = x[2] - x[3];
    const fd_v8_t y[N] = {low + high, low_odd + high_odd, low - high, low_odd - high_odd};
#ifdef FD_ROUND_64_BYTES
    for (int i = 0; i < N / 2; i++)
        ((fd_sixteen_floats_t *)to)[i] =
            __builtin_shufflevector(y[2 * i], y[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    for (int i = 0; i < N; i++) ((fd_v8_t *)to)[i] = y[i];
#endif
}

typedef int16_t fd_wide_t __attribute__((may_alias));

/* `steps`: the largest multiple. `base` is added to each. `low`: of the second pass; NULL: q gets multiples of 16 bits.
 */
static inline void round_block(const float *x, uint32_t passes, float steps, int32_t base, int8_t *q, int8_t *low,
                               float *scale, int32_t *sum) {
    const fd_float_bits_t *x_bits = (const fd_float_bits_t *)x;
    int32_t bits[FD_LINEAR_BLOCK], largest = 0, total = 0;
    for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
        const int32_t magnitude = x_bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    if (largest >= 0x7f800000) { /* infinity or NaN: the outputs must show it */
        memset(q, 0, FD_LINEAR_BLOCK * (low ? 1 : 2));
        if (low) memset(low, 0, FD_LINEAR_BLOCK);
        *scale = NAN;
        *sum = 0;
        return;
    }
    const float inverse = most > 1e-30f ? steps / most : 0.0f;
    for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
        bits[i] = (int32_t)rintf(x[i] * inverse);
        total += bits[i];
    }
    if (passes == 1) {
        for (int i = 0; i < FD_LINEAR_BLOCK; i++) q[i] = (int8_t)(bits[i] + base);
    } else if (!low) {
        for (int i = 0; i < FD_LINEAR_BLOCK; i++) ((fd_wide_t *)q)[i] = (int16_t)bits[i];
    } else {
        for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
            const int32_t high = (bits[i] + (1 << (FD_LINEAR_LOW_BITS - 1))) >> FD_LINEAR_LOW_BITS;
            q[i] = (int8_t)high;
            low[i] = (int8_t)(bits[i] - high * (1 << FD_LINEAR_LOW_BITS));
        }
    }
    *scale = most > 1e-30f ? most / steps : 0.0f;
    *sum = total;
}

static void round_row(const fd_linear_t *l, const float *x, uint32_t row, const fd_linear_rows_t *out) {
    const size_t blocks = fd_linear_blocks(l), beside = out->beside, first = row / beside * blocks;
    const uint32_t passes = l->passes, hadamard = l->hadamard;
    const float steps = passes == 1 ? (float)dot_steps(l) : 127 << FD_LINEAR_LOW_BITS;
    const int32_t offset = dot_offset(l), base = l->negated_sums ? FD_LINEAR_SIGNED_STEPS : 0;
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t start = b * FD_LINEAR_BLOCK;
        const float *from = x + start;
        float block[FD_LINEAR_BLOCK];
        if (start + FD_LINEAR_BLOCK > l->ins) {
            memset(block, 0, sizeof block);
            if (start < l->ins) memcpy(block, from, (l->ins - start) * sizeof *x);
            from = block;
        }
        if (hadamard) {
            hadamard_block(from, block);
            from = block;
        }
        const size_t block_at = (first + b) * beside, at = block_at + row % beside;
        int8_t *q = out->x + (block_at * passes + row % beside) * FD_LINEAR_BLOCK;
        int32_t sum;
        int8_t *low = out->wide ? NULL : q + (passes - 1) * beside * FD_LINEAR_BLOCK;
        round_block(from, passes, steps, base, q, low, out->scales + at, &sum);
        out->sums[at] = out->scales[at] * (float)sum;
        out->starts[at] = offset * sum;
    }
}
