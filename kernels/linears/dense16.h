/* Products of rows with a matrix of 16-bit numbers: y = x W^T + b.
 *
 * fp32 rows: the numbers are widened in registers, so that a step of few rows reads half the bytes of an fp32 matrix.
 * Numbers are exact in fp32, so the result is that of the fp32 matrix but for the order of the sums. bf16 rows: CPUs
 * with products of bf16 pairs multiply the numbers as they are, sum in fp32 and round each output to bf16. A row's
 * result does not depend on the other rows.
 *
 * Layout: outputs stand in panels. A panel consists of tiles of ops->lanes outputs and ops->step inputs, [step /
 * per_word][lanes][per_word]: first the tiles of all its outputs with the first inputs, then those with the next
 * inputs. Numbers are zero where outputs or inputs end.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "cpu/linear_task.h"
#include "region/formats.h"
#include "region/region.h"

typedef struct {
    size_t outs, ins;
    const uint16_t *weights; /* packed */
    const float *bias;       /* [outs], or NULL */
} fd_dense16_t;

enum {
    FD_DENSE16_TILE = 6, /* rows whose sums are in registers at the same time */
    /* The most rows of a part of the work. Their sums fit into a cache, and threads can share products with few panels,
     * too. */
    FD_DENSE16_ROWS = 16 * FD_DENSE16_TILE,
};

/* One ISA's functions for weights and rows of some dtypes. */
typedef struct {
    const char *isa;
    size_t panel, lanes; /* outputs of a panel and of a tile */
    size_t per_word;     /* inputs of an output that stand side by side; `ins` is a multiple of them */
    size_t step;         /* inputs of a tile */
    size_t number_bytes; /* of an input or an output */
    /* y [rows][outs] for the outputs of one panel; x is [rows][ins], of at most FD_DENSE16_ROWS rows. */
    void (*multiply)(const fd_dense16_t *l, const void *x, size_t rows, void *y, size_t panel);
    /* If not NULL, all outputs of any rows, in up to `threads` threads. */
    fd_status_t (*multiply_all)(const fd_dense16_t *l, const void *x, size_t rows, void *y, unsigned threads);
} fd_dense16_ops_t;

/* The functions of an ISA that this machine supports, for fp16 or bf16 weights (`dtype`) and fp32 or bf16 rows (`act`),
 * both fd_act_dtype_t; NULL if it has none. */
const fd_dense16_ops_t *fd_dense16_ops(fd_isa_t isa, uint32_t dtype, uint32_t act);

/* Bytes of packed weights. */
size_t fd_dense16_packed_bytes(const fd_dense16_ops_t *ops, size_t outs, size_t ins);

/* Copies weights [outs][ins] into panels, in up to `threads` threads. */
void fd_dense16_pack(const fd_dense16_ops_t *ops, size_t outs, size_t ins, const uint16_t *from, uint16_t *to,
                     unsigned threads);

/* The products of n tasks in up to `threads` threads. All linears have the same sizes, and nothing stands between the
 * rows of y. FD_INTERNAL if memory runs out. */
fd_status_t fd_dense16_multiply(const fd_dense16_ops_t *ops, const fd_linear_task_t *tasks, size_t n, unsigned threads);
