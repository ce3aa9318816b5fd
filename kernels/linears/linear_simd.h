/* fd_linear_ops_t.tile for any vector width. An ISA's file defines the following names and then includes this header,
 * within its target pragma:
 *
 *   LANES, MAX_ROWS   outputs of a vector; the most rows whose sums fit into registers, 4 or more
 *   vec_t, ivec_t     LANES fp32 numbers; LANES 32-bit integers
 *   vec_*, ivec_*     their operations
 *   dot_start         what a block's sums of LANES outputs start from
 *   dot_block         adds the products of a block's numbers with one pass over n rows of inputs to dot [n]
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

/* The tile's vectors of outputs. */
enum { VECS = FD_LINEAR_LANES / LANES };

/* `vecs` vectors of the tile's outputs, from output `lane` on, of `n` rows from `row` on; `n`, `vecs` and `kind` are
 * constants where this is inlined. */
FD_INLINE void some_rows(const fd_linear_t *l, uint32_t tile, uint32_t lane, const fd_linear_rows_t *rows, uint32_t row,
                         float *y, ahead_t ahead, const uint32_t n, const uint32_t vecs, const kind_t kind) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES + lane;
    const uint32_t block_bytes = FD_LINEAR_LANES * FD_LINEAR_BLOCK * (kind == BYTES || kind == ROTATED ? 8 : 4) / 8;
    const uint32_t passes = kind == ROTATED ? 1 : l->passes;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l) + lane * 4;
    const uint8_t *next = w + fd_linear_tile_bytes(l) + ahead.first * LINE;
    /* These point to the first row. Each further row stands a row's size behind the one before it. */
    const size_t stride = (size_t)blocks * passes * FD_LINEAR_BLOCK;
    const int8_t *x = rows->x + row * stride;
    const float *scales = rows->scales + (size_t)row * blocks, *sums = rows->sums + (size_t)row * blocks;
    const int32_t *starts = rows->starts + (size_t)row * blocks;
    size_t block = (size_t)tile * blocks * FD_LINEAR_LANES + lane;
    const uint16_t *group_scales = l->scales + (size_t)tile * l->groups * FD_LINEAR_LANES + lane;
    const uint16_t *group_mins = l->mins ? l->mins + (size_t)tile * l->groups * FD_LINEAR_LANES + lane : NULL;
    uint32_t of_group = l->group_blocks; /* how many of its blocks are not summed */
    vec_t acc[VECS][MAX_ROWS];
    for (uint32_t v = 0; v < vecs; v++)
        for (uint32_t r = 0; r < n; r++) acc[v][r] = vec_zero();
    for (uint32_t b = 0; b < blocks; b++) {
        for (uint32_t i = 0; i < ahead.lines; i++) __builtin_prefetch(next + i * LINE, 0, 2);
        FD_UNROLL
        for (uint32_t v = 0; v < vecs; v++) {
            const uint8_t *words = w + v * LANES * 4;
            ivec_t dot[MAX_ROWS];
            for (uint32_t r = 0; r < n; r++) dot[r] = dot_start(l, starts[(size_t)r * blocks], block + v * LANES, kind);
            if (passes == 2) {
                ivec_t high[MAX_ROWS];
                for (uint32_t r = 0; r < n; r++) high[r] = ivec_set1(0);
                dot_block(high, words, l->table, x, stride, n, kind);
                for (uint32_t r = 0; r < n; r++) dot[r] = ivec_add(dot[r], ivec_shift(high[r], FD_LINEAR_LOW_BITS));
            }
            dot_block(dot, words, l->table, x + (passes - 1) * FD_LINEAR_BLOCK, stride, n, kind);
            const vec_t scale = vec_load_fp16(group_scales + v * LANES);
            for (uint32_t r = 0; r < n; r++) {
                const vec_t row_scale = vec_set1(scales[(size_t)r * blocks]);
                acc[v][r] = vec_fma(vec_from_ints(dot[r]), vec_mul(scale, row_scale), acc[v][r]);
            }
            if (kind != ROTATED && group_mins) {
                const vec_t min = vec_load_fp16(group_mins + v * LANES);
                for (uint32_t r = 0; r < n; r++)
                    acc[v][r] = vec_fma(min, vec_set1(sums[(size_t)r * blocks]), acc[v][r]);
            }
        }
        w += block_bytes, next += block_bytes, x += (size_t)passes * FD_LINEAR_BLOCK;
        scales++, sums++, starts++, block += FD_LINEAR_LANES;
        if (--of_group == 0) {
            of_group = l->group_blocks;
            group_scales += FD_LINEAR_LANES;
            if (kind != ROTATED && group_mins) group_mins += FD_LINEAR_LANES;
        }
    }
    for (uint32_t v = 0; v < vecs; v++) {
        const uint32_t at = first + v * LANES, outs = l->outs <= at ? 0 : l->outs - at < LANES ? l->outs - at : LANES;
        const vec_t unit = vec_load(l->units + at), bias = l->bias ? vec_load(l->bias + at) : vec_zero();
        for (uint32_t r = 0; r < n; r++) {
            float sums_of_row[LANES];
            vec_store(sums_of_row, vec_fma(acc[v][r], unit, bias));
            memcpy(y + (size_t)(row + r) * rows->stride + at, sums_of_row, outs * sizeof *sums_of_row);
        }
    }
}

FD_INLINE void all_lanes(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t row, float *y,
                         ahead_t ahead, const uint32_t n, const kind_t kind) {
    /* Few rows read weights from memory, line by line, and their sums fit into the registers with all of a line. */
    const uint32_t vecs = n <= 2 ? VECS : 1;
    for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane += vecs * LANES)
        some_rows(l, tile, lane, rows, row, y, ahead, n, vecs, kind);
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n, ahead.first += ahead.lines) {                                                  \
        if (l->rotated && l->bits == 8) all_lanes(l, tile, rows, row, y, ahead, n, ROTATED);                           \
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
