/* Kernels in portable C: the reference for the vector kernels, and the only kernels on an architecture without those.
 *
 * They are plain loops over a page's tokens or a head's dimensions, which a compiler can vectorise for the ABI's
 * baseline. A block of query rows shares each row of K and V that has been widened to floats.
 */
#include <math.h>
#include <string.h>

#include "chunk.h"
#include "dispatch.h"
#include "cpu/half.h"
#include "cpu/hadamard.h"

enum { BLOCK_ROWS = 8 };

static void load_act(float *dst, const void *src, size_t n, uint32_t act_dtype, float scale) {
    if (act_dtype == FD_ACT_FP32)
        for (size_t i = 0; i < n; i++) dst[i] = scale * ((const float *)src)[i];
    else if (act_dtype == FD_ACT_FP16)
        for (size_t i = 0; i < n; i++) dst[i] = scale * fd_fp16_to_fp32(((const uint16_t *)src)[i]);
    else
        for (size_t i = 0; i < n; i++) dst[i] = scale * fd_bf16_to_fp32(((const uint16_t *)src)[i]);
}

/* o = acc / l, or 0 if l is 0. */
static void finish_row(void *o, const float *acc, float l, uint32_t n, uint32_t act_dtype) {
    if (l == 0.0f) {
        memset(o, 0, n * fd_act_bytes(act_dtype));
        return;
    }
    const float scale = 1.0f / l;
    if (act_dtype == FD_ACT_FP32)
        for (uint32_t i = 0; i < n; i++) ((float *)o)[i] = acc[i] * scale;
    else if (act_dtype == FD_ACT_FP16)
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)o)[i] = fd_fp32_to_fp16(acc[i] * scale);
    else
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)o)[i] = fd_fp32_to_bf16(acc[i] * scale);
}

/* Converts element i of `n` consecutive words to floats. For int8 and int4 these are the stored integers minus the zero
 * point, without scale and centre. */
FD_INLINE void widen_words(const fd_kv_dtype_t format, float *dst, const uint8_t *from, uint32_t i, uint32_t n) {
    const uint32_t *words = (const uint32_t *)from, shift = fd_elem_shift(format, i);
    switch (format) {
    case FD_KV_FP32: memcpy(dst, from, n * sizeof *dst); return;
    case FD_KV_FP16:
        for (uint32_t j = 0; j < n; j++) dst[j] = fd_fp16_to_fp32(((const uint16_t *)from)[j]);
        return;
    case FD_KV_BF16:
        for (uint32_t j = 0; j < n; j++) dst[j] = fd_bf16_to_fp32((uint16_t)(words[j] >> shift));
        return;
    case FD_KV_INT8:
    case FD_KV_INT4: {
        const uint32_t mask = (1u << fd_elem_bits(format)) - 1;
        for (uint32_t j = 0; j < n; j++) dst[j] = (float)((int)(words[j] >> shift & mask) - fd_zero_point(format));
        return;
    }
    case FD_KV_INT8_INT4:
    case FD_KV_DTYPES: break;
    }
    __builtin_unreachable();
}

/* Converts lanes [from, to) at sum index i to floats. The matrix (chunk.h) is `depth` words deep and `lanes` wide. */
FD_INLINE void widen(const fd_kv_dtype_t format, float *dst, const uint8_t *matrix, uint32_t depth, uint32_t lanes,
                     uint32_t i, uint32_t from, uint32_t to) {
    for (uint32_t end; from < to; dst += end - from, from = end) {
        end = (from / FD_COLUMN_LANES + 1) * FD_COLUMN_LANES;
        end = end < to ? end : to;
        const size_t row = i / fd_word_elems(format) * fd_lane_stride(format, lanes, from);
        widen_words(format, dst, matrix + fd_lane_offset(format, depth, from) + row, i, end - from);
    }
}

/* Replaces scores [lo, hi) of query row `row` of a KV head by capped and biased ones (fd_attend_t.softcap, slopes). */
static void adjust_scores(const fd_attend_t *a, uint32_t head, uint32_t row, uint64_t base, uint32_t lo, uint32_t hi,
                          float *scores) {
    for (uint32_t t = lo; a->softcap != 0.0f && t < hi; t++) scores[t] = a->softcap * tanhf(scores[t] / a->softcap);
    if (!a->slopes) return;
    const uint32_t token = row / a->group;
    const float slope = a->slopes[head * a->group + row - token * a->group];
    const int64_t distance = (int64_t)base - ((int64_t)a->q_pos + token); /* of the chunk's first token */
    for (uint32_t t = lo; t < hi; t++) scores[t] += slope * (float)(distance + t);
}

/* Attends query rows [row, row + rows) of a KV head to one chunk, whose first token is at position `base`. acc, m and l
 * in `a` are those of the head. */
FD_INLINE void attend_block(const fd_attend_t *a, const fd_kv_dtype_t dtype, uint32_t head, const uint8_t *chunk,
                            uint64_t base, uint32_t row, uint32_t rows) {
    const fd_kv_dtype_t k_format = fd_k_format(dtype), v_format = fd_v_format(dtype);
    const uint32_t head_size = a->head_size, v_size = a->v_size;
    const uint8_t *v = chunk + fd_chunk_v(dtype, head_size);
    uint32_t lo[BLOCK_ROWS], hi[BLOCK_ROWS], first = FD_PAGE_TOKENS,
                                             last = 0; /* tokens [first, last) that at least one row sees */
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t j = (row + r) / a->group;
        fd_clip(fd_visible_start(a, j), fd_visible_end(a, j), base, &lo[r], &hi[r]);
        if (lo[r] >= hi[r]) continue;
        first = lo[r] < first ? lo[r] : first;
        last = hi[r] > last ? hi[r] : last;
    }
    if (first >= last) return;

    float weights[BLOCK_ROWS][FD_PAGE_TOKENS] = {{0}}, q_sum[BLOCK_ROWS] = {0}, widened[FD_MAX_HEAD_SIZE];
    float q[BLOCK_ROWS][FD_MAX_HEAD_SIZE];
    for (uint32_t r = 0; r < rows; r++) {
        load_act(q[r], a->q + fd_q_offset(a, head, row + r), head_size, a->act_dtype, a->softmax_scale);
        if (fd_transforms_qk(dtype, a->hadamard)) fd_hadamard(q[r], q[r], head_size);
    }
    for (uint32_t d = 0; d < head_size; d++) {
        widen(k_format, widened, chunk, fd_k_depth(k_format, head_size), FD_PAGE_TOKENS, d, first, last);
        for (uint32_t r = 0; r < rows; r++) {
            const float qd = q[r][d];
            for (uint32_t t = first; t < last; t++) weights[r][t] += qd * widened[t - first];
            q_sum[r] += qd;
        }
    }

    for (uint32_t r = 0; r < rows; r++) {
        float *w = weights[r], *acc = a->acc + (size_t)(row + r) * v_size;
        if (lo[r] >= hi[r]) {
            memset(w, 0, sizeof weights[r]);
            continue;
        }
        for (uint32_t t = lo[r]; fd_kv_is_int(dtype) && t < hi[r]; t++) {
            const uint32_t word = *(const uint32_t *)(chunk + fd_chunk_k_affine(dtype, head_size, t));
            w[t] = fd_affine_scale(k_format, word) * w[t] + fd_affine_centre(k_format, word) * q_sum[r];
        }
        adjust_scores(a, head, row + r, base, lo[r], hi[r], w);
        float max = a->m[row + r], sum = 0.0f;
        for (uint32_t t = lo[r]; t < hi[r]; t++) max = w[t] > max ? w[t] : max;
        for (uint32_t t = first; t < last; t++) {
            w[t] = t >= lo[r] && t < hi[r] ? expf(w[t] - max) : 0.0f;
            sum += w[t];
        }
        const float rescale = expf(a->m[row + r] - max); /* 0 at the row's first chunk, where m was -infinity */
        a->m[row + r] = max;
        a->l[row + r] = a->l[row + r] * rescale + sum;
        float bias = 0.0f; /* the sum of weights times centres, which is the same for all dimensions */
        for (uint32_t t = lo[r]; fd_kv_is_int(dtype) && t < hi[r]; t++) {
            const uint32_t word = *(const uint32_t *)(chunk + fd_chunk_v_affine(dtype, head_size, t));
            bias += w[t] * fd_affine_centre(v_format, word);
            w[t] *= fd_affine_scale(v_format, word);
        }
        for (uint32_t d = 0; d < v_size; d++) acc[d] = acc[d] * rescale + bias;
    }

    for (uint32_t t = first; t < last; t++) {
        widen(v_format, widened, v, fd_v_depth(v_format), v_size, t, 0, v_size);
        for (uint32_t r = 0; r < rows; r++) {
            float *acc = a->acc + (size_t)(row + r) * v_size;
            for (uint32_t d = 0; d < v_size; d++) acc[d] += weights[r][t] * widened[d];
        }
    }
}

/* Attends the query rows of one KV head to all chunks. */
FD_INLINE void attend_head(fd_attend_t a, const fd_kv_dtype_t dtype, uint32_t head) {
    const uint32_t rows = a.q_len * a.group;
    const size_t first_row = (size_t)head * rows;
    a.acc += first_row * a.v_size, a.m += first_row, a.l += first_row;
    for (uint32_t r = 0; r < rows; r++) a.m[r] = -INFINITY, a.l[r] = 0.0f;
    memset(a.acc, 0, (size_t)rows * a.v_size * sizeof *a.acc);
    const uint64_t start = fd_visible_start(&a, 0), end = fd_visible_end(&a, a.q_len - 1);
    for (uint32_t c = 0; c < a.n_chunks; c++) {
        const uint64_t base = a.first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start || base >= end) continue;
        if (base + FD_PAGE_TOKENS >= end && a.before_last_chunk) a.before_last_chunk(a.context, head);
        for (uint32_t r = 0; r < rows; r += BLOCK_ROWS)
            attend_block(&a, dtype, head, a.chunks[c] + head * a.head_stride, base, r,
                         rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS);
    }
    for (uint32_t r = 0; fd_transforms_vo(dtype, a.hadamard) && r < rows; r++)
        fd_hadamard(a.acc + (size_t)r * a.v_size, a.acc + (size_t)r * a.v_size, a.v_size);
    for (uint32_t r = 0; a.o && r < rows; r++) {
        const float l = a.sinks ? fd_add_sink(a.l[r], a.m[r], a.sinks[head * a.group + r % a.group]) : a.l[r];
        finish_row(a.o + fd_o_offset(&a, head, r), a.acc + (size_t)r * a.v_size, l, a.v_size, a.act_dtype);
    }
}

FD_INLINE void attend(const fd_attend_t *a, const fd_kv_dtype_t dtype) {
    for (uint32_t head = 0; head < a->heads; head++) attend_head(*a, dtype, head);
}

/* Clips x to [lowest, highest] and rounds it to the nearest integer, ties to even; NaN becomes 0. x may be a product,
 * which must be rounded before `magic` is added, as every ISA does. The comparisons in between keep the compiler from
 * fusing the product and the addition. */
static int round_clipped(float x, float lowest, float highest) {
    const float clipped = x < lowest ? lowest : x > highest ? highest : x;
    const float magic = 0x1.8p23f, y = clipped + magic - magic;
    return y == y ? (int)y : 0;
}

static void store_code(void *dst, int as_words, uint32_t i, int code) {
    if (as_words) ((uint32_t *)dst)[i] = (uint32_t)code;
    else ((uint8_t *)dst)[i] = (uint8_t)code;
}

/* Quantises a row to int8 and returns its affine word; row_to_int4 does the same for int4. */
static uint32_t row_to_int8(void *dst, int as_words, const float *src, uint32_t n) {
    float amax = 0.0f;
    for (uint32_t i = 0; i < n; i++) amax = fabsf(src[i]) > amax ? fabsf(src[i]) : amax;
    const int tiny = amax < FD_TINY;
    const float inverse = tiny ? 0.0f : 127.0f / amax;
    for (uint32_t i = 0; i < n; i++)
        store_code(dst, as_words, i, round_clipped(src[i] * inverse, -127.0f, 127.0f) + fd_zero_point(FD_KV_INT8));
    return fd_float_bits(tiny ? 0.0f : amax / 127.0f);
}

static uint32_t row_to_int4(void *dst, int as_words, const float *src, uint32_t n) {
    float min = src[0], max = src[0];
    for (uint32_t i = 0; i < n; i++) {
        min = src[i] < min ? src[i] : min;
        max = src[i] > max ? src[i] : max;
    }
    const fd_int4_grid_t grid = fd_int4_grid(min, max);
    fd_int4_sums_t sums = {0, 0, 0, 0};
    for (uint32_t i = 0; i < n; i++) {
        const int fine = round_clipped((src[i] - grid.centre) * grid.inverse, -FD_INT4_FINE_MAX, FD_INT4_FINE_MAX);
        const int code = round_clipped((float)fine * (1.0f / FD_INT4_FINE), -8.0f, 7.0f);
        sums.n += (float)code, sums.nn += (float)(code * code), sums.f += (float)fine, sums.nf += (float)(code * fine);
        store_code(dst, as_words, i, code + fd_zero_point(FD_KV_INT4));
    }
    return fd_int4_fit(grid, sums, n);
}
static void row_pair_to_int4(void *k_dst, const float *k, void *v_dst, const float *v, uint32_t n, uint32_t *affine) {
    affine[0] = row_to_int4(k_dst, 0, k, n), affine[1] = row_to_int4(v_dst, 1, v, n);
}

static void row_to_fp16(uint16_t *dst, const float *src, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        dst[i] = fd_fp32_to_fp16(src[i] > FD_FP16_MAX ? FD_FP16_MAX : src[i] < -FD_FP16_MAX ? -FD_FP16_MAX : src[i]);
}

static void row_to_bf16(uint16_t *dst, const float *src, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) dst[i] = fd_fp32_to_bf16(src[i]);
}

#include "append.h"

#define FD_KERNELS(name, dtype, text)                                                                                  \
    static void fd_attend_##name##_scalar(const fd_attend_t *a) { attend(a, dtype); }                                  \
    FD_APPEND(name, dtype, scalar)
FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"scalar", fd_append_##name##_scalar, fd_attend_##name##_scalar},
const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

static void merge(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
                  uint32_t v_size) {
    for (uint32_t r = 0; r < rows; r++, acc += v_size, acc2 += v_size) {
        if (l2[r] == 0.0f) continue;
        if (l[r] == 0.0f) { /* acc of an empty row may be uninitialised */
            m[r] = m2[r], l[r] = l2[r];
            memcpy(acc, acc2, v_size * sizeof *acc);
            continue;
        }
        const float max = m2[r] > m[r] ? m2[r] : m[r], scale = expf(m[r] - max), scale2 = expf(m2[r] - max);
        m[r] = max;
        l[r] = l[r] * scale + l2[r] * scale2;
        for (uint32_t d = 0; d < v_size; d++) acc[d] = acc[d] * scale + acc2[d] * scale2;
    }
}

static void finish(void *o, const float *acc, const float *l, uint32_t rows, uint32_t v_size, uint32_t act_dtype) {
    const size_t row_bytes = v_size * fd_act_bytes(act_dtype);
    for (uint32_t r = 0; r < rows; r++)
        finish_row((uint8_t *)o + r * row_bytes, acc + (size_t)r * v_size, l[r], v_size, act_dtype);
}

const fd_vec_ops_t fd_vec_ops_scalar = {load_act, merge, finish};
