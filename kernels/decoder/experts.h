/* A mixture of experts on a CPU (Shazeer et al., arXiv 1701.06538): what a layer has in place of its MLP, behind its
 * router.
 *
 * A token's experts are small: their products take microseconds. So each kind of product is one loop of the threads
 * over all experts that have rows.
 */
#pragma once

#include "product.h"
#include "row_ops.h"

typedef struct {
    fd_products_t up, down; /* inputs and outputs: hidden, 2 * inner; inner, hidden */
} fd_expert_t;

typedef struct {
    const fd_row_ops_t *ops;
    uint32_t act_dtype;
    size_t n, used; /* experts, and how many of them each row has */
    size_t hidden, inner;
    bool gelu; /* as in fd_gate_rows_t */
    float alpha, limit;
    const fd_expert_t *experts; /* alike in the sizes and the number of their products */
} fd_experts_t;

/* The rows of a step, in the activation dtype. */
typedef struct {
    const void *x;         /* [rows][hidden] */
    void *out;             /* [rows][hidden]: the sum of each row's experts, in the order of `chosen` */
    const int64_t *chosen; /* [rows][used]: the experts of a row */
    const float *shares;   /* [rows][used]: by which their outputs are multiplied */
    int64_t *load;         /* [n]: the rows of each expert are added */
    size_t rows;
} fd_expert_rows_t;

/* A row's result does not depend on the other rows. FD_INTERNAL if memory runs out. */
fd_status_t fd_experts_run(const fd_experts_t *e, const fd_expert_rows_t *r, unsigned threads);
