/* Trained sparse attention, beside the index scores (fd_attend_t.index_scores): which tokens have the largest scores,
 * and a copy of their K that kernels can attend to. */
#pragma once

#include "attention.h"

/* Writes the indexes of the k largest of n scores, k <= n, in ascending order. Of equal scores at the border the first
 * ones are taken. NaN counts as larger than infinity, or with its sign bit set as smaller than -infinity. */
FD_EXPORT void fd_select_top(const float *scores, uint32_t n, uint32_t k, uint32_t *which);

/* Copies K of `n` tokens to the consecutive chunks at `to`, one token after another. Token i is number tokens[i] %
 * FD_PAGE_TOKENS of chunks[i]. All chunks have K alone, whose first elements are V (fd_kv_chunk_bytes). */
FD_EXPORT void fd_gather_k(fd_kv_dtype_t dtype, uint32_t head_size, const uint8_t *const *chunks,
                           const uint32_t *tokens, uint32_t n, uint8_t *to);
