/* The layout of a chunk: K and V of FD_PAGE_TOKENS tokens of one KV head in one layer. The same for every ISA.
 *
 *   K         [head_size][64]   transposed: a vector holds one dimension of many tokens, so a score needs no horizontal sum
 *   V         [64][head_size]   token-major: a vector holds many dimensions of one token, so an output needs none either
 *   k_scales  [64] fp32         int8 only: K[d][t] = k_scales[t] * stored
 *   v_scales  [64] fp32         int8 only: V[t][d] = v_scales[t] * stored
 *
 * Elements are fp32, fp16 or int8. A score is multiplied by its token's K scale, a softmax weight by its V scale, so
 * neither costs anything per element.
 *
 * fp16 saturates: what is beyond +-65504 is stored as +-65504, for an infinity in the cache would turn every later
 * output of its sequence into NaN. int8 is symmetric, scale = max |x| / 127, rounded to nearest even; a token whose max |x|
 * is below FD_INT8_TINY is stored as zeros with scale 0 (127 / max |x| would overflow). NaN is kept by fp32 and fp16.
 */
#ifndef FD_CHUNK_H
#define FD_CHUNK_H

#include "attention.h"

#define FD_MAX_CHUNK_HEAD 256u /* the largest head_size */
#define FD_INT8_TINY 1e-36f

#define FD_INLINE static inline __attribute__((always_inline))

FD_INLINE size_t fd_kv_elem_bytes(fd_kv_dtype_t dtype) { return dtype == FD_KV_FP32 ? 4 : dtype == FD_KV_FP16 ? 2 : 1; }

/* Byte offsets within a chunk. */
FD_INLINE size_t fd_chunk_v(fd_kv_dtype_t dtype, uint32_t head_size) {
    return FD_PAGE_TOKENS * (size_t)head_size * fd_kv_elem_bytes(dtype);
}

FD_INLINE size_t fd_chunk_k_scales(uint32_t head_size) { return 2 * fd_chunk_v(FD_KV_INT8, head_size); }

FD_INLINE size_t fd_chunk_v_scales(uint32_t head_size) {
    return fd_chunk_k_scales(head_size) + FD_PAGE_TOKENS * sizeof(float);
}

/* The positions [start, end) that query row j of a block sees. */
FD_INLINE uint64_t fd_row_end(const fd_attend_t *a, uint32_t j) { return (uint64_t)a->q_pos + j + 1; }

FD_INLINE uint64_t fd_row_start(const fd_attend_t *a, uint32_t j) {
    const uint64_t end = fd_row_end(a, j);
    return a->window && end > a->window ? end - a->window : 0;
}

/* Clips positions [start, end) to the tokens [*lo, *hi) of the chunk whose first token is `base`; empty if *lo >= *hi. */
FD_INLINE void fd_clip(uint64_t start, uint64_t end, uint64_t base, uint32_t *lo, uint32_t *hi) {
    *lo = start <= base ? 0 : start - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(start - base);
    *hi = end <= base ? 0 : end - base >= FD_PAGE_TOKENS ? FD_PAGE_TOKENS : (uint32_t)(end - base);
}

#endif
