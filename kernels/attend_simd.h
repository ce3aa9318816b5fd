/* The vector kernels, written once against the vectors of the ISA's file that includes this.
 *
 * That file defines `vec_t` of LANES floats, the vec_* and kv_* primitives on it, MAX_BLOCK (most query rows a register tile
 * holds) and tile_vecs(rows) (how many vectors of K or V go with that many rows before registers run out). Every function
 * here is inlined into an entry point that fixes dtype and rows, so those parameters cost nothing.
 *
 * Blocking. Query rows (all heads of the group, all tokens of the query block) are cut into panels whose queries are packed
 * once, panels into blocks of up to MAX_BLOCK rows. A panel walks the chunks; in each, a block
 *   1. scores 64 tokens in tiles of registers: a vector of K is loaded and widened once for all rows of the block;
 *   2. masks what a row must not see, updates m and l, turns scores into weights (online softmax, one step a chunk);
 *   3. adds weights times V in tiles of registers, again one load for all rows, rescaling acc as it is loaded.
 * As they go, the tiles prefetch the next chunk front to back, each step as many bytes as it reads itself. In that order, not in
 * the tiles' own: the hardware would fetch the neighbours of every line as well, and all traffic would fall into the first tile.
 *
 * Garbage beyond the causal limit: K is transposed, so it stays in lanes of its own, which step 2 overwrites with
 * -infinity before anything is computed from them; V beyond the last token that some row of the block sees is not read.
 */
#ifndef FD_ATTEND_SIMD_H
#define FD_ATTEND_SIMD_H

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"
#include "half.h"
#include "region.h"

/* Before a loop whose trip count is constant once inlined: only then do arrays of vectors become registers. */
#ifdef __clang__
#define FD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL _Pragma("GCC unroll 8")
#endif

/* Prefetching goes to L2: into L1, where it holds the few line fill buffers, it cost a Xeon 10 to 30 %. */
enum { PANEL_ROWS = 32, PAGE_VECS = FD_PAGE_TOKENS / LANES, PREFETCH_LOCALITY = 2 };

/* exp(x) for x <= 0: exp(r) 2^n with x = n ln 2 + r, |r| <= ln 2 / 2 and a polynomial of degree 6 in r. Below EXP_FLUSH, where the
 * result would soon be subnormal, it is 0; -infinity included. Largest error over all floats of [EXP_FLUSH, 0]: 1.01 ULP. */
#define EXP_FLUSH -87.0f

FD_INLINE vec_t vec_exp(vec_t x) {
    const vec_t clamped = vec_max(x, vec_set1(EXP_FLUSH)), n = vec_round(vec_mul(clamped, vec_set1(0x1.715476p+0f)));
    vec_t r = vec_fma(n, vec_set1(-0x1.62e4p-1f), clamped); /* ln 2 in two parts, the first short enough for an exact product */
    r = vec_fma(n, vec_set1(-0x1.7f7d1cp-20f), r);
    vec_t p = vec_set1(0x1.6a1a78p-10f);
    p = vec_fma(p, r, vec_set1(0x1.123fc6p-7f));
    p = vec_fma(p, r, vec_set1(0x1.555916p-5f));
    p = vec_fma(p, r, vec_set1(0x1.55548ap-3f));
    p = vec_fma(p, r, vec_set1(0x1.fffffcp-2f));
    p = vec_fma(vec_mul(r, r), p, r);
    p = vec_add(p, vec_set1(1.0f));
    return vec_zero_below(vec_scale2(p, n), x, EXP_FLUSH);
}

/* One block's work in one chunk. */
typedef struct {
    const uint8_t *chunk, *next;    /* next: prefetched; NULL: nothing is */
    uint32_t index, n_blocks;       /* of the panel's blocks, which take turns at prefetching */
    uint32_t head_size;
    uint32_t lo, hi;                /* tokens that some row sees */
    uint64_t visible[MAX_BLOCK];    /* bit t: the row sees token t */
    const float *q;                 /* packed [head_size][rows] */
    float *m, *l, *acc;             /* [rows], [rows], [rows][head_size] */
} block_t;

/* What tile `tile` of K (offset 0) or V (offset: where V starts) prefetches while it takes `steps` steps of `step` bytes. */
FD_INLINE const uint8_t *prefetch_start(const block_t *b, size_t offset, uint32_t tile, uint32_t steps, size_t step) {
    return b->next && tile % b->n_blocks == b->index ? b->next + offset + tile * steps * step : NULL;
}

/* Tokens [t0, t0 + vecs * LANES): scores[r][t] = sum_d q[d][r] K[d][t]. */
FD_INLINE void score_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const block_t *b, uint32_t t0,
                          float scores[][FD_PAGE_TOKENS]) {
    const size_t elem = fd_kv_elem_bytes(dtype), stride = FD_PAGE_TOKENS * elem, step = vecs * LANES * elem;
    const uint8_t *k = b->chunk + t0 * elem;
    const uint8_t *ahead = prefetch_start(b, 0, t0 / (vecs * LANES), b->head_size, step);
    const float *q = b->q;
    vec_t sum[MAX_BLOCK][PAGE_VECS];
    FD_UNROLL
    for (int r = 0; r < rows; r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) sum[r][i] = vec_zero();
    for (uint32_t d = 0; d < b->head_size; d++, k += stride, q += rows) {
        if (ahead) {
            FD_UNROLL
            for (size_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, PREFETCH_LOCALITY);
            ahead += step;
        }
        vec_t x[PAGE_VECS];
        FD_UNROLL
        for (int i = 0; i < vecs; i++) x[i] = kv_load(dtype, k + i * LANES * elem);
        FD_UNROLL
        for (int r = 0; r < rows; r++) {
            const vec_t qd = vec_set1(q[r]);
            FD_UNROLL
            for (int i = 0; i < vecs; i++) sum[r][i] = vec_fma(qd, x[i], sum[r][i]);
        }
    }
    FD_UNROLL
    for (int i = 0; i < vecs; i++) {
        const uint32_t t = t0 + i * LANES;
        vec_t scale = vec_zero();
        if (dtype == FD_KV_INT8) scale = vec_load((const float *)(b->chunk + fd_chunk_k_scales(b->head_size)) + t);
        FD_UNROLL
        for (int r = 0; r < rows; r++)
            vec_store(&scores[r][t], dtype == FD_KV_INT8 ? vec_mul(sum[r][i], scale) : sum[r][i]);
    }
}

/* Online softmax: scores of [lo, hi) become weights in place (int8: times the V scale), m and l are brought up to date, and
 * rescale[r] is what acc must be multiplied by. */
FD_INLINE void soft_max(const fd_kv_dtype_t dtype, const int rows, const block_t *b, float scores[][FD_PAGE_TOKENS],
                        float *rescale) {
    const uint32_t first = b->lo / LANES, last = (b->hi + LANES - 1) / LANES;
    float m_old[LANES] = {0}, m_new[LANES] = {0};
    for (int r = 0; r < rows; r++) {
        if (!b->visible[r]) continue; /* 0 - 0: acc stays as it is */
        vec_t max = vec_set1(b->m[r]);
        for (uint32_t i = first; i < last; i++) {
            const vec_t s = vec_keep(vec_load(&scores[r][i * LANES]), b->visible[r] >> i * LANES, -INFINITY);
            vec_store(&scores[r][i * LANES], s);
            max = vec_max(max, s);
        }
        m_old[r] = b->m[r];
        m_new[r] = b->m[r] = vec_reduce_max(max);
    }
    vec_store(rescale, vec_exp(vec_sub(vec_load(m_old), vec_load(m_new))));
    for (int r = 0; r < rows; r++) {
        vec_t sum = vec_zero();
        for (uint32_t i = first; i < last; i++) {
            float *s = &scores[r][i * LANES];
            vec_t p = vec_zero();
            if (b->visible[r]) p = vec_exp(vec_sub(vec_load(s), vec_set1(m_new[r])));
            sum = vec_add(sum, p);
            if (dtype == FD_KV_INT8) {
                const float *scales = (const float *)(b->chunk + fd_chunk_v_scales(b->head_size));
                p = vec_mul(p, vec_load(scales + i * LANES)); /* lanes outside [lo, hi) may be NaN; nobody reads them */
            }
            vec_store(s, p);
        }
        b->l[r] = b->l[r] * rescale[r] + vec_reduce_add(sum);
    }
}

/* Dimensions [d0, d0 + vecs * LANES), or LANES / 2 of them if `half`:
 * acc[r][d] = rescale[r] acc[r][d] + sum over [lo, hi) of weights[r][t] V[t][d]. */
FD_INLINE void value_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const int half, const block_t *b,
                          uint32_t d0, float weights[][FD_PAGE_TOKENS], const float *rescale) {
    const size_t elem = fd_kv_elem_bytes(dtype), stride = b->head_size * elem, step = vecs * LANES * elem;
    const size_t offset = fd_chunk_v(dtype, b->head_size);
    const uint8_t *v = b->chunk + offset + b->lo * stride + d0 * elem;
    const uint8_t *ahead = prefetch_start(b, offset, d0 / (vecs * LANES), FD_PAGE_TOKENS, step);
    vec_t sum[MAX_BLOCK][MAX_VECS];
    FD_UNROLL
    for (int r = 0; r < rows; r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) {
            const float *acc = b->acc + (size_t)r * b->head_size + d0 + i * LANES;
            sum[r][i] = vec_mul(half ? vec_load_half(acc) : vec_load(acc), vec_set1(rescale[r]));
        }
    for (uint32_t t = b->lo; t < b->hi; t++, v += stride) {
        if (ahead) {
            FD_UNROLL
            for (size_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, PREFETCH_LOCALITY);
            ahead += step;
        }
        vec_t x[MAX_VECS];
        FD_UNROLL
        for (int i = 0; i < vecs; i++) x[i] = half ? kv_load_half(dtype, v) : kv_load(dtype, v + i * LANES * elem);
        FD_UNROLL
        for (int r = 0; r < rows; r++) {
            const vec_t w = vec_set1(weights[r][t]);
            FD_UNROLL
            for (int i = 0; i < vecs; i++) sum[r][i] = vec_fma(w, x[i], sum[r][i]);
        }
    }
    FD_UNROLL
    for (int r = 0; r < rows; r++)
        FD_UNROLL
        for (int i = 0; i < vecs; i++) {
            float *acc = b->acc + (size_t)r * b->head_size + d0 + i * LANES;
            if (half)
                vec_store_half(acc, sum[r][i]);
            else
                vec_store(acc, sum[r][i]);
        }
}

FD_INLINE void attend_block(const fd_kv_dtype_t dtype, const int rows, const block_t *b) {
    float scores[MAX_BLOCK][FD_PAGE_TOKENS] __attribute__((aligned(64)));
    float rescale[LANES] __attribute__((aligned(64)));

    const int score_vecs = tile_vecs(rows) < PAGE_VECS ? tile_vecs(rows) : PAGE_VECS;
    const uint32_t step = (uint32_t)score_vecs * LANES;
    for (uint32_t t = b->lo / step * step; t < b->hi; t += step) score_tile(dtype, rows, score_vecs, b, t, scores);

    soft_max(dtype, rows, b, scores, rescale);

    const int vecs = tile_vecs(rows);
    const uint32_t full = b->head_size / LANES;
    uint32_t i = 0;
    for (; i + vecs <= full; i += vecs) value_tile(dtype, rows, vecs, 0, b, i * LANES, scores, rescale);
    if (vecs > 4 && i + 4 <= full) value_tile(dtype, rows, 4, 0, b, i * LANES, scores, rescale), i += 4;
    if (vecs > 2 && i + 2 <= full) value_tile(dtype, rows, 2, 0, b, i * LANES, scores, rescale), i += 2;
    if (vecs > 1 && i + 1 <= full) value_tile(dtype, rows, 1, 0, b, i * LANES, scores, rescale), i += 1;
    if (b->head_size % LANES) value_tile(dtype, rows, 1, 1, b, i * LANES, scores, rescale);
}

typedef void (*block_fn)(const block_t *b);

/* [rows - 1], of one KV dtype; the includer's MAX_BLOCK says how many there are. */
#define FD_BLOCK(name, dtype, rows) \
    static void attend_##name##_block##rows(const block_t *b) { attend_block(dtype, rows, b); }

/* First row of block `i` of the `n` that rows [0, rows) are cut into, as evenly as can be. */
FD_INLINE uint32_t block_row(uint32_t rows, uint32_t n, uint32_t i) { return (uint32_t)((uint64_t)rows * i / n); }

/* Rows [row0, row0 + rows) of the query, rows <= PANEL_ROWS. */
static void attend_panel(const fd_attend_t *a, const block_fn *blocks, uint32_t row0, uint32_t rows) {
    float packed[PANEL_ROWS * FD_MAX_CHUNK_HEAD] __attribute__((aligned(64)));
    const uint32_t n_blocks = (rows + MAX_BLOCK - 1) / MAX_BLOCK, head_size = a->head_size;
    for (uint32_t i = 0; i < n_blocks; i++) {
        const uint32_t r0 = block_row(rows, n_blocks, i), n = block_row(rows, n_blocks, i + 1) - r0;
        const float *q = a->q + (size_t)(row0 + r0) * head_size;
        float *to = packed + r0 * head_size;
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t d = 0; d < head_size; d++) to[d * n + r] = q[(size_t)r * head_size + d];
    }

    const uint64_t start = fd_row_start(a, row0 / a->group), end = fd_row_end(a, (row0 + rows - 1) / a->group);
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint64_t base = a->first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start) continue;
        if (base >= end) break;
        const uint8_t *next = c + 1 < a->n_chunks && base + FD_PAGE_TOKENS < end ? a->chunks[c + 1] : NULL;
        for (uint32_t i = 0; i < n_blocks; i++) {
            const uint32_t r0 = block_row(rows, n_blocks, i), n = block_row(rows, n_blocks, i + 1) - r0, row = row0 + r0;
            block_t b = {.chunk = a->chunks[c], .next = next, .index = i, .n_blocks = n_blocks, .head_size = head_size};
            b.lo = FD_PAGE_TOKENS;
            for (uint32_t r = 0; r < n; r++) {
                const uint32_t j = (row + r) / a->group;
                uint32_t lo, hi;
                fd_clip(fd_row_start(a, j), fd_row_end(a, j), base, &lo, &hi);
                if (lo >= hi) continue;
                b.visible[r] = (~UINT64_C(0) << lo) & (~UINT64_C(0) >> (FD_PAGE_TOKENS - hi));
                if (lo < b.lo) b.lo = lo;
                if (hi > b.hi) b.hi = hi;
            }
            if (b.lo >= b.hi) continue;
            b.q = packed + r0 * head_size;
            b.m = a->m + row, b.l = a->l + row, b.acc = a->acc + (size_t)row * head_size;
            blocks[n - 1](&b);
        }
    }
}

/* `blocks` fixes the KV dtype. */
static void attend(const fd_attend_t *a, const block_fn *blocks) {
    const uint32_t rows = a->q_len * a->group;
    for (uint32_t r = 0; r < rows; r++) a->m[r] = -INFINITY, a->l[r] = 0.0f;
    memset(a->acc, 0, (size_t)rows * a->head_size * sizeof *a->acc);
    for (uint32_t r = 0; r < rows; r += PANEL_ROWS)
        attend_panel(a, blocks, r, rows - r < PANEL_ROWS ? rows - r : PANEL_ROWS);
}

/* Quantises a row; returns its scale. n is a multiple of 8. */
FD_INLINE float row_to_int8(int8_t *dst, const float *src, uint32_t n) {
    vec_t max = vec_zero();
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) max = vec_max(max, vec_abs(vec_load(src + i)));
    if (i < n) max = vec_max(max, vec_abs(vec_load_half(src + i)));
    const float amax = vec_reduce_max(max);
    if (!(amax >= FD_INT8_TINY)) {
        memset(dst, 0, n);
        return 0.0f;
    }
    const vec_t inverse = vec_set1(127.0f / amax);
    for (i = 0; i + LANES <= n; i += LANES) vec_store_int8(dst + i, vec_mul(vec_load(src + i), inverse));
    if (i < n) vec_store_int8_half(dst + i, vec_mul(vec_load_half(src + i), inverse));
    return amax / 127.0f;
}

FD_INLINE void row_to_fp16(uint16_t *dst, const float *src, uint32_t n) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store_fp16(dst + i, vec_saturate_fp16(vec_load(src + i)));
    if (i < n) vec_store_fp16_half(dst + i, vec_saturate_fp16(vec_load_half(src + i)));
}

FD_INLINE void append(const fd_kv_dtype_t dtype, uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k,
                      const float *v) {
    uint8_t *v_row = chunk + fd_chunk_v(dtype, head_size) + t * head_size * fd_kv_elem_bytes(dtype);
    if (dtype == FD_KV_FP32) {
        float *k_column = (float *)chunk + t;
        for (uint32_t d = 0; d < head_size; d++) k_column[d * FD_PAGE_TOKENS] = k[d];
        memcpy(v_row, v, head_size * sizeof *v);
    } else if (dtype == FD_KV_FP16) {
        uint16_t row[FD_MAX_CHUNK_HEAD], *k_column = (uint16_t *)chunk + t;
        row_to_fp16(row, k, head_size);
        for (uint32_t d = 0; d < head_size; d++) k_column[d * FD_PAGE_TOKENS] = row[d];
        row_to_fp16((uint16_t *)v_row, v, head_size);
    } else {
        int8_t row[FD_MAX_CHUNK_HEAD], *k_column = (int8_t *)chunk + t;
        ((float *)(chunk + fd_chunk_k_scales(head_size)))[t] = row_to_int8(row, k, head_size);
        for (uint32_t d = 0; d < head_size; d++) k_column[d * FD_PAGE_TOKENS] = row[d];
        ((float *)(chunk + fd_chunk_v_scales(head_size)))[t] = row_to_int8((int8_t *)v_row, v, head_size);
    }
}

static void merge(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
                  uint32_t head_size) {
    for (uint32_t r = 0; r < rows; r++, acc += head_size, acc2 += head_size) {
        if (l2[r] == 0.0f) continue;
        if (l[r] == 0.0f) { /* its acc may never have been written */
            m[r] = m2[r], l[r] = l2[r];
            memcpy(acc, acc2, head_size * sizeof *acc);
            continue;
        }
        const float max = m2[r] > m[r] ? m2[r] : m[r], scale = expf(m[r] - max), scale2 = expf(m2[r] - max);
        m[r] = max;
        l[r] = l[r] * scale + l2[r] * scale2;
        const vec_t x = vec_set1(scale), x2 = vec_set1(scale2);
        uint32_t d = 0;
        for (; d + LANES <= head_size; d += LANES)
            vec_store(acc + d, vec_fma(vec_load(acc2 + d), x2, vec_mul(vec_load(acc + d), x)));
        for (; d < head_size; d++) acc[d] = acc[d] * scale + acc2[d] * scale2;
    }
}

static void finish(float *acc, const float *l, uint32_t rows, uint32_t head_size) {
    for (uint32_t r = 0; r < rows; r++, acc += head_size) {
        if (l[r] == 0.0f) {
            memset(acc, 0, head_size * sizeof *acc);
            continue;
        }
        const float scale = 1.0f / l[r];
        uint32_t d = 0;
        for (; d + LANES <= head_size; d += LANES) vec_store(acc + d, vec_mul(vec_load(acc + d), vec_set1(scale)));
        for (; d < head_size; d++) acc[d] *= scale;
    }
}

static void load_act(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale) {
    const vec_t x = vec_set1(scale);
    size_t i = 0;
    if (act_dtype == FD_ACT_FP32) {
        const float *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load(from + i), x));
        for (; i < n; i++) dst[i] = scale * from[i];
    } else if (act_dtype == FD_ACT_FP16) {
        const uint16_t *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load_fp16(from + i), x));
        for (; i < n; i++) dst[i] = scale * fd_fp16_to_fp32(from[i]);
    } else {
        const uint16_t *from = src;
        for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_mul(vec_load_bf16(from + i), x));
        for (; i < n; i++) dst[i] = scale * fd_bf16_to_fp32(from[i]);
    }
}

static void store_act(void *dst, const float *src, size_t n, uint32_t act_dtype) {
    uint16_t *to = dst;
    size_t i = 0;
    if (act_dtype == FD_ACT_FP32) {
        memcpy(dst, src, n * sizeof *src);
    } else if (act_dtype == FD_ACT_FP16) {
        for (; i + LANES <= n; i += LANES) vec_store_fp16(to + i, vec_load(src + i));
        for (; i < n; i++) to[i] = fd_fp32_to_fp16(src[i]);
    } else {
        for (; i + LANES <= n; i += LANES) vec_store_bf16(to + i, vec_load(src + i));
        for (; i < n; i++) to[i] = fd_fp32_to_bf16(src[i]);
    }
}

#endif
