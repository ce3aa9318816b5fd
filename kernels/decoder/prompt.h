/* Attention of a prompt's rows to the K and V of the prompt, on the S-node's CPU. Rows are in an activation dtype;
 * scores are computed in fp32, or from products of bf16 pairs where the ISA has them.
 *
 * Row i stands at position pos + i and attends to the keys at positions up to its own, to the last `window` of them and
 * to those of its own segment of `segment` positions (0: no such limit). Keys are taken in blocks that begin at
 * multiples of a constant, by online softmax (Milakov and Gimelshein, arXiv 1805.02867), so a row's result depends
 * neither on the other rows nor on how the prompt is cut into chunks.
 */
#ifndef FD_PROMPT_H
#define FD_PROMPT_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"

/* A row of q is [kv_heads][group][k_size], a row of out [kv_heads][group][v_size]. k [kv_heads][pos + rows][k_size] and
 * v [kv_heads][pos + rows][v_size] are best contiguous for a head, so that they are read as one stream. Strides count
 * elements. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    const float *sinks; /* [kv_heads][group]: a score more for each row of a head, which weighs no V; NULL: none */
    size_t q_row, k_head, k_row, v_head, v_row, out_row; /* strides */
    size_t rows, pos, kv_heads, group, k_size, v_size, window, segment;
    float scale; /* of scores, positive */
} fd_prompt_t;

/* One ISA's function for one activation dtype: the attention of `n` rows from `row` on to one KV head. Returns 0, or
 * -1 if there is no memory for it. */
typedef int fd_prompt_fn(const fd_prompt_t *o, size_t head, size_t row, size_t n);

/* The function of an ISA that this machine supports, and its name; NULL if the ISA has none. */
fd_prompt_fn *fd_prompt_fn_of(fd_isa_t isa, uint32_t act_dtype, const char **name);

/* Computes all rows of all heads in up to `threads` threads. Returns 0, or -1 if memory ran out. */
int fd_prompt_attend(fd_prompt_fn *attend, const fd_prompt_t *o, unsigned threads);

#endif
