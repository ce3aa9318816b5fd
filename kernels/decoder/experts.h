/* A mixture of experts on a CPU (Shazeer et al., arXiv 1701.06538): what a layer has in place of its MLP.
 *
 * A token's experts are small: their products take microseconds. So each kind of product is one loop of the threads
 * over all experts that have rows.
 */
#pragma once

#include "product.h"
#include "router.h"
#include "row_ops.h"

typedef struct {
    fd_products_t up, down; /* inputs and outputs: hidden, 2 * inner; inner, hidden */
} fd_expert_t;

typedef struct {
    const fd_row_ops_t *ops;
    uint32_t act_dtype;
    size_t hidden, inner;
    bool gelu; /* as in fd_gate_rows_t */
    float alpha, limit;
    fd_router_t router;
    const fd_expert_t *experts; /* [router.n], alike in the sizes and the number of their products */
    int64_t *load;              /* [router.n]: the rows of each expert are added */
} fd_experts_t;

/* The rows of a step, in the activation dtype. */
typedef struct {
    const void *x;        /* [rows][hidden] */
    const void *router_x; /* [rows][hidden]: they choose the experts */
    void *out;            /* [rows][hidden]: the sum of each row's experts by their shares; may be x or router_x */
    size_t rows;
} fd_expert_rows_t;

/* Bytes of scratch, at any address, that fd_experts_run needs for `rows` rows. */
size_t fd_experts_scratch(const fd_experts_t *e, size_t rows);

/* Computes the experts' outputs. A row's result does not depend on the other rows. FD_INTERNAL if memory runs out. */
fd_status_t fd_experts_run(const fd_experts_t *e, const fd_expert_rows_t *r, void *scratch, unsigned threads);
