#include "head_products.h"

enum { MOST_TASKS = 64 }; /* of a call */

fd_status_t fd_head_products(const fd_head_products_t *p, const void *x, void *y, size_t rows, size_t number_bytes,
                             unsigned threads) {
    const size_t from = rows * p->ins * number_bytes, to = rows * p->outs * number_bytes;
    fd_linear_task_t tasks[MOST_TASKS];
    for (size_t first = 0, n; rows && first < p->heads; first += n) {
        n = fd_min(p->heads - first, MOST_TASKS);
        for (size_t i = 0; i < n; i++) {
            const size_t head = first + i;
            tasks[i] = (fd_linear_task_t){p->products[head].linear, (const uint8_t *)x + head * from,
                                          (uint8_t *)y + head * to, rows};
        }
        const fd_product_t *one = &p->products[first];
        if (one->multiply(one->ops, tasks, n, p->outs, threads) != FD_OK) return FD_INTERNAL;
    }
    return FD_OK;
}
