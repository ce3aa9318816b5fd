/* The products of a block's rows with its linears. */
#pragma once

#include <stdint.h>

#include "cpu/linear_task.h"
#include "cpu/parallel.h"
#include "region/region.h"

/* A product y = x W^T + b; x is [rows][ins] and y [rows][outs], in the activation dtype. */
typedef struct {
    size_t ins, outs;
    /* Computes n tasks, the rows of whose y stand `stride` numbers apart, in up to `threads` threads. Their linears
     * have the same function and sizes. FD_INTERNAL if memory runs out. */
    fd_status_t (*multiply)(const void *ops, const fd_linear_task_t *tasks, size_t n, size_t stride, unsigned threads);
    const void *ops, *linear;
} fd_product_t;

/* Products of the same rows, whose outputs stand side by side. */
enum { FD_MOST_PARTS = 4 };
typedef struct {
    fd_product_t parts[FD_MOST_PARTS];
    uint32_t n;
} fd_products_t;

/* The products of x [rows][ins], side by side in y; a number has `number_bytes` bytes. FD_INTERNAL if memory runs out.
 */
fd_status_t fd_products_multiply(const fd_products_t *p, const void *x, void *y, size_t rows, size_t number_bytes,
                                 unsigned threads);

/* Numbers of an output row. */
static inline size_t fd_products_outs(const fd_products_t *p) {
    size_t outs = 0;
    for (uint32_t i = 0; i < p->n; i++) outs += p->parts[i].outs;
    return outs;
}
