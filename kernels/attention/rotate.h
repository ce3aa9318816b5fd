/* The rotation of Q and K before they are rounded to integers, and of V before it is rounded to int4. kernels/linears
 * rotates activations in the same way.
 *
 * A query or a key has a few channels that are many times as large as the others, and they set the scale of its
 * integers. A Hadamard transform is orthogonal, so it leaves every score as it was, and it spreads such a channel over
 * all channels of its block (QuaRot, arXiv 2404.00456). O is a sum of rows of V, so the same transform of O, which is
 * its own inverse, undoes that of V.
 */
#ifndef FD_ROTATE_H
#define FD_ROTATE_H

#include "chunk.h"

#define FD_ROTATED_MAX 128u /* elements of the largest block */

typedef float fd_v8_t __attribute__((vector_size(32), aligned(4), may_alias));

/* The first three stages of a Hadamard transform, within eight elements. */
FD_INLINE void fd_rotate_eight(fd_v8_t *x) {
    const fd_v8_t ones = {1, -1, 1, -1, 1, -1, 1, -1}, twos = {1, 1, -1, -1, 1, 1, -1, -1},
                  fours = {1, 1, 1, 1, -1, -1, -1, -1};
    fd_v8_t y = *x;
    y = y * ones + __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6);
    y = y * twos + __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5);
    *x = y * fours + __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3);
}

/* Rotates x [n], n a multiple of 8, in blocks of a power of two: of FD_ROTATED_MAX elements while so many are left,
 * then of as many as are left. */
FD_INLINE void fd_rotate(float *x, uint32_t n) {
    for (uint32_t size = FD_ROTATED_MAX; size >= 8; size /= 2) {
        const float scale = 1.0f / sqrtf((float)size);
        for (; n >= size; x += size, n -= size) {
            for (uint32_t i = 0; i < size; i += 8) fd_rotate_eight((fd_v8_t *)(x + i));
            for (uint32_t half = 8; half < size; half *= 2)
                for (uint32_t i = 0; i < size; i += 8) {
                    if (i & half) continue;
                    const fd_v8_t a = *(fd_v8_t *)(x + i), b = *(fd_v8_t *)(x + i + half);
                    *(fd_v8_t *)(x + i) = a + b;
                    *(fd_v8_t *)(x + i + half) = a - b;
                }
            for (uint32_t i = 0; i < size; i += 8) *(fd_v8_t *)(x + i) *= scale;
        }
    }
}

#endif
