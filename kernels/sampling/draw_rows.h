/* Draws the next token of rows of logits on a CPU: mask, bias and penalties, temperature, top-k, top-p, min-p, and the
 * race of spart/sampler/draws.py. A row is read once from memory, and all further work on it stays in a core's
 * cache. A row's token does not depend on the other rows, nor on the number of threads.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "region/region.h"

enum {
    FD_SPAN = 256,      /* tokens of a span, SPAN of draws.py */
    FD_ROW_FINITE = 1,  /* flag of a row: its largest logit is finite, and none is NaN */
    FD_ROW_NOTHING = 2, /* flag of a row: all of its logits are -infinity */
    FD_NO_MASK = -1
};

/* What a row asks for. Its biases are those from bias_start to bias_stop, its penalties those from seen_start to
 * seen_stop. */
typedef struct {
    uint64_t key;      /* the state from which splitmix64 makes the row's random numbers */
    float temperature; /* 0: the likeliest token */
    float top_p;       /* 1 or more: all tokens */
    float min_p;       /* 0: all tokens */
    float repetition;  /* penalised logits are divided by it if they are positive, else multiplied */
    uint32_t top_k;    /* 0: all tokens */
    int32_t mask;      /* index of the row's mask, or FD_NO_MASK */
    uint32_t bias_start, bias_stop, seen_start, seen_stop;
} fd_draw_row_t;

typedef struct {
    const void *logits; /* [rows][vocab], fp32 or bf16 */
    uint32_t dtype;     /* FD_ACT_FP32 or FD_ACT_BF16 */
    size_t vocab;
    const fd_draw_row_t *rows;
    const uint32_t *masks; /* [masks][mask_words]: bit i % 32 of word i / 32 says whether token i is allowed */
    size_t mask_words;
    const int64_t *biased; /* tokens and what is added to their logits */
    const float *bias;
    const int64_t *seen; /* tokens and what is subtracted from their logits, behind the repetition penalty */
    const float *penalty;
    int32_t *tokens, *flags; /* [rows]: results. The token of a row that is not finite means nothing. */
    /* [rows][spans * FD_SPAN]: the weights that tokens are drawn by, the likeliest one's is 1; or NULL */
    float *weights;
} fd_draw_t;

/* The function that is compiled for one ISA, or for the ABI's baseline, "base". */
typedef struct {
    const char *isa;
    /* Draws `n` rows from `row` on. FD_INTERNAL if there is no memory. */
    fd_status_t (*draw)(const fd_draw_t *o, size_t row, size_t n);
} fd_draw_ops_t;

/* The function for an ISA that this machine supports. */
const fd_draw_ops_t *fd_draw_ops(fd_isa_t isa);

/* Draws `rows` rows by as many of `threads` threads as pay. FD_INTERNAL if there is no memory. */
fd_status_t fd_draw_rows(const fd_draw_ops_t *ops, const fd_draw_t *o, size_t rows, unsigned threads);
