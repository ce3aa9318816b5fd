/* The kinds of matrices that have code of their own in the kernels. */
#pragma once

#include "linear.h"

typedef enum {
    NIBBLES,  /* 4 bits, the numbers themselves */
    CODES,    /* 4 bits, with a table */
    BYTES,    /* 8 bits */
    HADAMARD, /* 8 bits, transformed; transformed matrices of 4 bits are NIBBLES or CODES */
    /* One vector of a tile's outputs, unpacked for many rows: a chunk has LANES outputs. */
    UNPACKED, /* 4 bits, in bytes */
    WIDE      /* 4 or 8 bits, in 16 bits, for wide rows (fd_linear_rows_t); 128 is subtracted from 8 bits */
} kind_t;
