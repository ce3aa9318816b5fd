/* Attention of all prompts of a step, layer by layer, without Python in between. */
#pragma once

#include "joint.h"
#include "prompt.h"

typedef struct {
    fd_prompt_blocks_t blocks;
    size_t window, segment; /* as in fd_prompt_t */
} fd_prompt_layer_t;

/* Some of a prompt's tokens, at positions from `pos` on. Their rows are the step's rows from `first` on. */
typedef struct {
    size_t first, rows, pos;
    const fd_prompt_layer_t *layers;
} fd_prompt_chunk_t;

typedef struct {
    const fd_prompt_ops_t *ops;
    float scale; /* of scores */
    size_t n, n_layers;
    const fd_prompt_chunk_t *chunks;
} fd_prompt_chunks_t;

/* Packs the chunks' K and V of a layer and computes their O rows, in up to `threads` threads. FD_INTERNAL if memory
 * runs out. */
fd_status_t fd_prompt_chunks_attend(const fd_prompt_chunks_t *c, size_t layer, const fd_joints_t *j,
                                    const fd_joint_rows_t *r, unsigned threads);
