/* Products of each head's rows with a matrix of that head, as latent attention has them. */
#pragma once

#include "product.h"

typedef struct {
    size_t heads, ins, outs;
    const fd_product_t *products; /* [heads], alike in their function and sizes */
} fd_head_products_t;

/* y [heads][rows][outs] = x [heads][rows][ins] W^T by heads; a number has `number_bytes` bytes. FD_INTERNAL if memory
 * runs out. */
fd_status_t fd_head_products(const fd_head_products_t *p, const void *x, void *y, size_t rows, size_t number_bytes,
                             unsigned threads);
