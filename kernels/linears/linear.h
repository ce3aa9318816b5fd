/* Products of a few rows with a quantised matrix: y = x W^T + b, where W has 4 or 8 bits a number and a scale for each
 * group of inputs. The S-Part's rows are few while it decodes, so memory limits them: the weights are read as they are
 * stored.
 *
 * A weight is unit[o] * (scale[o][g] * (q - zero) + min[o][g]): q is the stored number, o the output, g the input's
 * group. Activations are rounded to whole multiples of a scale for each block of FD_LINEAR_BLOCK inputs of each row, so
 * that a row's result does not depend on the other rows; sums within a block are exact integers, sums over blocks fp32.
 * A 4-bit matrix may have a table: then q is the table's number at the stored code. MXFP4 has one, because its numbers
 * have an exponent each.
 *
 * With one pass the multiples have 8 bits. With two they have 15, as a high part and a low one of 7 bits, and the
 * products of both parts with the weights are computed.
 *
 * The blocks of a transformed matrix were multiplied by a Hadamard matrix H / FD_LINEAR_BLOCK before they were rounded,
 * and the kernels multiply the blocks of the activations by H. H H is FD_LINEAR_BLOCK times the identity, so the
 * product stays the same; but one large activation is spread over its block and makes the others less coarse. It then
 * takes 7 bits to be as exact as 8 without (AVX2). It also spreads a block's large weights, which matters with 4 bits.
 * Transformed matrices have one pass; with 8 bits the zero is 128 and there are no mins.
 *
 * AVX2 multiplies unsigned numbers with signed ones and adds their products in 16 bits. It stores a transformed matrix
 * of 8 bits as signed numbers q - 128, multiplies them with multiples from 0 to 128, 64 more than they are, and takes
 * the matrix's sums, 64 times, off the result. The 16 bits hold the products of 4 inputs, because among the numbers of
 * inputs 8i, 8i + 1, 8i + 4 and 8i + 5, and of the 4 others of these 8, the positive ones sum to at most
 * FD_LINEAR_MOST_OF_FOUR, and so do the negative ones; quantise() chooses the scales for that.
 *
 * Layout: outputs stand in tiles of FD_LINEAR_LANES, and a tile's blocks follow one another. A block has 8 chunks of 4
 * inputs; a chunk has 64 numbers, number 4 * lane + input, one a byte (8 bits). With 4 bits, a byte's low half belongs
 * to an even chunk and its high half to the odd chunk after it. scales and mins are fp16, [tile][group][lane].
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/isa.h"
#include "cpu/linear_task.h"
#include "region/region.h"

enum { FD_LINEAR_LANES = 16, FD_LINEAR_BLOCK = 32, FD_LINEAR_CHUNKS = 8, FD_LINEAR_LOW_BITS = 7 };
enum { FD_LINEAR_CODES = 16, FD_LINEAR_MOST_IN_TABLE = 32 };
enum { FD_LINEAR_MOST_UNPACKED = 1 << 14 }; /* inputs */
enum { FD_LINEAR_SIGNED_SHIFT = 6, FD_LINEAR_SIGNED_STEPS = 1 << FD_LINEAR_SIGNED_SHIFT };
enum { FD_LINEAR_MOST_OF_FOUR = INT16_MAX / (2 * FD_LINEAR_SIGNED_STEPS) };

typedef struct {
    uint32_t outs, ins; /* the layout pads them to whole tiles and groups; padded numbers are multiplied by zero */
    uint32_t bits;      /* 4 or 8 */
    uint32_t passes;    /* over the activations, 1 or 2 */
    uint32_t hadamard;
    uint32_t group_blocks, groups;
    int32_t zero;
    const uint8_t *weights;
    const uint8_t *table; /* [FD_LINEAR_CODES], none above FD_LINEAR_MOST_IN_TABLE; NULL: codes are the numbers */
    const uint16_t *scales, *mins; /* mins may be NULL: all zero */
    const float *units;            /* [tile][lane] */
    const int16_t *negated_sums;   /* [tile][block][lane] of a matrix of signed numbers, otherwise NULL */
    const float *bias;             /* [tile][lane], or NULL */
} fd_linear_t;

static inline uint32_t fd_linear_tiles(const fd_linear_t *l) {
    return (l->outs + FD_LINEAR_LANES - 1) / FD_LINEAR_LANES;
}
static inline uint32_t fd_linear_blocks(const fd_linear_t *l) { return l->groups * l->group_blocks; }
static inline size_t fd_linear_tile_bytes(const fd_linear_t *l) {
    return (size_t)fd_linear_blocks(l) * FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8;
}

/* Whether a vector of a tile's outputs may be unpacked for many rows. */
static inline bool fd_linear_unpacks(const fd_linear_t *l) {
    return fd_linear_blocks(l) * FD_LINEAR_BLOCK <= FD_LINEAR_MOST_UNPACKED;
}

/* Rows of rounded activations, in groups of `beside`. */
typedef struct {
    int8_t *x;       /* [groups][blocks][passes][beside][FD_LINEAR_BLOCK], from -127 to 127; the high part first. For a
                        matrix of signed numbers unsigned, from 0 to 128 */
    float *scales;   /* [groups][blocks][beside] */
    float *sums;     /* [groups][blocks][beside], of the multiples, times the scale */
    int32_t *starts; /* [groups][blocks][beside], the sum of the multiples times the ISA's dot_offset */
    uint32_t wide;   /* two passes are one over the multiples themselves, int16 in place of their two parts */
    uint32_t beside; /* rows whose blocks stand side by side */
    uint32_t stride; /* outputs from one row of y to the next, outs or more */
} fd_linear_rows_t;

/* The four rounded inputs of a chunk as one integer, which a vector repeats for all of its outputs. */
static inline int32_t fd_linear_inputs(const int8_t *x) {
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return inputs;
}

/* One ISA's kernels. */
typedef struct {
    const char *isa;
    uint32_t wants_signed; /* of transformed matrices of 8 bits, signed numbers */
    uint32_t fewest_wide;  /* the fewest rows that are worth fd_linear_rows_t.wide; 0: never */
    /* Rounds the row x [ins] into row `row` of `out`. A block with an infinity or NaN gets the scale NaN. */
    void (*round_row)(const fd_linear_t *l, const float *x, uint32_t row, const fd_linear_rows_t *out);
    /* Writes the tile's outputs of all rows to the first outs of y [rows][stride]. */
    void (*tile)(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y);
    /* fd_linear_rows_t.beside of n rows; NULL: 1. A group that is not full has scales and sums 0 behind its rows. */
    uint32_t (*beside)(const fd_linear_t *l, uint32_t n);
} fd_linear_ops_t;

extern const fd_linear_ops_t fd_linear_ops_scalar, fd_linear_ops_avx2, fd_linear_ops_avxvnni, fd_linear_ops_avx512vnni,
    fd_linear_ops_amx;

/* The kernels for an ISA that this machine supports. */
const fd_linear_ops_t *fd_linear_ops(fd_isa_t isa);

/* The products of n tasks, x fp32 -> the first outs of y, whose rows stand `stride` numbers apart, in up to `threads`
 * threads. All linears have as many outputs. FD_INTERNAL if memory runs out. */
fd_status_t fd_linear_run(const fd_linear_ops_t *ops, const fd_linear_task_t *tasks, size_t n, uint32_t stride,
                          uint32_t threads);

/* The weights of one output: row [ins]. */
void fd_linear_row(const fd_linear_t *l, uint32_t out, float *row);
