/* fd_linear_ops_t.tile for any vector width. An ISA's file defines the following names and then includes this header,
 * within its target:
 *
 *   LANES, MAX_ROWS   outputs of a vector; the most rows whose sums fit into registers, 4 or more
 *   vec_t, ivec_t     LANES fp32 numbers; LANES 32-bit integers
 *   vec_*, ivec_*     their operations
 *   dot_start         what a block's sums of LANES outputs start from
 *   dot_block         adds the products of a block's numbers with one pass over n rows of inputs to dot [n]
 *   dot_offset, dot_steps   see round_row.h
 *   FEWEST_WIDE               fd_linear_ops_t.fewest_wide
 *   FEWEST_UNPACKED           the fewest rows of one pass for which numbers of 4 bits are unpacked; 0: never
 *   widen_chunk               makes a chunk of 16-bit numbers (WIDE)
 */
#pragma once

#include <stdbool.h>

#include "linear_kinds.h"
#include "round_row.h"

enum { LINE = 64 /* bytes */ };

/* What a product of some rows prefetches at each block: `lines` cache lines, `distance` bytes further on. The products
 * of the tile's other rows prefetch `left` more. */
typedef struct {
    size_t distance;
    uint32_t lines, left;
} ahead_t;

/* What a block of one vector of outputs is multiplied with: the rows' numbers, and what became of them in rounding.
 * Each pointer is to the first row's; each further row stands `stride` bytes of numbers, or `blocks` elements, behind.
 */
typedef struct {
    const int8_t *x;
    const float *scales, *sums;
    const int32_t *starts;
    size_t stride, blocks;
} block_rows_t;

/* Adds a block's products of one vector of outputs to acc [n]. Each vector has an array of its own: gcc leaves sums in
 * memory whose place depends on a loop's counter. */
FD_INLINE void one_block(const fd_linear_t *l, vec_t *acc, const uint8_t *words, const uint16_t *scales,
                         const uint16_t *mins, size_t block, const block_rows_t *rows, const uint32_t n,
                         const kind_t kind, const uint32_t passes) {
    ivec_t dot[MAX_ROWS];
    for (uint32_t r = 0; r < n; r++) dot[r] = dot_start(l, rows->starts[r * rows->blocks], block, kind);
    const bool twice = passes == 2 && kind != WIDE;
    if (twice) {
        ivec_t high[MAX_ROWS];
        for (uint32_t r = 0; r < n; r++) high[r] = ivec_set1(0);
        dot_block(high, words, l->table, rows->x, rows->stride, n, kind);
        for (uint32_t r = 0; r < n; r++) dot[r] = ivec_add(dot[r], ivec_shift(high[r], FD_LINEAR_LOW_BITS));
    }
    dot_block(dot, words, l->table, rows->x + (twice ? FD_LINEAR_BLOCK : 0), rows->stride, n, kind);
    const vec_t scale = vec_load_fp16(scales);
    for (uint32_t r = 0; r < n; r++)
        acc[r] = vec_fma(vec_from_ints(dot[r]), vec_mul(scale, vec_set1(rows->scales[r * rows->blocks])), acc[r]);
    if (mins) {
        const vec_t min = vec_load_fp16(mins);
        for (uint32_t r = 0; r < n; r++) acc[r] = vec_fma(min, vec_set1(rows->sums[r * rows->blocks]), acc[r]);
    }
}

/* Writes the sums of the outputs from `at` on of `n` rows from `row` on. */
FD_INLINE void store_rows(const fd_linear_t *l, const vec_t *acc, uint32_t at, uint32_t row, float *y, uint32_t stride,
                          const uint32_t n) {
    const uint32_t outs = l->outs <= at ? 0 : l->outs - at < LANES ? l->outs - at : LANES;
    const vec_t unit = vec_load(l->units + at), bias = l->bias ? vec_load(l->bias + at) : vec_zero();
    for (uint32_t r = 0; r < n; r++) {
        float sums_of_row[LANES];
        vec_store(sums_of_row, vec_fma(acc[r], unit, bias));
        memcpy(y + (size_t)(row + r) * stride + at, sums_of_row, outs * sizeof *sums_of_row);
    }
}

/* The vectors of outputs of a tile. */
enum { VECS = FD_LINEAR_LANES / LANES };

/* How often the activations are passed over, and whether there are minima. */
typedef enum { ONE_PASS, ONE_PASS_MINS, ANY_PASSES } form_t;

/* A tile and its numbers, as they are stored, or those of one vector of its outputs, unpacked. */
typedef struct {
    uint32_t index;
    const uint8_t *numbers;
} tile_t;

/* Bytes of a block of numbers. */
FD_INLINE uint32_t block_bytes_of(const kind_t kind) {
    if (kind == WIDE) return LANES * FD_LINEAR_BLOCK * 2;
    if (kind == UNPACKED) return LANES * FD_LINEAR_BLOCK;
    return FD_LINEAR_LANES * FD_LINEAR_BLOCK / (kind == NIBBLES || kind == CODES ? 2 : 1);
}

/* One vector of a tile's outputs, from output `lane` on, or with `both` two of them, of `n` rows from `row` on; `n`,
 * `both`, `kind` and `form` are constants where this is inlined. */
FD_INLINE void some_rows(const fd_linear_t *l, tile_t tile, uint32_t lane, const fd_linear_rows_t *rows, uint32_t row,
                         float *y, ahead_t ahead, const uint32_t n, const bool both, const kind_t kind,
                         const form_t form) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile.index * FD_LINEAR_LANES + lane;
    const uint32_t block_bytes = block_bytes_of(kind);
    const uint32_t passes = form == ANY_PASSES ? l->passes : 1;
    const bool has_mins = form == ONE_PASS_MINS || (form == ANY_PASSES && l->mins);
    const uint8_t *w = tile.numbers + (kind == UNPACKED || kind == WIDE ? 0 : lane * 4);
    const size_t stride = (size_t)blocks * passes * FD_LINEAR_BLOCK, at = (size_t)row * blocks;
    block_rows_t of = {rows->x + row * stride, rows->scales + at, rows->sums + at, rows->starts + at, stride, blocks};
    size_t block = (size_t)tile.index * blocks * FD_LINEAR_LANES + lane;
    const uint16_t *scales = l->scales + (size_t)tile.index * l->groups * FD_LINEAR_LANES + lane;
    const uint16_t *mins = has_mins ? l->mins + (size_t)tile.index * l->groups * FD_LINEAR_LANES + lane : NULL;
    uint32_t of_group = l->group_blocks; /* how many of its blocks are not summed */
    vec_t acc[MAX_ROWS], other[MAX_ROWS];
    for (uint32_t r = 0; r < n; r++) acc[r] = other[r] = vec_zero();
    for (uint32_t b = 0; b < blocks; b++) {
        /* A loop of constant length is unrolled. */
        if (ahead.lines == block_bytes / LINE)
            for (uint32_t i = 0; i < block_bytes; i += LINE) __builtin_prefetch(w + ahead.distance + i, 0, 2);
        else
            for (uint32_t i = 0; i < ahead.lines; i++) __builtin_prefetch(w + ahead.distance + i * LINE, 0, 2);
        one_block(l, acc, w, scales, has_mins ? mins : NULL, block, &of, n, kind, passes);
        if (both) {
            const uint16_t *other_mins = has_mins ? mins + LANES : NULL;
            one_block(l, other, w + LANES * 4, scales + LANES, other_mins, block + LANES, &of, n, kind, passes);
        }
        w += block_bytes, block += FD_LINEAR_LANES;
        of.x += (size_t)passes * FD_LINEAR_BLOCK, of.scales++, of.sums++, of.starts++;
        if (--of_group == 0) {
            of_group = l->group_blocks;
            scales += FD_LINEAR_LANES;
            if (has_mins) mins += FD_LINEAR_LANES;
        }
    }
    store_rows(l, acc, first, row, y, rows->stride, n);
    if (both) store_rows(l, other, first + LANES, row, y, rows->stride, n);
}

FD_INLINE void all_lanes(const fd_linear_t *l, tile_t tile, const fd_linear_rows_t *rows, uint32_t row, float *y,
                         ahead_t ahead, const uint32_t n, const kind_t kind, const form_t form) {
    /* Few rows read weights from memory, line by line, and their sums fit into the registers with all of a line. If the
     * vectors are computed one after the other, the second finds its lines in the cache, so it prefetches none. */
    const bool both = n <= 2 && VECS == 2;
    for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane += both ? 2 * LANES : LANES, ahead.lines = 0)
        some_rows(l, tile, lane, rows, row, y, ahead, n, both, kind, form);
}

/* The form is a constant for the matrices that are common: a branch in the loop costs the sums their registers. */
FD_INLINE void any_form(const fd_linear_t *l, tile_t tile, const fd_linear_rows_t *rows, uint32_t row, float *y,
                        ahead_t ahead, const uint32_t n, const kind_t kind) {
    if (l->passes != 1) all_lanes(l, tile, rows, row, y, ahead, n, kind, ANY_PASSES);
    else if (l->mins) all_lanes(l, tile, rows, row, y, ahead, n, kind, ONE_PASS_MINS);
    else all_lanes(l, tile, rows, row, y, ahead, n, kind, ONE_PASS);
}

FD_INLINE ahead_t ahead_of_next_rows(ahead_t ahead) {
    const uint32_t lines = ahead.lines < ahead.left ? ahead.lines : ahead.left;
    return (ahead_t){ahead.distance + ahead.lines * LINE, lines, ahead.left - lines};
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n, ahead = ahead_of_next_rows(ahead)) {                                           \
        if (l->hadamard && l->bits == 8) all_lanes(l, packed, rows, row, y, ahead, n, HADAMARD, ONE_PASS);             \
        else if (l->bits == 8) any_form(l, packed, rows, row, y, ahead, n, BYTES);                                     \
        else if (l->table) any_form(l, packed, rows, row, y, ahead, n, CODES);                                         \
        else any_form(l, packed, rows, row, y, ahead, n, NIBBLES);                                                     \
    }

enum { FULL_ROWS = MAX_ROWS > 4 ? MAX_ROWS : 4 };

/* One vector of a tile's outputs, unpacked, of `n` rows. */
FD_INLINE void unpacked_rows(const fd_linear_t *l, tile_t tile, uint32_t lane, const fd_linear_rows_t *rows,
                             uint32_t row, float *y, const uint32_t n, const kind_t kind) {
    const ahead_t none = {0, 0, 0};
    if (l->passes != 1) some_rows(l, tile, lane, rows, row, y, none, n, false, kind, ANY_PASSES);
    else if (l->mins) some_rows(l, tile, lane, rows, row, y, none, n, false, kind, ONE_PASS_MINS);
    else some_rows(l, tile, lane, rows, row, y, none, n, false, kind, ONE_PASS);
}

/* Unpacks the numbers of a vector of a tile's outputs, from output `lane` on. */
FD_INLINE void unpack_lanes(const fd_linear_t *l, const uint8_t *w, uint32_t lane, uint8_t *to, const kind_t kind) {
    const uint32_t pairs = fd_linear_blocks(l) * FD_LINEAR_CHUNKS / 2, chunk = block_bytes_of(kind) / FD_LINEAR_CHUNKS;
    w += lane * 4;
    for (uint32_t pair = 0; pair < pairs; pair++, to += 2 * chunk) {
        ivec_t even, odd;
        if (l->bits == 8) even = ivec_load(w + pair * 2 * LINE), odd = ivec_load(w + (pair * 2 + 1) * LINE);
        else unpack_chunks(w + pair * LINE, l->table, l->table ? CODES : NIBBLES, &even, &odd);
        if (kind == WIDE) {
            widen_chunk(even, l->bits, to);
            widen_chunk(odd, l->bits, to + chunk);
        } else {
            memcpy(to, &even, chunk);
            memcpy(to + chunk, &odd, chunk);
        }
    }
}

/* Multiplies rows with a tile and unpacks each vector of its outputs once for all of them. If the rows are not wide,
 * the last n % FULL_ROWS rows are left to the caller. Returns how many rows are multiplied. */
static __attribute__((noinline)) uint32_t many_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows,
                                                    uint32_t n, float *y) {
    _Alignas(LINE) uint8_t numbers[FD_LINEAR_MOST_UNPACKED * 16]; /* fits into the L2 cache */
    const tile_t unpacked = {tile, numbers};
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l);
    uint32_t row = 0;
    for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane += LANES) {
        row = 0;
        if (!rows->wide) {
            unpack_lanes(l, w, lane, numbers, UNPACKED);
            for (; row + FULL_ROWS <= n; row += FULL_ROWS)
                unpacked_rows(l, unpacked, lane, rows, row, y, FULL_ROWS, UNPACKED);
            continue;
        }
        unpack_lanes(l, w, lane, numbers, WIDE);
        for (; row + FULL_ROWS <= n; row += FULL_ROWS) unpacked_rows(l, unpacked, lane, rows, row, y, FULL_ROWS, WIDE);
        for (; row < n; row++) unpacked_rows(l, unpacked, lane, rows, row, y, 1, WIDE);
    }
    return row;
}

/* fd_linear_ops_t.tile. A processor prefetches too little by itself while it computes. The first of a few rows
 * prefetch the weights that they are about to read; where rows are many, all of them share the next tile's. */
static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t rows_n, float *y) {
    /* In bytes. Both distances are measured ones; only AVX2 has signed numbers. */
    const size_t near = l->negated_sums ? 1024 : 4096;
    const uint32_t lines = FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8 / LINE;
    const tile_t packed = {tile, l->weights + tile * fd_linear_tile_bytes(l)};
    const uint32_t fewest = FEWEST_UNPACKED;
    const bool unpack = fewest && rows_n >= fewest && l->bits == 4 && fd_linear_unpacks(l);
    uint32_t row = unpack || (FEWEST_WIDE > 0 && rows->wide) ? many_rows(l, tile, rows, rows_n, y) : 0;
    ahead_t ahead = {near, lines, 0};
    if (rows_n - row >= 2 * MAX_ROWS) {
        ahead.distance = fd_linear_tile_bytes(l);
        ahead.lines = (lines * MAX_ROWS + rows_n - 1) / rows_n;
        ahead.left = lines - ahead.lines;
    }
    if (MAX_ROWS > 4) FD_SOME_ROWS(MAX_ROWS)
    FD_SOME_ROWS(4)
    FD_SOME_ROWS(2)
    FD_SOME_ROWS(1)
}
