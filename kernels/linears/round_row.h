/* fd_linear_ops_t.round_row in plain C, for each ISA's compiler flags. The largest magnitude is found among the bits as
 * integers, which vectorises without -ffast-math and keeps NaN, whose bits are the largest. */
#ifndef FD_ROUND_ROW_H
#define FD_ROUND_ROW_H

#include <math.h>
#include <string.h>

#include "linear.h"

static void round_block(const float *x, uint32_t passes, int8_t *q, float *scale, float *sum) {
    int32_t bits[FD_LINEAR_BLOCK], largest = 0, total = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
        const int32_t magnitude = bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    if (largest >= 0x7f800000) { /* infinity or NaN: the outputs must show it */
        memset(q, 0, (size_t)passes * FD_LINEAR_BLOCK);
        *scale = NAN;
        *sum = NAN;
        return;
    }
    const float steps = passes == 1 ? 127.0f : 127 << FD_LINEAR_LOW_BITS;
    const float inverse = most > 1e-30f ? steps / most : 0.0f;
    for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
        bits[i] = (int32_t)rintf(x[i] * inverse);
        total += bits[i];
    }
    if (passes == 1) {
        for (int i = 0; i < FD_LINEAR_BLOCK; i++) q[i] = (int8_t)bits[i];
    } else {
        for (int i = 0; i < FD_LINEAR_BLOCK; i++) {
            const int32_t high = (bits[i] + (1 << (FD_LINEAR_LOW_BITS - 1))) >> FD_LINEAR_LOW_BITS;
            q[i] = (int8_t)high;
            q[FD_LINEAR_BLOCK + i] = (int8_t)(bits[i] - (high << FD_LINEAR_LOW_BITS));
        }
    }
    *scale = most > 1e-30f ? most / steps : 0.0f;
    *sum = *scale * (float)total;
}

static void round_row(const fd_linear_t *l, const float *x, uint32_t row, const fd_linear_rows_t *out) {
    const size_t blocks = fd_linear_blocks(l), first = row * blocks;
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t start = b * FD_LINEAR_BLOCK;
        const float *from = x + start;
        float padded[FD_LINEAR_BLOCK];
        if (start + FD_LINEAR_BLOCK > l->ins) {
            memset(padded, 0, sizeof padded);
            if (start < l->ins) memcpy(padded, from, (l->ins - start) * sizeof *x);
            from = padded;
        }
        round_block(from, l->passes, out->x + (first + b) * l->passes * FD_LINEAR_BLOCK, out->scales + first + b,
                    out->sums + first + b);
    }
}

#endif
