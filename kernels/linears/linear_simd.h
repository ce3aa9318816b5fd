/* fd_linear_ops_t.tile for any vector width. An ISA's file defines the following names and then includes this header,
 * within its target pragma:
 *
 *   LANES, MAX_ROWS   outputs of a vector; the most rows whose sums fit into registers, 4 or more
 *   VECS              vectors of a tile that a rotated matrix is multiplied in at once
 *   vec_t, ivec_t     LANES fp32 numbers; LANES 32-bit integers
 *   vec_*, ivec_*     their operations
 *   dot_block         adds the products of a block's numbers with one pass over n rows of inputs to dot [n][vecs]
 *   dot_offset, dot_steps   see round_row.h
 */
#ifndef FD_LINEAR_SIMD_H
#define FD_LINEAR_SIMD_H

#include "linear_kinds.h"
#include "round_row.h"

enum { LINE = 64 /* bytes */ };

/* What a product of some rows fetches meanwhile: of each block of the next tile, `lines` cache lines from `first` on.
 * The processor sees a stream only while the first rows read a tile, which is too short a time to fetch it. */
typedef struct {
    uint32_t first, lines;
} ahead_t;

/* `vecs` vectors of the tile's outputs, from output `lane` on, of `n` rows from `row` on; `n`, `vecs` and `kind` are
 * constants where this is inlined. */
FD_INLINE void some_rows(const fd_linear_t *l, uint32_t tile, uint32_t lane, const fd_linear_rows_t *rows, uint32_t row,
                         float *y, ahead_t ahead, const uint32_t n, const uint32_t vecs, const kind_t kind) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES + lane;
    const uint32_t block_bytes = FD_LINEAR_LANES * FD_LINEAR_BLOCK * (kind == BYTES || kind == ROTATED ? 8 : 4) / 8;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l) + lane * 4;
    const uint8_t *next = w + fd_linear_tile_bytes(l) + ahead.first * LINE;
    const size_t stride = (size_t)blocks * l->passes * FD_LINEAR_BLOCK;
    size_t group = (size_t)tile * l->groups * FD_LINEAR_LANES + lane;
    size_t at = (size_t)row * blocks; /* of the first row; the others' are multiples of `blocks` behind */
    vec_t acc[MAX_ROWS * VECS];
    for (uint32_t i = 0; i < n * vecs; i++) acc[i] = vec_zero();
    for (uint32_t g = 0; g < l->groups; g++, group += FD_LINEAR_LANES) {
        vec_t scale[VECS];
        for (uint32_t v = 0; v < vecs; v++) scale[v] = vec_load_fp16(l->scales + group + v * LANES);
        for (uint32_t b = 0; b < l->group_blocks; b++, at++) {
            for (uint32_t i = 0; i < ahead.lines; i++) __builtin_prefetch(next + i * LINE, 0, 2);
            next += block_bytes;
            ivec_t dot[MAX_ROWS * VECS];
            for (uint32_t i = 0; i < n * vecs; i++) dot[i] = ivec_set1(rows->starts[at + (size_t)(i / vecs) * blocks]);
            const int8_t *x = rows->x + at * l->passes * FD_LINEAR_BLOCK;
            if (kind != ROTATED && l->passes == 2) {
                ivec_t high[MAX_ROWS * VECS];
                for (uint32_t i = 0; i < n * vecs; i++) high[i] = ivec_set1(0);
                dot_block(high, w, l->table, x, stride, n, vecs, kind);
                for (uint32_t i = 0; i < n * vecs; i++)
                    dot[i] = ivec_add(dot[i], ivec_shift(high[i], FD_LINEAR_LOW_BITS));
                x += FD_LINEAR_BLOCK;
            }
            dot_block(dot, w, l->table, x, stride, n, vecs, kind);
            w += block_bytes;
            for (uint32_t r = 0; r < n; r++) {
                const vec_t row_scale = vec_set1(rows->scales[at + (size_t)r * blocks]);
                for (uint32_t v = 0; v < vecs; v++) {
                    const uint32_t i = r * vecs + v;
                    acc[i] = vec_fma(vec_from_ints(dot[i]), vec_mul(scale[v], row_scale), acc[i]);
                }
            }
            if (kind != ROTATED && l->mins)
                for (uint32_t i = 0; i < n * vecs; i++)
                    acc[i] = vec_fma(vec_load_fp16(l->mins + group + i % vecs * LANES),
                                     vec_set1(rows->sums[at + (size_t)(i / vecs) * blocks]), acc[i]);
        }
    }
    for (uint32_t v = 0; v < vecs; v++) {
        const uint32_t out = first + v * LANES;
        const uint32_t outs = l->outs <= out ? 0 : l->outs - out < LANES ? l->outs - out : LANES;
        const vec_t unit = vec_load(l->units + out), bias = l->bias ? vec_load(l->bias + out) : vec_zero();
        for (uint32_t r = 0; r < n; r++) {
            float sums[LANES];
            vec_store(sums, vec_fma(acc[r * vecs + v], unit, bias));
            memcpy(y + (size_t)(row + r) * l->outs + out, sums, outs * sizeof *sums);
        }
    }
}

FD_INLINE void all_lanes(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t row, float *y,
                         ahead_t ahead, const uint32_t n, const kind_t kind) {
    const uint32_t vecs = kind == ROTATED ? VECS : 1;
    for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane += LANES * vecs)
        some_rows(l, tile, lane, rows, row, y, ahead, n, vecs, kind);
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n, ahead.first += ahead.lines) {                                                  \
        if (l->rotated) all_lanes(l, tile, rows, row, y, ahead, n, ROTATED);                                           \
        else if (l->bits == 8) all_lanes(l, tile, rows, row, y, ahead, n, BYTES);                                      \
        else if (l->table) all_lanes(l, tile, rows, row, y, ahead, n, CODES);                                          \
        else all_lanes(l, tile, rows, row, y, ahead, n, NIBBLES);                                                      \
    }

/* The rows from `row` on. */
static void tile_rows_from(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t row,
                           uint32_t rows_n, float *y) {
    const uint32_t lines = FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8 / LINE;
    ahead_t ahead = {0, 0};
    if (rows_n - row >= 2 * MAX_ROWS) ahead.lines = (lines * MAX_ROWS + rows_n - row - 1) / (rows_n - row);
    if (MAX_ROWS > 4) FD_SOME_ROWS(MAX_ROWS)
    FD_SOME_ROWS(4)
    FD_SOME_ROWS(2)
    FD_SOME_ROWS(1)
}

#endif
