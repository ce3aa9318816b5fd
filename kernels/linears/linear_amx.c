/* AMX (Intel SDM vol. 1, ch. 18): tiles multiply blocks of 16 rows with a tile's 16 outputs, which is how the tile is
 * stored: a chunk is a row of the right operand. AVX-512 scales and sums what the blocks give. Few rows are multiplied
 * by VNNI, whose results are the same in every bit.
 *
 * While AMX is in use, a Xeon 6 computes 512-bit products, fmas and conversions on one port in place of two, and this
 * port limits the speed. Integers below 2^22 become floats on another port: an integer is added to the bits of
 * 1.5 * 2^23, around which floats have steps of 1, and 1.5 * 2^23 is subtracted from the float that these bits are.
 */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni,amx-tile,amx-int8")

#include "cpu/amx_tiles.h"
#include "linear_vnni512.h"

enum { TILE_ROWS = FD_AMX_ROWS };
enum { FEWEST_ROWS = 9 };      /* that AMX multiplies sooner than VNNI */
enum { MOST_BLOCKS = 32 };     /* whose numbers stay in the L1 cache while all rows are multiplied with them */
#define STEPS_OF_1 12582912.0f /* 1.5 * 2^23 */
/* Tile registers, as macros because gcc's intrinsics paste the number into an instruction. There are two of each kind,
 * which take turns. */
#define DOTS0 0
#define DOTS1 1
#define INPUTS0 2
#define INPUTS1 3
#define NUMBERS0 4
#define NUMBERS1 5

#ifdef __clang__
#define FD_UNROLL_ROWS _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL_ROWS _Pragma("GCC unroll 16") /* so that the sums stay in registers */
#endif

/* A block of a tile as it is multiplied. */
typedef struct {
    uint8_t numbers[FD_LINEAR_CHUNKS][LINE]; /* with one pass, signed and less the zero */
    float scales[FD_LINEAR_LANES], mins[FD_LINEAR_LANES];
} block_t;

/* The product of all rows with a tile. */
typedef struct {
    const fd_linear_t *l;
    uint32_t tile, n; /* n: rows */
    const fd_linear_rows_t *rows;
    float *y;
    /* The next block that is not unpacked: its numbers, its scales and mins, and how many blocks have the same ones. */
    const uint8_t *packed;
    size_t scales;
    uint32_t of_group;
    uint32_t first, some; /* the blocks that are multiplied with all rows now */
    block_t blocks[MOST_BLOCKS] __attribute__((aligned(LINE)));
    int32_t dots[2][TILE_ROWS][FD_LINEAR_LANES] __attribute__((aligned(LINE)));
} product_t;

FD_INLINE uint32_t block_bytes(const fd_linear_t *l) { return FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8; }

FD_INLINE void unpack_block(product_t *p, block_t *to) {
    const fd_linear_t *l = p->l;
    const uint8_t *w = p->packed;
    const ivec_t zero = _mm512_set1_epi8((char)(l->passes == 1 ? l->zero : 0));
    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
        ivec_t even, odd;
        if (l->bits == 8) even = ivec_load(w + c * LINE), odd = ivec_load(w + (c + 1) * LINE);
        else unpack_chunks(w + c * LINE / 2, l->table, l->table ? CODES : NIBBLES, &even, &odd);
        _mm512_store_si512(to->numbers[c], _mm512_sub_epi8(even, zero));
        _mm512_store_si512(to->numbers[c + 1], _mm512_sub_epi8(odd, zero));
    }
    vec_store(to->scales, vec_load_fp16(l->scales + p->scales));
    if (l->mins) vec_store(to->mins, vec_load_fp16(l->mins + p->scales));
    p->packed += block_bytes(l);
    if (--p->of_group) return;
    p->of_group = l->group_blocks;
    p->scales += FD_LINEAR_LANES;
}

/* What TILE_ROWS rows were rounded to in a block. */
typedef struct {
    const float *scales, *sums;
    const int32_t *starts;
} row_block_t;

/* Adds the dots of a block to the sums of TILE_ROWS rows. `passes` and `mins` are constants where this is inlined. */
FD_INLINE void add_dots(vec_t *acc, const int32_t *dots, const block_t *block, row_block_t rows, const uint32_t passes,
                        const bool mins) {
    const vec_t scale = vec_load(block->scales);
    FD_UNROLL_ROWS
    for (size_t r = 0; r < TILE_ROWS; r++) {
        const ivec_t dot = _mm512_load_si512(dots + r * FD_LINEAR_LANES);
        vec_t product;
        if (passes == 2) {
            const ivec_t low = _mm512_load_si512(dots + (TILE_ROWS + r) * FD_LINEAR_LANES);
            const ivec_t high = ivec_shift(dot, FD_LINEAR_LOW_BITS);
            product = vec_from_ints(ivec_add(ivec_add(low, ivec_set1(rows.starts[r])), high));
        } else if (!mins && r % 3 == 0) product = vec_from_ints(dot); /* so that both ports have as much to do */
        else product = vec_sub(vec_add_int(vec_set1(STEPS_OF_1), vec_bits(dot)), vec_set1(STEPS_OF_1));
        acc[r] = vec_fma(product, vec_mul(scale, vec_set1(rows.scales[r])), acc[r]);
    }
    if (!mins) return;
    const vec_t min = vec_load(block->mins);
    FD_UNROLL_ROWS
    for (size_t r = 0; r < TILE_ROWS; r++) acc[r] = vec_fma(min, vec_set1(rows.sums[r]), acc[r]);
}

/* A step is a pass over a block. It stores what the step before the last gave, multiplies what that one loaded, and
 * loads what the step after the next multiplies. */
#define FD_STEP(DOTS, INPUTS, NUMBERS, stores, pass, block)                                                            \
    if (stores) _tile_stored(DOTS, p->dots[DOTS], LINE);                                                               \
    _tile_zero(DOTS);                                                                                                  \
    if (passes == 1) _tile_dpbssd(DOTS, INPUTS, NUMBERS);                                                              \
    else _tile_dpbsud(DOTS, INPUTS, NUMBERS);                                                                          \
    if ((block) < end) {                                                                                               \
        _tile_loadd(INPUTS, x + pass * STEP, FD_LINEAR_BLOCK);                                                         \
        _tile_loadd(NUMBERS, (block)->numbers, LINE);                                                                  \
    }

/* Adds the products of the blocks, with rows from block `at` of rows on, to the sums of TILE_ROWS rows. Each block
 * prefetches `lines` lines from `next` on. The first rows unpack the blocks. */
FD_INLINE void add_blocks(vec_t *acc, product_t *p, size_t at, bool unpacks, const uint8_t *next, size_t lines,
                          const uint32_t passes, const bool mins) {
    enum { STEP = TILE_ROWS * FD_LINEAR_BLOCK };
    const size_t two = 2 / passes; /* steps, in blocks */
    block_t *block = p->blocks, *const end = block + p->some;
    const int8_t *x = p->rows->x + at * passes * STEP;
    const int32_t *dots = p->dots[0][0];
    row_block_t rows = {p->rows->scales + at * TILE_ROWS, p->rows->sums + at * TILE_ROWS,
                        p->rows->starts + at * TILE_ROWS};
    for (; block < end + 2 * two; block += two, x += 2 * STEP) {
        __asm__("" : "+r"(dots)); /* so that gcc addresses all rows from one register */
        const block_t *const done = block - 2 * two;
        const bool stores = done >= p->blocks;
        for (size_t i = 0; i < two * lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        for (size_t i = 0; unpacks && i < two && block + i < end; i++) unpack_block(p, block + i);
        FD_STEP(DOTS0, INPUTS0, NUMBERS0, stores, 0, block)
        if (stores && passes == 1) {
            add_dots(acc, dots, done, rows, passes, mins);
            rows.scales += TILE_ROWS, rows.sums += TILE_ROWS;
        }
        FD_STEP(DOTS1, INPUTS1, NUMBERS1, stores, 1, block + two - 1)
        if (!stores || done + two - 1 >= end) continue;
        add_dots(acc, passes == 1 ? dots + TILE_ROWS * FD_LINEAR_LANES : dots, done + two - 1, rows, passes, mins);
        rows.scales += TILE_ROWS, rows.sums += TILE_ROWS, rows.starts += TILE_ROWS;
    }
}

/* Multiplies the blocks with TILE_ROWS rows from `row` on, whose outputs gather in y until they have all blocks. */
FD_INLINE void sixteen_rows(product_t *p, uint32_t row, const uint8_t *next, uint32_t lines, const uint32_t passes,
                            const bool mins) {
    const fd_linear_t *l = p->l;
    const uint32_t out = p->tile * FD_LINEAR_LANES, blocks = fd_linear_blocks(l), left = p->n - row;
    const __mmask16 outs = l->outs - out < FD_LINEAR_LANES ? (__mmask16)((1u << (l->outs - out)) - 1) : 0xffff;
    const size_t stride = p->rows->stride;
    float *y = p->y + row * stride + out;
    vec_t acc[TILE_ROWS], unit = vec_set1(1), bias = vec_zero();
    FD_UNROLL_ROWS
    for (uint32_t r = 0; r < TILE_ROWS; r++)
        acc[r] = p->first && r < left ? _mm512_maskz_loadu_ps(outs, y + r * stride) : vec_zero();
    add_blocks(acc, p, (size_t)row / TILE_ROWS * blocks + p->first, !row, next, lines, passes, mins);
    if (p->first + p->some == blocks) {
        unit = vec_load(l->units + out);
        if (l->bias) bias = vec_load(l->bias + out);
    }
    FD_UNROLL_ROWS
    for (uint32_t r = 0; r < TILE_ROWS; r++)
        if (r < left) _mm512_mask_storeu_ps(y + r * stride, outs, vec_fma(acc[r], unit, bias));
}

static uint32_t rows_beside(const fd_linear_t *l, uint32_t n) {
    const int32_t most = l->bits == 8 ? UINT8_MAX : FD_LINEAR_MOST_IN_TABLE;
    const bool is_signed = l->zero <= -INT8_MIN && most - l->zero <= INT8_MAX;
    return n >= FEWEST_ROWS && (l->passes == 2 || is_signed) ? TILE_ROWS : 1;
}

static void tile_rows_amx(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y) {
    if (rows->beside == 1) {
        tile_rows(l, tile, rows, n, y);
        return;
    }
    const uint32_t blocks = fd_linear_blocks(l), groups = (n + TILE_ROWS - 1) / TILE_ROWS;
    const uint32_t block_lines = block_bytes(l) / LINE, lines = (block_lines + groups - 1) / groups;
    fd_amx_config_t config = {.palette = 1};
    for (int i = DOTS0; i <= NUMBERS1; i++) {
        config.rows[i] = i < NUMBERS0 ? TILE_ROWS : FD_LINEAR_CHUNKS;
        config.row_bytes[i] = i == INPUTS0 || i == INPUTS1 ? FD_LINEAR_BLOCK : FD_AMX_ROW_BYTES;
    }
    fd_amx_configure(&config);
    product_t p;
    p.l = l, p.tile = tile, p.rows = rows, p.n = n, p.y = y;
    p.packed = l->weights + tile * fd_linear_tile_bytes(l);
    p.scales = (size_t)tile * l->groups * FD_LINEAR_LANES, p.of_group = l->group_blocks;
    for (p.first = 0; p.first < blocks; p.first += p.some) {
        p.some = blocks - p.first < MOST_BLOCKS ? blocks - p.first : MOST_BLOCKS;
        const uint8_t *next = p.packed + (size_t)p.some * block_bytes(l);
        uint32_t ahead = lines; /* until all lines of the next blocks are prefetched */
        for (uint32_t row = 0, done = 0; row < n;
             row += TILE_ROWS, done += lines, next += (size_t)p.some * lines * LINE) {
            if (done >= block_lines) ahead = 0;
            if (l->passes == 2 && l->mins) sixteen_rows(&p, row, next, ahead, 2, true);
            else if (l->passes == 2) sixteen_rows(&p, row, next, ahead, 2, false);
            else if (l->mins) sixteen_rows(&p, row, next, ahead, 1, true);
            else sixteen_rows(&p, row, next, ahead, 1, false);
        }
    }
    _tile_release();
}

const fd_linear_ops_t fd_linear_ops_amx = {"amx", 0, FEWEST_WIDE, round_row, tile_rows_amx, rows_beside};

FD_END_TARGET
#endif
