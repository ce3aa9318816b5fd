/* Attention over KV pages: the interface between the R-engine and the kernels. It knows neither links nor sequences.
 *
 * A page holds FD_PAGE_TOKENS tokens of one sequence. A page has n_kv_heads chunks for each layer. A chunk holds K and
 * V of one KV head, with their quantisation scales, in the layout of chunk.h; it is fd_kv_chunk_bytes() long and
 * 64-byte aligned. Only append and attend know the layout. The layout does not depend on the ISA: every ISA reads the
 * chunks that any other ISA has written.
 *
 * The kernels compute attention by online softmax (Milakov & Gimelshein, arXiv 1805.02867). They can return
 * un-normalised partial results (m, l, acc), so that the R-engine can cut a long sequence into pieces and merge the
 * results by log-sum-exp:
 *
 *   m = max_j s_j,   l = sum_j exp(s_j - m),   acc = sum_j exp(s_j - m) V_j,   O = acc / l
 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "region/formats.h"

/* The size of a chunk in bytes: K, V and scales; a multiple of 64. Sizes of heads count elements. `v_in_k`: V is the
 * first v_size elements of K, as in latent attention, and the chunk has K alone. */
FD_EXPORT size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t v_size, bool v_in_k);

/* Prefetches the cache lines that append writes for token t. */
void fd_kv_prefetch_append(fd_kv_dtype_t dtype, const uint8_t *chunk, uint32_t head_size, uint32_t v_size, bool v_in_k,
                           uint32_t t);

/* The Hadamard transforms (cpu/hadamard.h) that the caller applies in place of the kernels. FD_HADAMARD_QK: Q and K
 * arrive transformed. FD_HADAMARD_VO: V arrives transformed, and the caller transforms O back. The number goes over the
 * wire, as `rotated`; formats without transforms ignore it. */
enum { FD_HADAMARD_QK = 1, FD_HADAMARD_VO = 2, FD_HADAMARD_ALL = 3 };

/* The most query rows whose softmax state a kernel holds at once. */
#define FD_PANEL_ROWS 64u

/* The work of one attend(): a block of query tokens of one sequence, over `heads` neighbouring KV heads and consecutive
 * pages. `heads` may exceed 1 only if heads * q_len * group <= FD_PANEL_ROWS.
 *
 * Memory beyond the causal limit in the last chunk is uninitialised. A kernel may load it, but nothing there (NaN and
 * infinity included) may reach the result. The OS fills fresh pages with zeros; reused pages hold old data.
 *
 * bench/attention_kernels.py lists the same fields. */
typedef struct {
    /* chunks[i] is the first head's chunk for positions first_token + [i * 128, (i + 1) * 128). */
    const uint8_t *const *chunks;
    uint32_t n_chunks;
    uint32_t heads;
    size_t head_stride;   /* bytes from one head's chunk to the next head's chunk in a page */
    uint32_t first_token; /* position of the first token of chunks[0], a multiple of FD_PAGE_TOKENS */
    uint32_t head_size;   /* of Q and K: a multiple of 8, 8..FD_MAX_HEAD_SIZE */
    uint32_t v_size;      /* of V and O: likewise */
    uint32_t v_in_k;      /* 1: V is the first v_size elements of K (fd_kv_chunk_bytes) */
    uint32_t group;       /* query heads that share one KV head */
    uint32_t q_len;       /* query tokens in the block, >= 1 */
    uint32_t q_pos;       /* position of the first query token; query token j sees positions <= q_pos + j */
    uint32_t window;      /* 0: no window; else query token j sees only positions > q_pos + j - window */
    /* 0, or the length of the segments that positions are cut into from 0 on; then a query token sees only positions of
     * its own segment (chunked attention of Llama 4). */
    uint32_t segment;
    float softmax_scale;
    float softcap; /* 0, or a score s becomes softcap * tanh(s / softcap) (Gemma 2) */
    /* NULL, or [heads][group]: slope * (position of the token - position of the query token) is added to a score
     * (ALiBi, arXiv 2108.12409). */
    const float *slopes;
    /* NULL, or [heads][group]: one more score for each row, whose V is 0 (attention sinks of gpt-oss). It only enters O
     * rows; a caller that merges partial results adds it to the merged l (fd_add_sink). */
    const float *sinks;
    uint32_t hadamard;     /* FD_HADAMARD_QK, FD_HADAMARD_VO */
    uint32_t act_dtype;    /* fd_act_dtype_t of q and o */
    const uint8_t *q;      /* [group][head_size] for each head and query token, at the strides below */
    size_t q_head_stride;  /* bytes from one head's query rows to the next head's */
    size_t q_token_stride; /* bytes from one token's query rows to the next token's */
    /* If not NULL, the kernel writes [group][v_size] of acc / l for each head and query token here, rounded to
     * act_dtype, and uses acc as scratch memory. m and l are written in any case: m + log(l) is a row's log-sum-exp,
     * sink excluded. */
    uint8_t *o;
    size_t o_head_stride, o_token_stride; /* the same for o */
    float *acc;                           /* out, [heads][q_len][group][v_size], un-normalised */
    float *m; /* out, [heads][q_len][group]; -INFINITY for a row that sees no token of the chunks */
    float *l; /* out, [heads][q_len][group]; 0 for a row that sees no token of the chunks */
    /* The chunk that the caller reads next, or NULL; the kernel prefetches it while it reads the last chunk. */
    const uint8_t *prefetch_next;
    /* If not NULL, the kernel calls this for each head before it reads that head's last chunk. The caller appends the
     * new token there: by then the chunk has been prefetched, and an append, which touches every line of K, takes a
     * fraction of the time. */
    void (*before_last_chunk)(void *context, uint32_t head);
    void *context; /* the first argument of before_last_chunk */
    /* If not NULL, the kernel does not attend. It writes the index scores of all tokens of the chunks: the sum over the
     * query heads h of index_weights[h] * max(0, softmax_scale * q[h] . k). There is one KV head, whose chunks have K
     * alone, and one query token; the fields from `q_pos` to `segment` and those from `softcap` to `sinks` and from `o`
     * on are not read, and v_size is head_size. */
    float *index_scores;        /* [n_chunks][FD_PAGE_TOKENS] */
    const float *index_weights; /* [group] */
} fd_attend_t;

typedef struct {
    const char *isa;
    /* Rounds or quantises k [head_size] and v [v_size] and writes them to a chunk as token t (0..127). `v` is NULL if V
     * is a part of K (fd_kv_chunk_bytes). `hadamard` is that of fd_attend_t. */
    void (*append)(uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t, const float *k, const float *v,
                   uint32_t hadamard);
    void (*attend)(const fd_attend_t *a);
} fd_kv_ops_t;

/* The operations that do not depend on the KV format, for one ISA. */
typedef struct {
    /* dst[i] = scale * src[i] for any n; the elements of src are of act_dtype (fd_act_dtype_t). */
    void (*load_act)(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale);
    /* Merges the partial results (m2, l2, acc2) of `rows` query rows into (m, l, acc) by log-sum-exp. Rows with
     * l2 == 0 add nothing. */
    void (*merge)(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
                  uint32_t v_size);
    /* o[r] = acc[r] / l[r] for any v_size, rounded to nearest even in act_dtype; 0 where l[r] is 0. */
    void (*finish)(void *o, const float *acc, const float *l, uint32_t rows, uint32_t v_size, uint32_t act_dtype);
} fd_vec_ops_t;

/* The sum of weights `l`, relative to the largest score `m`, of a row that has a sink. acc does not change, because the
 * sink's V is 0. A row that sees no token keeps l = 0, so that its output is 0. */
static inline float fd_add_sink(float l, float m, float sink) { return l == 0.0f ? l : l + expf(sink - m); }

/* Never NULL for a valid dtype and a supported ISA. */
FD_EXPORT const fd_kv_ops_t *fd_kv_ops(fd_kv_dtype_t dtype, fd_isa_t isa);
FD_EXPORT const fd_vec_ops_t *fd_vec_ops(fd_isa_t isa);
