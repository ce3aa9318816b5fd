/* A linear and the rows that it multiplies. A product has one such task for a linear of a block, and a task for each
 * expert that has rows. */
#pragma once

#include <stddef.h>

typedef struct {
    const void *linear; /* fd_linear_t or fd_dense16_t */
    const void *x;      /* [rows][ins] */
    void *y;            /* [rows], each of outs numbers or more */
    size_t rows;
} fd_linear_task_t;
