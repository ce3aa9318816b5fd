/* Kernels in portable C: the definition the vector kernels are held against, and the only ones where there are none.
 *
 * Plain loops over a page's tokens or a head's dimensions, so that a compiler can vectorise them for its baseline. A block
 * of query rows shares each widened row of K and V, as in attend_simd.h.
 */
#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"
#include "half.h"
#include "region.h"

enum { BLOCK_ROWS = 8 };

/* Widens n elements. */
FD_INLINE void widen(const fd_kv_dtype_t dtype, float *dst, const uint8_t *src, uint32_t n) {
    if (dtype == FD_KV_FP32)
        memcpy(dst, src, n * sizeof *dst);
    else if (dtype == FD_KV_FP16)
        for (uint32_t i = 0; i < n; i++) dst[i] = fd_fp16_to_fp32(((const uint16_t *)src)[i]);
    else
        for (uint32_t i = 0; i < n; i++) dst[i] = (float)((const int8_t *)src)[i];
}

/* Query rows [row, row + rows) over one chunk, whose first token is at position `base`. */
FD_INLINE void attend_block(const fd_attend_t *a, const fd_kv_dtype_t dtype, const uint8_t *chunk, uint64_t base,
                            uint32_t row, uint32_t rows) {
    const uint32_t head_size = a->head_size;
    const size_t elem = fd_kv_elem_bytes(dtype);
    uint32_t lo[BLOCK_ROWS], hi[BLOCK_ROWS], first = FD_PAGE_TOKENS, last = 0; /* last: beyond the last token any row sees */
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t j = (row + r) / a->group;
        fd_clip(fd_row_start(a, j), fd_row_end(a, j), base, &lo[r], &hi[r]);
        if (lo[r] >= hi[r]) continue;
        first = lo[r] < first ? lo[r] : first;
        last = hi[r] > last ? hi[r] : last;
    }
    if (first >= last) return;

    float weights[BLOCK_ROWS][FD_PAGE_TOKENS] = {{0}}, wide[FD_MAX_CHUNK_HEAD];
    const float *q = a->q + (size_t)row * head_size;
    for (uint32_t d = 0; d < head_size; d++) {
        widen(dtype, wide, chunk + (d * FD_PAGE_TOKENS + first) * elem, last - first);
        for (uint32_t r = 0; r < rows; r++) {
            const float qd = q[(size_t)r * head_size + d];
            for (uint32_t t = first; t < last; t++) weights[r][t] += qd * wide[t - first];
        }
    }

    for (uint32_t r = 0; r < rows; r++) {
        float *w = weights[r], *acc = a->acc + (size_t)(row + r) * head_size;
        if (lo[r] >= hi[r]) {
            memset(w, 0, sizeof weights[r]);
            continue;
        }
        if (dtype == FD_KV_INT8) {
            const float *scales = (const float *)(chunk + fd_chunk_k_scales(head_size));
            for (uint32_t t = lo[r]; t < hi[r]; t++) w[t] *= scales[t];
        }
        float max = a->m[row + r], sum = 0.0f;
        for (uint32_t t = lo[r]; t < hi[r]; t++) max = w[t] > max ? w[t] : max;
        for (uint32_t t = first; t < last; t++) {
            w[t] = t >= lo[r] && t < hi[r] ? expf(w[t] - max) : 0.0f;
            sum += w[t];
        }
        const float rescale = expf(a->m[row + r] - max); /* 0 at the row's first chunk, where m is -infinity */
        a->m[row + r] = max;
        a->l[row + r] = a->l[row + r] * rescale + sum;
        for (uint32_t d = 0; d < head_size; d++) acc[d] *= rescale;
        if (dtype == FD_KV_INT8) {
            const float *scales = (const float *)(chunk + fd_chunk_v_scales(head_size));
            for (uint32_t t = first; t < last; t++) w[t] *= scales[t];
        }
    }

    const uint8_t *v = chunk + fd_chunk_v(dtype, head_size);
    for (uint32_t t = first; t < last; t++) {
        widen(dtype, wide, v + (size_t)t * head_size * elem, head_size);
        for (uint32_t r = 0; r < rows; r++) {
            float *acc = a->acc + (size_t)(row + r) * head_size;
            for (uint32_t d = 0; d < head_size; d++) acc[d] += weights[r][t] * wide[d];
        }
    }
}

FD_INLINE void attend(const fd_attend_t *a, const fd_kv_dtype_t dtype) {
    const uint32_t rows = a->q_len * a->group;
    for (uint32_t r = 0; r < rows; r++) a->m[r] = -INFINITY, a->l[r] = 0.0f;
    memset(a->acc, 0, (size_t)rows * a->head_size * sizeof *a->acc);
    const uint64_t start = fd_row_start(a, 0), end = fd_row_end(a, a->q_len - 1);
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint64_t base = a->first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start || base >= end) continue;
        for (uint32_t r = 0; r < rows; r += BLOCK_ROWS)
            attend_block(a, dtype, a->chunks[c], base, r, rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS);
    }
}

/* Quantises a row; returns its scale. */
static float row_to_int8(int8_t *dst, size_t stride, const float *src, uint32_t n) {
    float amax = 0.0f;
    for (uint32_t i = 0; i < n; i++) amax = fabsf(src[i]) > amax ? fabsf(src[i]) : amax;
    const int tiny = amax < FD_INT8_TINY;
    const float inverse = tiny ? 0.0f : 127.0f / amax, nearest = 0x1.8p23f; /* adding it rounds to an integer, ties to even */
    for (uint32_t i = 0; i < n; i++) {
        const float x = src[i] * inverse + nearest - nearest;
        dst[i * stride] = x == x ? (int8_t)(int)x : 0; /* of NaN the conversion is undefined */
    }
    return tiny ? 0.0f : amax / 127.0f;
}

static uint16_t saturated_fp16(float x) {
    return fd_fp32_to_fp16(x > FD_FP16_MAX ? FD_FP16_MAX : x < -FD_FP16_MAX ? -FD_FP16_MAX : x);
}

FD_INLINE void append(const fd_kv_dtype_t dtype, uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k,
                      const float *v) {
    uint8_t *v_row = chunk + fd_chunk_v(dtype, head_size) + t * head_size * fd_kv_elem_bytes(dtype);
    if (dtype == FD_KV_FP32) {
        for (uint32_t d = 0; d < head_size; d++) ((float *)chunk)[d * FD_PAGE_TOKENS + t] = k[d];
        memcpy(v_row, v, head_size * sizeof *v);
    } else if (dtype == FD_KV_FP16) {
        for (uint32_t d = 0; d < head_size; d++) ((uint16_t *)chunk)[d * FD_PAGE_TOKENS + t] = saturated_fp16(k[d]);
        for (uint32_t d = 0; d < head_size; d++) ((uint16_t *)v_row)[d] = saturated_fp16(v[d]);
    } else {
        ((float *)(chunk + fd_chunk_k_scales(head_size)))[t] = row_to_int8((int8_t *)chunk + t, FD_PAGE_TOKENS, k, head_size);
        ((float *)(chunk + fd_chunk_v_scales(head_size)))[t] = row_to_int8((int8_t *)v_row, 1, v, head_size);
    }
}

#define FD_KERNELS(name, dtype)                                                                                        \
    static void fd_attend_##name##_scalar(const fd_attend_t *a) { attend(a, dtype); }                                  \
    static void fd_append_##name##_scalar(uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k,              \
                                          const float *v) {                                                            \
        append(dtype, chunk, head_size, t, k, v);                                                                      \
    }

FD_KERNELS(fp32, FD_KV_FP32)
FD_KERNELS(fp16, FD_KV_FP16)
FD_KERNELS(int8, FD_KV_INT8)

const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES] = {
    [FD_KV_FP32] = {"scalar", fd_append_fp32_scalar, fd_attend_fp32_scalar},
    [FD_KV_FP16] = {"scalar", fd_append_fp16_scalar, fd_attend_fp16_scalar},
    [FD_KV_INT8] = {"scalar", fd_append_int8_scalar, fd_attend_int8_scalar},
};

static void load_act(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale) {
    if (act_dtype == FD_ACT_FP32)
        for (size_t i = 0; i < n; i++) dst[i] = scale * ((const float *)src)[i];
    else if (act_dtype == FD_ACT_FP16)
        for (size_t i = 0; i < n; i++) dst[i] = scale * fd_fp16_to_fp32(((const uint16_t *)src)[i]);
    else
        for (size_t i = 0; i < n; i++) dst[i] = scale * fd_bf16_to_fp32(((const uint16_t *)src)[i]);
}

static void store_act(void *dst, const float *src, size_t n, uint32_t act_dtype) {
    if (act_dtype == FD_ACT_FP32)
        memcpy(dst, src, n * sizeof *src);
    else if (act_dtype == FD_ACT_FP16)
        for (size_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = fd_fp32_to_fp16(src[i]);
    else
        for (size_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = fd_fp32_to_bf16(src[i]);
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
        for (uint32_t d = 0; d < head_size; d++) acc[d] = acc[d] * scale + acc2[d] * scale2;
    }
}

static void finish(float *acc, const float *l, uint32_t rows, uint32_t head_size) {
    for (uint32_t r = 0; r < rows; r++, acc += head_size) {
        if (l[r] == 0.0f) {
            memset(acc, 0, head_size * sizeof *acc);
            continue;
        }
        const float scale = 1.0f / l[r];
        for (uint32_t d = 0; d < head_size; d++) acc[d] *= scale;
    }
}

const fd_vec_ops_t fd_vec_ops_scalar = {load_act, store_act, merge, finish};
