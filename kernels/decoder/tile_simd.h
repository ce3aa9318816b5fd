/* Products of matrices in tiles of at most TILE_ROWS rows by TILE_VECTORS vectors. A tile broadcasts words of its rows
 * and multiplies them with whole vectors of words. A word is a number in fp32, or a pair of bf16.
 *
 * The including file defines TILE_VECTORS, with which a tile of sums fits into the registers, and, if it multiplies
 * pairs of bf16, FD_BF16_PAIRS with its functions. An ISA that multiplies whole tiles defines FD_OWN_MULTIPLY_TILE with
 * multiply_whole_tile, TILE_ROWS, and STEP_WORDS, of which the words of a row are a multiple.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/compiler.h"

#ifndef FD_OWN_MULTIPLY_TILE
enum { TILE_ROWS = 6, STEP_WORDS = 1 };
#endif
enum { LINE = 64, AHEAD = 2 };

/* A word, which may hold a float or two halves. */
typedef uint32_t __attribute__((may_alias)) word_t;

/* Where a tile's products ask for memory that is needed later: AHEAD lines from `at` on for each step of the sums. */
typedef struct {
    const uint8_t *at;
    size_t step; /* bytes; 0: the lines were asked for already */
} ahead_t;

/* sums [rows][vectors] of a [rows][depth] and b [depth][vectors]; added to c, or written there. `ahead` NULL: it asks
 * for no memory. */
FD_INLINE void multiply_tile(const int pairs, const int rows, const int vectors, const word_t *a, size_t a_stride,
                             const word_t *b, size_t b_stride, size_t depth, float *c, size_t c_stride, const int add,
                             const ahead_t *ahead) {
    const uint8_t *next = ahead ? ahead->at : NULL;
#ifdef FD_OWN_MULTIPLY_TILE
    for (size_t i = 0; i < depth * AHEAD && next && ahead->step; i++) __builtin_prefetch(next + i * LINE, 0, 2);
    multiply_whole_tile(vectors, a, a_stride, b, b_stride, depth, c, c_stride, add);
#else
    vec_t sums[TILE_ROWS][TILE_VECTORS];
    FD_UNROLL
    for (int r = 0; r < rows; r++) {
        FD_UNROLL
        for (int j = 0; j < vectors; j++)
            sums[r][j] = add ? vec_load(c + (size_t)r * c_stride + (size_t)j * LANES) : vec_zero();
    }
    for (size_t i = 0; i < depth; i++, b += b_stride) {
        FD_UNROLL
        for (size_t line = 0; line < AHEAD && ahead; line++) __builtin_prefetch(next + line * LINE, 0, 2);
        if (ahead) next += ahead->step;
        vec_t x[TILE_VECTORS];
        FD_UNROLL
        for (int j = 0; j < vectors; j++) x[j] = vec_load((const float *)b + (size_t)j * LANES);
        FD_UNROLL
        for (int r = 0; r < rows; r++) {
            const vec_t y = vec_broadcast(a + (size_t)r * a_stride + i);
            FD_UNROLL
            for (int j = 0; j < vectors; j++) {
#ifdef FD_BF16_PAIRS
                if (pairs) sums[r][j] = vec_add_pairs(sums[r][j], y, x[j]);
                else
#endif
                    sums[r][j] = vec_fma(y, x[j], sums[r][j]);
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < rows; r++) {
        FD_UNROLL
        for (int j = 0; j < vectors; j++) vec_store(c + (size_t)r * c_stride + (size_t)j * LANES, sums[r][j]);
    }
#endif
}
