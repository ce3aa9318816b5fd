/* fd_linear_ops_t.tile for any vector width. An ISA's file defines the following names and then includes this header,
 * within its target pragma:
 *
 *   LANES, MAX_ROWS   outputs of a vector; the most rows whose sums fit into registers, 4 or more
 *   vec_t, ivec_t     LANES fp32 numbers; LANES 32-bit integers
 *   vec_*, ivec_*     their operations
 *   dot_block         adds the products of a block's numbers with one pass over n rows of inputs to dot [n]. It may
 *                     subtract a constant from each number first. `coded`: the matrix has a table.
 *   dot_offset        that constant minus the weights' zero
 */
#ifndef FD_LINEAR_SIMD_H
#define FD_LINEAR_SIMD_H

#include "round_row.h"

/* LANES of the tile's outputs, from output `lane` on, of `n` rows from `row` on; `n`, `bits` and `coded` are constants
 * where this is inlined. */
FD_INLINE void some_rows(const fd_linear_t *l, uint32_t tile, uint32_t lane, const fd_linear_rows_t *rows, uint32_t row,
                         float *y, const uint32_t n, const uint32_t bits, const int coded) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES + lane;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l) + lane * 4;
    const size_t stride = (size_t)blocks * l->passes * FD_LINEAR_BLOCK;
    /* min and offset both multiply the sum of a block's inputs. */
    const float offset = (float)dot_offset(l->zero, bits);
    const int sums = l->mins || offset != 0.0f;
    size_t group = (size_t)tile * l->groups * FD_LINEAR_LANES + lane;
    size_t at = (size_t)row * blocks; /* of the first row; the others' are multiples of `blocks` behind */
    vec_t acc[MAX_ROWS];
    for (uint32_t r = 0; r < n; r++) acc[r] = vec_set1(0.0f);
    for (uint32_t g = 0; g < l->groups; g++, group += FD_LINEAR_LANES) {
        const vec_t scale = vec_load_fp16(l->scales + group);
        const vec_t min = vec_fma(scale, vec_set1(offset), l->mins ? vec_load_fp16(l->mins + group) : vec_zero());
        for (uint32_t b = 0; b < l->group_blocks; b++, at++) {
            ivec_t dot[MAX_ROWS];
            for (uint32_t r = 0; r < n; r++) dot[r] = ivec_set1(0);
            for (uint32_t pass = 0; pass < l->passes; pass++) {
                if (pass)
                    for (uint32_t r = 0; r < n; r++) dot[r] = ivec_shift(dot[r], FD_LINEAR_LOW_BITS);
                dot_block(dot, w, coded ? l->table : NULL, rows->x + (at * l->passes + pass) * FD_LINEAR_BLOCK, stride,
                          n, bits, coded);
            }
            w += FD_LINEAR_LANES * FD_LINEAR_BLOCK * bits / 8;
            for (uint32_t r = 0; r < n; r++) {
                const size_t i = at + (size_t)r * blocks;
                acc[r] = vec_fma(vec_from_ints(dot[r]), vec_mul(scale, vec_set1(rows->scales[i])), acc[r]);
                if (sums) acc[r] = vec_fma(min, vec_set1(rows->sums[i]), acc[r]);
            }
        }
    }
    const uint32_t outs = l->outs <= first ? 0 : l->outs - first < LANES ? l->outs - first : LANES;
    const vec_t unit = vec_load(l->units + first), bias = l->bias ? vec_load(l->bias + first) : vec_set1(0.0f);
    for (uint32_t r = 0; r < n; r++) {
        float out[LANES];
        vec_store(out, vec_fma(acc[r], unit, bias));
        memcpy(y + (size_t)(row + r) * l->outs + first, out, outs * sizeof *out);
    }
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n)                                                                                \
        for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane += LANES) {                                               \
            if (l->bits == 8) some_rows(l, tile, lane, rows, row, y, n, 8, 0);                                         \
            else if (l->table) some_rows(l, tile, lane, rows, row, y, n, 4, 1);                                        \
            else some_rows(l, tile, lane, rows, row, y, n, 4, 0);                                                      \
        }

static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t rows_n, float *y) {
    uint32_t row = 0;
    if (MAX_ROWS > 4) FD_SOME_ROWS(MAX_ROWS)
    FD_SOME_ROWS(4)
    FD_SOME_ROWS(2)
    FD_SOME_ROWS(1)
}

#endif
