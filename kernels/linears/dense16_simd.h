/* fd_dense16_ops_t of an ISA, written with its vec_* primitives. The including file defines TILE_VECTORS, with which a
 * tile of TILE_ROWS rows by TILE_VECTORS vectors of sums fits into the registers, and FD_BF16_PAIRS where rows are bf16
 * and the ISA has products of bf16 pairs.
 */
#pragma once

#include <string.h>

#include "cpu/compiler.h"
#include "dense16.h"
#include "cpu/half.h"

enum { TILE_ROWS = FD_DENSE16_TILE, PANEL = TILE_VECTORS * LANES };

/* A processor prefetches too little by itself while it multiplies. A single tile of rows prefetches its weights AHEAD
 * bytes early. Several tiles read the same block of a panel, of at most DEPTH inputs, which stays in a cache. Meanwhile
 * each prefetches its share of the next block, so that memory is read as long as anything is multiplied. */
enum { AHEAD = 4096 };
#ifdef FD_BF16_PAIRS
typedef uint16_t in_t;
enum { PER_WORD = 2, DEPTH = 512 };

FD_INLINE vec_t load_weights(const uint32_t dtype, const uint16_t *p) {
    (void)dtype;
    return vec_load((const float *)p);
}
FD_INLINE vec_t add_product(vec_t sums, vec_t weights, const in_t *x) {
    return vec_add_pairs(sums, weights, vec_broadcast(x));
}
/* One output row of a panel. */
FD_INLINE void store_outputs(void *y, size_t at, const float *sums, size_t n) {
    uint16_t rounded[PANEL];
    FD_UNROLL
    for (int j = 0; j < TILE_VECTORS; j += 2)
        vec_store((float *)rounded + j / 2 * LANES,
                  vec_round_pairs(vec_load(sums + j * LANES), vec_load(sums + (j + 1) * LANES)));
    memcpy((uint16_t *)y + at, rounded, n * sizeof *rounded);
}
#else
typedef float in_t;
enum { PER_WORD = 1, DEPTH = 256 };

FD_INLINE vec_t load_weights(const uint32_t dtype, const uint16_t *p) {
    return dtype == FD_ACT_FP16 ? vec_load_fp16(p) : vec_load_bf16(p);
}
FD_INLINE vec_t add_product(vec_t sums, vec_t weights, const in_t *x) {
    return vec_fma(vec_broadcast(x), weights, sums);
}
FD_INLINE void store_outputs(void *y, size_t at, const float *sums, size_t n) {
    memcpy((float *)y + at, sums, n * sizeof *sums);
}
#endif

/* Bytes of a cache line, and of a panel's weights for a word of inputs. */
enum { LINE = 64, WORD_BYTES = PER_WORD * PANEL * sizeof(uint16_t) };

/* What a tile of rows prefetches, from `at` on: `lines` cache lines before each `words` words of inputs. */
typedef struct {
    const uint8_t *at;
    size_t words, lines;
} ahead_t;

/* What the first of `tiles` tiles prefetches while it reads a block of `depth` inputs. */
FD_INLINE ahead_t ahead_of(const uint16_t *weights, size_t depth, size_t tiles) {
    enum { FEW = WORD_BYTES < LINE ? LINE / WORD_BYTES : 1, WORDS = 8 };
    if (tiles == 1) return (ahead_t){(const uint8_t *)weights + AHEAD, FEW, FEW * WORD_BYTES / LINE};
    return (ahead_t){(const uint8_t *)(weights + depth * PANEL), WORDS,
                     (WORDS * WORD_BYTES / LINE + tiles - 1) / tiles};
}

/* sums [rows][PANEL] += x [rows][depth] times the weights of `depth` inputs. */
FD_INLINE void add_products(const uint32_t dtype, const int rows, const in_t *x, size_t x_stride,
                            const uint16_t *weights, size_t depth, ahead_t ahead, float *sums) {
    vec_t s[TILE_ROWS][TILE_VECTORS];
    FD_UNROLL
    for (int r = 0; r < rows; r++) {
        FD_UNROLL
        for (int j = 0; j < TILE_VECTORS; j++) s[r][j] = vec_load(sums + r * PANEL + j * LANES);
    }
    for (size_t i = 0, end; i < depth;) {
        for (size_t k = 0; k < ahead.lines; k++, ahead.at += LINE) __builtin_prefetch(ahead.at, 0, 2);
        for (end = depth - i < ahead.words * PER_WORD ? depth : i + ahead.words * PER_WORD; i < end; i += PER_WORD) {
            vec_t w[TILE_VECTORS];
            FD_UNROLL
            for (int j = 0; j < TILE_VECTORS; j++) w[j] = load_weights(dtype, weights + j * PER_WORD * LANES);
            FD_UNROLL
            for (int r = 0; r < rows; r++) {
                FD_UNROLL
                for (int j = 0; j < TILE_VECTORS; j++)
                    s[r][j] = add_product(s[r][j], w[j], x + (size_t)r * x_stride + i);
            }
            weights += PER_WORD * PANEL;
        }
    }
    FD_UNROLL
    for (int r = 0; r < rows; r++) {
        FD_UNROLL
        for (int j = 0; j < TILE_VECTORS; j++) vec_store(sums + r * PANEL + j * LANES, s[r][j]);
    }
}

FD_INLINE void add_tile(const uint32_t dtype, size_t rows, const in_t *x, size_t x_stride, const uint16_t *weights,
                        size_t depth, ahead_t ahead, float *sums) {
    switch (rows) {
    case 1: add_products(dtype, 1, x, x_stride, weights, depth, ahead, sums); return;
    case 2: add_products(dtype, 2, x, x_stride, weights, depth, ahead, sums); return;
    case 3: add_products(dtype, 3, x, x_stride, weights, depth, ahead, sums); return;
    case 4: add_products(dtype, 4, x, x_stride, weights, depth, ahead, sums); return;
    case 5: add_products(dtype, 5, x, x_stride, weights, depth, ahead, sums); return;
    default: add_products(dtype, 6, x, x_stride, weights, depth, ahead, sums); return;
    }
}

FD_INLINE void multiply(const uint32_t dtype, const fd_dense16_t *l, const void *rows_in, size_t rows, void *y,
                        size_t panel) {
    const in_t *x = rows_in;
    const size_t column = panel * PANEL, n = l->outs - column < PANEL ? l->outs - column : PANEL;
    float sums[FD_DENSE16_ROWS * PANEL], bias[PANEL] = {0};
    if (l->bias) memcpy(bias, l->bias + column, n * sizeof *bias);
    for (size_t r = 0; r < rows; r++) memcpy(sums + r * PANEL, bias, sizeof bias);
    const size_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, tile = (rows + tiles - 1) / tiles;
    const size_t blocks = tiles > 1 ? (l->ins + DEPTH - 1) / DEPTH : 1;
    const size_t step = (l->ins / PER_WORD + blocks - 1) / blocks * PER_WORD;
    for (size_t first = 0; first < l->ins; first += step) {
        const size_t depth = l->ins - first < step ? l->ins - first : step;
        const uint16_t *weights = l->weights + (panel * l->ins + first) * PANEL;
        ahead_t ahead = ahead_of(weights, depth, tiles);
        for (size_t r = 0; r < rows; r += tile, ahead.at += depth / PER_WORD / ahead.words * ahead.lines * LINE)
            add_tile(dtype, rows - r < tile ? rows - r : tile, x + r * l->ins + first, l->ins, weights, depth, ahead,
                     sums + r * PANEL);
    }
    for (size_t r = 0; r < rows; r++) store_outputs(y, r * l->outs + column, sums + r * PANEL, n);
}

#ifdef FD_BF16_PAIRS
#define FD_DENSE16(isa)                                                                                                \
    static void multiply_bf16(const fd_dense16_t *l, const void *x, size_t rows, void *y, size_t panel) {              \
        multiply(FD_ACT_BF16, l, x, rows, y, panel);                                                                   \
    }                                                                                                                  \
    const fd_dense16_ops_t fd_dense16_##isa = {#isa,     PANEL,        PANEL,         PER_WORD,                        \
                                               PER_WORD, sizeof(in_t), multiply_bf16, NULL};
#else
#define FD_DENSE16(isa)                                                                                                \
    static void multiply_fp16(const fd_dense16_t *l, const void *x, size_t rows, void *y, size_t panel) {              \
        multiply(FD_ACT_FP16, l, x, rows, y, panel);                                                                   \
    }                                                                                                                  \
    static void multiply_bf16(const fd_dense16_t *l, const void *x, size_t rows, void *y, size_t panel) {              \
        multiply(FD_ACT_BF16, l, x, rows, y, panel);                                                                   \
    }                                                                                                                  \
    const fd_dense16_ops_t fd_dense16_##isa[FD_ACT_DTYPES] = {                                                         \
        [FD_ACT_FP16] = {#isa, PANEL, PANEL, PER_WORD, PER_WORD, sizeof(in_t), multiply_fp16, NULL},                   \
        [FD_ACT_BF16] = {#isa, PANEL, PANEL, PER_WORD, PER_WORD, sizeof(in_t), multiply_bf16, NULL},                   \
    };
#endif
