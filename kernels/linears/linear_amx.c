/* AMX (Intel SDM vol. 1, ch. 18): tdpbsud multiplies a block of 16 rows with a tile's 16 outputs, which is how the tile
 * is stored: a chunk is a row of the right operand. AVX-512 scales and sums what the blocks give. Rows beyond a
 * multiple of 16 are multiplied by VNNI, whose results are the same in every bit. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni,amx-tile,amx-int8")

#include "cpu/amx_tiles.h"
#include "linear_vnni512.h"

enum { TILE_ROWS = FD_AMX_ROWS };
enum { LAG = 2, BUFFERS = LAG + 1 }; /* blocks between a product and its sums; products that are kept */
/* Tile registers, as macros because gcc's intrinsics paste the number into an instruction. */
#define DOTS 0
#define INPUTS 1
#define NUMBERS 2

#ifdef __clang__
#define FD_UNROLL_ROWS _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL_ROWS _Pragma("GCC unroll 16") /* so that the sums stay in registers */
#endif

typedef int32_t dots_t[TILE_ROWS][FD_LINEAR_LANES] __attribute__((aligned(64)));

/* dots [row][lane] = the products of a block. */
FD_INLINE void multiply(const int8_t *x, size_t stride, dots_t dots) {
    _tile_loadd(INPUTS, x, stride);
    _tile_zero(DOTS);
    _tile_dpbsud(DOTS, INPUTS, NUMBERS);
    _tile_stored(DOTS, dots, sizeof dots[0]);
}

/* The tile's outputs of TILE_ROWS rows from `row` on. `passes` and `kind` are constants where this is inlined. */
FD_INLINE void sixteen_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t row, float *y,
                            ahead_t ahead, const uint32_t passes, const kind_t kind) {
    const uint32_t blocks = fd_linear_blocks(l);
    const uint32_t block_bytes = FD_LINEAR_LANES * FD_LINEAR_BLOCK * (kind == BYTES ? 8 : 4) / 8;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l);
    const size_t stride = (size_t)blocks * passes * FD_LINEAR_BLOCK;
    const size_t first = (size_t)row * blocks;
    const float *scales = rows->scales + first, *sums = rows->sums + first;
    const int32_t *starts = rows->starts + first;
    size_t group = (size_t)tile * l->groups * FD_LINEAR_LANES;
    uint32_t of_group = l->group_blocks; /* how many of its blocks are not summed */
    uint8_t numbers[FD_LINEAR_CHUNKS][64] __attribute__((aligned(64)));
    dots_t dots[BUFFERS][2]; /* of the last blocks, of each pass */
    vec_t acc[TILE_ROWS];
    FD_UNROLL_ROWS
    for (uint32_t r = 0; r < TILE_ROWS; r++) acc[r] = vec_zero();
    /* The tiles multiply a block while the vectors sum what an earlier block gave. */
    for (uint32_t b = 0; b < blocks + LAG; b++) {
        if (b < blocks) {
            const uint8_t *block = w + (size_t)b * block_bytes;
            for (uint32_t i = 0; i < ahead.lines; i++)
                __builtin_prefetch(block + fd_linear_tile_bytes(l) + (ahead.first + i) * LINE, 0, 2);
            if (kind != BYTES)
                for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
                    ivec_t even, odd;
                    unpack_chunks(block + c * 32, l->table, kind, &even, &odd);
                    _mm512_store_si512(numbers[c], even);
                    _mm512_store_si512(numbers[c + 1], odd);
                }
            _tile_loadd(NUMBERS, kind == BYTES ? block : numbers[0], sizeof numbers[0]);
            for (uint32_t pass = 0; pass < passes; pass++)
                multiply(rows->x + ((first + b) * passes + pass) * FD_LINEAR_BLOCK, stride, dots[b % BUFFERS][pass]);
        }
        if (b < LAG) continue;
        const vec_t scale = vec_load_fp16(l->scales + group);
        const dots_t *ready = dots[(b - LAG) % BUFFERS];
        FD_UNROLL_ROWS
        for (size_t r = 0; r < TILE_ROWS; r++) {
            ivec_t dot = ivec_add(_mm512_load_si512(ready[passes - 1][r]), ivec_set1(starts[r * blocks]));
            if (passes == 2) dot = ivec_add(dot, ivec_shift(_mm512_load_si512(ready[0][r]), FD_LINEAR_LOW_BITS));
            acc[r] = vec_fma(vec_from_ints(dot), vec_mul(scale, vec_set1(scales[r * blocks])), acc[r]);
        }
        if (l->mins) {
            const vec_t min = vec_load_fp16(l->mins + group);
            FD_UNROLL_ROWS
            for (size_t r = 0; r < TILE_ROWS; r++) acc[r] = vec_fma(min, vec_set1(sums[r * blocks]), acc[r]);
        }
        starts++, scales++, sums++;
        if (--of_group == 0) {
            of_group = l->group_blocks;
            group += FD_LINEAR_LANES;
        }
    }
    const uint32_t out = tile * FD_LINEAR_LANES;
    const vec_t unit = vec_load(l->units + out), bias = l->bias ? vec_load(l->bias + out) : vec_zero();
    const __mmask16 outs = l->outs - out < FD_LINEAR_LANES ? (__mmask16)((1u << (l->outs - out)) - 1) : 0xffff;
    FD_UNROLL_ROWS
    for (uint32_t r = 0; r < TILE_ROWS; r++)
        _mm512_mask_storeu_ps(y + (size_t)(row + r) * rows->stride + out, outs, vec_fma(acc[r], unit, bias));
}

static void tile_rows_amx(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y) {
    const uint32_t lines = FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8 / LINE;
    const uint32_t in_tiles = n / TILE_ROWS * TILE_ROWS;
    if (in_tiles) {
        fd_amx_config_t config = {.palette = 1};
        config.rows[DOTS] = config.rows[INPUTS] = TILE_ROWS;
        config.row_bytes[DOTS] = FD_LINEAR_LANES * 4;
        config.row_bytes[INPUTS] = FD_LINEAR_BLOCK;
        config.rows[NUMBERS] = FD_LINEAR_CHUNKS;
        config.row_bytes[NUMBERS] = 64;
        _tile_loadconfig(&config);
        ahead_t ahead = {0, (lines * TILE_ROWS + in_tiles - 1) / in_tiles};
        for (uint32_t row = 0; row < in_tiles; row += TILE_ROWS, ahead.first += ahead.lines) {
            if (l->passes == 2) {
                if (l->bits == 8) sixteen_rows(l, tile, rows, row, y, ahead, 2, BYTES);
                else if (l->table) sixteen_rows(l, tile, rows, row, y, ahead, 2, CODES);
                else sixteen_rows(l, tile, rows, row, y, ahead, 2, NIBBLES);
            } else if (l->bits == 8) sixteen_rows(l, tile, rows, row, y, ahead, 1, BYTES);
            else if (l->table) sixteen_rows(l, tile, rows, row, y, ahead, 1, CODES);
            else sixteen_rows(l, tile, rows, row, y, ahead, 1, NIBBLES);
        }
        _tile_release();
    }
    tile_rows_from(l, tile, rows, in_tiles, n, y);
}

const fd_linear_ops_t fd_linear_ops_amx = {"amx", 0, round_row, tile_rows_amx};

FD_END_TARGET
#endif
