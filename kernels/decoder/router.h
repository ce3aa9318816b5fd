/* The router of a mixture of experts: it chooses the experts of each row, and their shares in its output. */
#pragma once

#include <stdbool.h>

#include "row_ops.h"

enum { FD_MOST_GROUPS = 64 };

typedef struct {
    const fd_row_ops_t *ops;
    const void *weight, *bias; /* as in fd_router_rows_t */
    const float *correction;   /* [n], or NULL: is added to scores where experts are chosen */
    const float *expert_scale; /* [n], or NULL: multiplies an expert's shares */
    size_t n, used, width;     /* experts; those of each row; the numbers of a row */
    /* If there is more than one group of as many neighbours, at most FD_MOST_GROUPS, the choice is limited to the
     * `used_groups` whose `group_best` largest numbers, at most FD_MOST_GROUPS, have the largest sums. */
    size_t groups, used_groups, group_best;
    float output_scale, least_sum; /* of the products; shares are divided by their sum or by this, unless it is 0 */
    float scale;                   /* of the shares */
    bool single;                   /* as in fd_router_rows_t */
    bool sigmoid;                  /* a score is the sigmoid of its output; else the softmax over all outputs */
} fd_router_t;

/* Numbers of scratch that fd_router_run needs for `rows` rows. */
size_t fd_router_scratch(const fd_router_t *r, size_t rows);

/* Finds the experts of the rows x [rows][width], `chosen` [rows][used], by falling score, and their `shares`
 * [rows][used]. A row's result does not depend on the other rows. A row that is not finite has some experts, too. */
void fd_router_run(const fd_router_t *r, const void *x, size_t rows, float *scratch, uint32_t *chosen, float *shares,
                   unsigned threads);
