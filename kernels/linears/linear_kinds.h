/* The kinds of matrices that have code of their own in the kernels. */
#pragma once

#include "linear.h"

typedef enum {
    NIBBLES, /* 4 bits, the numbers themselves */
    CODES,   /* 4 bits, with a table */
    BYTES,   /* 8 bits */
    HADAMARD /* 8 bits, transformed; transformed matrices of 4 bits are NIBBLES or CODES */
} kind_t;
