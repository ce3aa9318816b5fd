/* Attention over KV pages: what a kernel is given and what it gives back. Knows nothing of links or sequences.
 *
 * A page holds FD_PAGE_TOKENS tokens of one sequence. Per layer it is n_kv_heads chunks; a chunk is the K and the V of
 * one KV head in the layout its kernels like best, with their scales, fd_kv_chunk_bytes() long, 64-byte aligned. Only
 * append and attend know that layout. It must not depend on the ISA: every ISA reads what any other wrote.
 *
 * Attention is computed by online softmax (Milakov & Gimelshein, arXiv 1805.02867) and leaves un-normalised partial
 * results (m, l, acc) so that a long sequence can be cut and merged by log-sum-exp: m = max_j s_j,   l = sum_j exp(s_j
 * - m),   acc = sum_j exp(s_j - m) V_j,   O = acc / l
 */
#ifndef FD_ATTENTION_H
#define FD_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "formats.h"

typedef enum {
    FD_ISA_SCALAR = 0,
    FD_ISA_AVX2 = 1,
    FD_ISA_AVX512 = 2,
    FD_ISA_AVX512VNNI = 3,
    FD_ISA_AVX512BF16 = 4,
    FD_ISA_AMX = 5,
    FD_ISA_NEON = 6,
    FD_ISAS
} fd_isa_t;

/* Bytes of one (page, KV head) chunk: K, V and scales; a multiple of 64. */
size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size);

/* Asks for the memory that append is going to write for token t. */
void fd_kv_prefetch_append(fd_kv_dtype_t dtype, const uint8_t *chunk, uint32_t head_size, uint32_t t);

/* Query rows that a kernel keeps the state of at once. */
#define FD_PANEL_ROWS 64u

/* One query block of one sequence and `heads` neighbouring KV heads over consecutive pages. More than one head only as
 * long as heads * q_len * group <= FD_PANEL_ROWS. */
typedef struct {
    const uint8_t *const
        *chunks; /* chunks[i] holds tokens first_token + [i*128, (i+1)*128) of the sequence, of the first head */
    uint32_t n_chunks;
    uint32_t heads;
    size_t head_stride;   /* bytes from a head's chunk to the next head's */
    uint32_t first_token; /* position of chunks[0]'s first token, a multiple of FD_PAGE_TOKENS */
    uint32_t head_size;   /* multiple of 8, 8..256 */
    uint32_t group;       /* query heads that share this KV head */
    uint32_t q_len;       /* new tokens in the block, >= 1 */
    uint32_t q_pos;       /* position of the first of them; query row j sees positions <= q_pos + j */
    uint32_t window;      /* 0: all of them; else only positions > q_pos + j - window */
    float softmax_scale;
    uint32_t act_dtype; /* of q and o (fd_act_dtype_t) */
    const uint8_t *q;   /* query rows [group][head_size] of every head and token, as far apart as the strides say */
    size_t q_head_stride,
        q_token_stride;   /* bytes from a head's row to the next head's, from a token's to the next token's */
    uint8_t *o;           /* NULL, or where acc / l goes, rounded, laid out as q; then what follows is scratch */
    float *acc;           /* [heads][q_len][group][head_size] out, un-normalised */
    float *m;             /* [heads][q_len][group] out; -INFINITY where a row sees none of these chunks */
    float *l;             /* [heads][q_len][group] out; 0 there */
    const uint8_t *after; /* the chunk that the caller reads next, prefetched at the end; may be NULL */
    /* Called for each of the `heads` before its last chunk is read, with `context`; may be NULL. There the caller
     * appends what is to be attended too: a chunk that has been prefetched takes a token in a fraction of the time, for
     * K is spread over all of its lines. */
    void (*before_last)(void *context, uint32_t head);
    void *context;
} fd_attend_t;

/* Bytes beyond the causal limit in the last chunk are uninitialised memory: a kernel may load them but must not let
 * them (NaN or infinity included) reach the result. Fresh pages are zero-filled by the OS, reused ones are not. */

typedef struct {
    const char *isa;
    /* Writes token t (0..127) of a chunk; k and v are [head_size] fp32, rounded or quantised here. */
    void (*append)(uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k, const float *v);
    void (*attend)(const fd_attend_t *a);
} fd_kv_ops_t;

/* Everything else that is worth a vector unit, per ISA. */
typedef struct {
    /* dst[i] = scale * src[i]; src in activation dtype (fd_act_dtype_t). Any n. */
    void (*load_act)(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale);
    /* (m, l, acc) += (m2, l2, acc2), `rows` rows of head_size. Rows with l2 == 0 add nothing. */
    void (*merge)(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
                  uint32_t head_size);
    /* o[r] = acc[r] / l[r], rounded to nearest even in activation dtype; 0 where l[r] is 0. Any head_size. */
    void (*finish)(void *o, const float *acc, const float *l, uint32_t rows, uint32_t head_size, uint32_t act_dtype);
} fd_vec_ops_t;

/* Best ISA this CPU and OS support (x86: cpuid and xgetbv). */
fd_isa_t fd_isa_best(void);
int fd_isa_supported(fd_isa_t isa);
const char *fd_isa_name(fd_isa_t isa); /* "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "neon" */
int fd_isa_from_name(const char *name, fd_isa_t *out); /* 0 on success, -1 unknown */

/* Never NULL for a valid dtype and a supported ISA. */
const fd_kv_ops_t *fd_kv_ops(fd_kv_dtype_t dtype, fd_isa_t isa);
const fd_vec_ops_t *fd_vec_ops(fd_isa_t isa);

#endif
