/* Attention of a prompt's rows to the K and V of the prompt, on the S-node's CPU. Rows are in an activation dtype;
 * scores are computed in fp32, or from products of bf16 pairs where the ISA has them.
 *
 * K and V are packed first, in blocks of FD_PROMPT_KEYS tokens of one KV head, as the products read them; a prompt of
 * several chunks keeps its blocks until its last chunk. Row i stands at position pos + i and attends to the keys at
 * positions up to its own, to the last `window` of them and to the keys of its own segment of `segment` positions (0:
 * no such limit). Blocks are attended to one after another, by online softmax (Milakov and Gimelshein, arXiv
 * 1805.02867), so a row's result depends neither on the other rows nor on how the prompt is cut into chunks.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "region/region.h"

enum { FD_PROMPT_KEYS = 64 };

/* The blocks of a prompt, in the layout of one ISA and activation dtype. Block b of KV head h begins h * head_words +
 * b * fd_prompt_ops_t.block_words(k_size, v_size) words behind `words`. */
typedef struct {
    uint32_t *words;
    size_t head_words, kv_heads, k_size, v_size;
} fd_prompt_blocks_t;

/* K and V of tokens at positions from `pos` on: k [kv_heads][n][k_size] and v [kv_heads][n][v_size]; strides count
 * elements. */
typedef struct {
    const fd_prompt_blocks_t *blocks;
    const void *k, *v;
    size_t pos, n, k_head, k_row, v_head, v_row;
} fd_prompt_pack_t;

/* A row of q is [kv_heads][group][k_size], a row of out [kv_heads][group][v_size]; rows stand strides apart, counted in
 * elements. The tokens at all positions up to the last row's are packed. */
typedef struct {
    const fd_prompt_blocks_t *blocks;
    const void *q;
    void *out;
    const float *sinks; /* [kv_heads][group]: a score more for each row of a head, which weighs no V; NULL: none */
    size_t q_row, out_row, rows, pos, group, window, segment;
    float scale; /* of scores, positive */
} fd_prompt_t;

/* One ISA's functions for one activation dtype. */
typedef struct {
    const char *isa;
    size_t (*block_words)(size_t k_size, size_t v_size);
    /* Packs the tokens of one KV head that belong to one block. */
    void (*pack)(const fd_prompt_pack_t *o, size_t head, size_t block);
    /* The attention of `n` rows from `row` on to one KV head. FD_INTERNAL if there is no memory for it. */
    fd_status_t (*attend)(const fd_prompt_t *o, size_t head, size_t row, size_t n);
} fd_prompt_ops_t;

/* The functions of an ISA that this machine supports; NULL if it has none for the dtype. */
const fd_prompt_ops_t *fd_prompt_ops(fd_isa_t isa, uint32_t act_dtype);

/* Packs tokens of all heads, in up to `threads` threads. The positions before `pos` were packed before. */
void fd_prompt_pack(const fd_prompt_ops_t *ops, const fd_prompt_pack_t *o, unsigned threads);

/* Computes all rows of all heads in up to `threads` threads. FD_INTERNAL if memory runs out. */
fd_status_t fd_prompt_attend(const fd_prompt_ops_t *ops, const fd_prompt_t *o, unsigned threads);
