/* Rows for a linear, of those that a product has: one linear of a block, or those of some experts. */
#pragma once

#include <stddef.h>

typedef struct {
    const void *linear; /* fd_linear_t or fd_dense16_t */
    const void *x;      /* [rows][ins] */
    void *y;            /* [rows], each of outs numbers or more */
    size_t rows;
} fd_linear_task_t;
