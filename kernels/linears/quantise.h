/* Rounds a matrix of floats to numbers of 4 or 8 bits, with a scale, and with 4 bits a minimum, for each group of
 * FD_LINEAR_BLOCK inputs of each row: what linear.h multiplies. A weight becomes scale * (number - zero) + min, with
 * the zero 128 for 8 bits and none for 4.
 *
 * 8 bits are symmetric about zero. With 4 bits, scale and minimum start from shares of the group's range and are fitted
 * to the rounded numbers by least squares, and those with the smallest squared error are kept.
 *
 * With a factor, errors are compensated (GPTQ, Frantar et al., arXiv 2210.17323, algorithm 1). Columns are rounded one
 * after another, and the error of a rounded column is spread over the columns after it. The factor is the upper
 * Cholesky factor of the inverse of the inputs' second moments.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"

enum { FD_QUANTISE_MOST_COLUMNS = 128 }; /* that a factor may have */

typedef struct {
    const void *x;  /* [rows][stride], of which the first `columns` of each row are rounded */
    uint32_t dtype; /* fd_act_dtype_t */
    size_t rows, columns, stride;
    uint32_t bits; /* 4 or 8 */
    bool hadamard; /* multiply each group by H / FD_LINEAR_BLOCK first (linear.h); columns are whole groups */
    bool levels;   /* 4 bits: round to 0, 3, 5 .. 29, 32 and store their codes; otherwise to 0 .. 15 */
    uint8_t *q;    /* [rows][q_stride], one number a byte */
    size_t q_stride;
    float *scales, *mins; /* [rows][scales_stride]; mins NULL with 8 bits */
    size_t scales_stride;
    /* Compensation, with 4 bits and at most FD_QUANTISE_MOST_COLUMNS columns in whole groups; factor NULL: none. */
    const float *factor;   /* [columns][columns] */
    float *errors;         /* [rows][columns] out: of each number, divided by the factor's diagonal */
    const int64_t *groups; /* where a group's results go: its place in a row of q, scales and mins */
} fd_quantise_t;

/* Rounds the matrix in up to `threads` threads. A group with an infinity or NaN gets a scale or minimum that is not
 * finite. */
void fd_quantise(const fd_quantise_t *o, fd_isa_t isa, unsigned threads);
