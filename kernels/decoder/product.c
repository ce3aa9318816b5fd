#include "product.h"

fd_status_t fd_products_multiply(const fd_products_t *p, const void *x, void *y, size_t rows, size_t number_bytes,
                                 unsigned threads) {
    const size_t stride = fd_products_outs(p);
    size_t first = 0;
    fd_status_t status = FD_OK;
    for (const fd_product_t *part = p->parts; part < p->parts + p->n && status == FD_OK; first += part++->outs) {
        const fd_linear_task_t task = {part->linear, x, (uint8_t *)y + first * number_bytes, rows};
        status = part->multiply(part->ops, &task, 1, stride, threads);
    }
    return status;
}
