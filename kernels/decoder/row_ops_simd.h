/* fd_row_ops_t of an ISA, written with its vec_* primitives. The including file names the ISA: FD_ROW_OPS(isa). */
#pragma once

#include <math.h>

#include "cpu/act_simd.h"
#include "cpu/exp2_simd.h"
#include "row_ops.h"

/* The product of two rows of n numbers. */
FD_INLINE float row_product(const uint32_t x_dtype, const void *x, const uint32_t y_dtype, const void *y, size_t n) {
    vec_t sums[4] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (size_t j = 0; j < 4; j++)
            sums[j] = vec_fma(load(x_dtype, x, i + j * LANES), load(y_dtype, y, i + j * LANES), sums[j]);
    for (; i + LANES <= n; i += LANES) sums[0] = vec_fma(load(x_dtype, x, i), load(y_dtype, y, i), sums[0]);
    float sum = vec_reduce_add(vec_add(vec_add(sums[0], sums[1]), vec_add(sums[2], sums[3])));
    for (; i < n; i++) sum = fmaf(load_one(x_dtype, x, i), load_one(y_dtype, y, i), sum);
    return sum;
}

/* 1 / sqrt(mean(x^2) + eps) of a row's n numbers. */
FD_INLINE float inverse_rms(const uint32_t dtype, const void *x, size_t n, float eps) {
    return 1.0f / sqrtf(row_product(dtype, x, dtype, x, n) / (float)n + eps);
}

FD_INLINE void norm_rows(const uint32_t dtype, const fd_norm_rows_t *o, size_t row, size_t n) {
    const size_t width = o->width;
    for (size_t r = row; r < row + n; r++) {
        void *x = (void *)at(dtype, o->x, r * width), *out = (void *)at(dtype, o->out, r * width);
        if (o->y) {
            const void *y = at(dtype, o->y, r * width);
            const vec_t scale = vec_set1(o->scale);
            size_t i = 0;
            for (; i + LANES <= width; i += LANES)
                store(dtype, x, i, vec_fma(load(dtype, y, i), scale, load(dtype, x, i)));
            for (; i < width; i++) store_one(dtype, x, i, fmaf(load_one(dtype, y, i), o->scale, load_one(dtype, x, i)));
        }
        if (o->factor) {
            const float one = load_one(dtype, o->factor, 0);
            const vec_t factor = vec_set1(one);
            size_t i = 0;
            for (; i + LANES <= width; i += LANES) store(dtype, x, i, vec_mul(load(dtype, x, i), factor));
            for (; i < width; i++) store_one(dtype, x, i, load_one(dtype, x, i) * one);
        }
        if (!o->weight) continue;
        const float inverse = inverse_rms(dtype, x, width, o->eps);
        const vec_t factor = vec_set1(inverse);
        size_t i = 0;
        for (; i + LANES <= width; i += LANES)
            store(dtype, out, i, vec_mul(vec_mul(load(dtype, x, i), factor), load(dtype, o->weight, i)));
        for (; i < width; i++)
            store_one(dtype, out, i, load_one(dtype, x, i) * inverse * load_one(dtype, o->weight, i));
    }
}

/* x / (1 + e^-z) for a z with the sign of x, computed with e^-|z|. The order of the operands keeps NaN. */
FD_INLINE vec_t times_sigmoid(vec_t x, vec_t z) {
    const vec_t e = vec_exp2_of_float(vec_mul(vec_abs(z), vec_set1(-LOG2_E)));
    const vec_t numerator = vec_fma(vec_min(vec_zero(), x), e, vec_max(vec_zero(), x));
    return vec_div(numerator, vec_add(vec_set1(1.0f), e));
}

FD_INLINE vec_t silu(vec_t x) { return times_sigmoid(x, x); }

/* x (1 + tanh(u)) / 2 = x / (1 + e^-2u) with 2u = x (GELU_1 + GELU_3 x^2): the approximation of GELU (Hendrycks and
 * Gimpel, arXiv 1606.08415) with GELU_1 = 2 sqrt(2 / pi) and GELU_3 = 0.044715 GELU_1. */
#define GELU_1 1.5957691216057308f
#define GELU_3 0.0713548162726009f
FD_INLINE vec_t gelu(vec_t x) {
    return times_sigmoid(x, vec_mul(x, vec_fma(vec_mul(x, x), vec_set1(GELU_3), vec_set1(GELU_1))));
}

FD_INLINE void gate_rows_by(const uint32_t dtype, const bool by_gelu, const fd_gate_rows_t *o, size_t row, size_t n) {
    const size_t width = o->width;
    for (size_t r = row; r < row + n; r++) {
        const void *gate = at(dtype, o->x, 2 * r * width), *up = at(dtype, gate, width);
        void *out = (void *)at(dtype, o->out, r * width);
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vec_t g = load(dtype, gate, i);
            store(dtype, out, i, vec_mul(by_gelu ? gelu(g) : silu(g), load(dtype, up, i)));
        }
        for (; i < width; i++) {
            const float g = load_one(dtype, gate, i), z = by_gelu ? g * (GELU_1 + GELU_3 * g * g) : g;
            store_one(dtype, out, i, g / (1.0f + expf(-z)) * load_one(dtype, up, i));
        }
    }
}

FD_INLINE void clamped_gate_rows(const uint32_t dtype, const fd_gate_rows_t *o, size_t row, size_t n) {
    const size_t width = o->width;
    const vec_t limit = vec_set1(o->limit), least = vec_set1(-o->limit), alpha = vec_set1(o->alpha),
                one = vec_set1(1.0f);
    for (size_t r = row; r < row + n; r++) {
        const void *gate = at(dtype, o->x, 2 * r * width), *up = at(dtype, gate, width);
        void *out = (void *)at(dtype, o->out, r * width);
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) { /* the order of the operands keeps NaN */
            const vec_t g = vec_min(limit, load(dtype, gate, i));
            const vec_t u = vec_max(least, vec_min(limit, load(dtype, up, i)));
            store(dtype, out, i, vec_mul(times_sigmoid(g, vec_mul(g, alpha)), vec_add(u, one)));
        }
        for (; i < width; i++) {
            float g = load_one(dtype, gate, i), u = load_one(dtype, up, i);
            if (g > o->limit) g = o->limit;
            if (u > o->limit) u = o->limit;
            if (u < -o->limit) u = -o->limit;
            store_one(dtype, out, i, g / (1.0f + expf(-g * o->alpha)) * (u + 1.0f));
        }
    }
}

FD_INLINE void gate_rows(const uint32_t dtype, const fd_gate_rows_t *o, size_t row, size_t n) {
    if (o->limit > 0.0f) clamped_gate_rows(dtype, o, row, n);
    else if (o->gelu) gate_rows_by(dtype, true, o, row, n);
    else gate_rows_by(dtype, false, o, row, n);
}

/* sigmoid(z) = e^min(z, 0) / (1 + e^-|z|). */
FD_INLINE void sigmoid_rows(const uint32_t dtype, const fd_sigmoid_rows_t *o, size_t row, size_t n) {
    const size_t end = (row + n) * o->width;
    const vec_t one = vec_set1(1.0f), log2_e = vec_set1(LOG2_E);
    size_t i = row * o->width;
    for (; i + LANES <= end; i += LANES) {
        const vec_t z = vec_mul(load(dtype, o->gate, i), log2_e);
        const vec_t above = vec_exp2_of_float(vec_min(z, vec_zero()));
        const vec_t below = vec_add(one, vec_exp2_of_float(vec_sub(vec_zero(), vec_abs(z))));
        store(dtype, o->out, i, vec_mul(load(dtype, o->x, i), vec_div(above, below)));
    }
    for (; i < end; i++)
        store_one(dtype, o->out, i, load_one(dtype, o->x, i) * fd_sigmoid(load_one(dtype, o->gate, i)));
}

FD_INLINE void mix_rows(const uint32_t dtype, const fd_mix_rows_t *o, size_t row, size_t n) {
    const size_t width = o->width;
    for (size_t r = row; r < row + n; r++) {
        const float *shares = o->shares + r * o->n;
        const uint32_t *from = o->from + r * o->n;
        void *out = (void *)at(dtype, o->out, r * width);
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            vec_t sum = vec_zero();
            for (size_t j = 0; j < o->n; j++)
                sum = vec_fma(vec_set1(shares[j]), load(dtype, o->y, from[j] * width + i), sum);
            store(dtype, out, i, sum);
        }
        for (; i < width; i++) {
            float sum = 0.0f;
            for (size_t j = 0; j < o->n; j++) sum = fmaf(shares[j], load_one(dtype, o->y, from[j] * width + i), sum);
            store_one(dtype, out, i, sum);
        }
    }
}

FD_INLINE void router_rows_by(const uint32_t dtype, const uint32_t weight_dtype, const fd_router_rows_t *o,
                              size_t first, size_t n) {
    for (size_t part = first; part < first + n; part++) {
        const size_t expert = part % o->n, row = part / o->n * FD_ROUTER_BLOCK;
        const void *weight = at(weight_dtype, o->weight, expert * o->width);
        const float bias = o->bias ? load_one(weight_dtype, o->bias, expert) : 0.0f;
        for (size_t r = row; r < o->rows && r < row + FD_ROUTER_BLOCK; r++) {
            float *out = o->out + r * o->n + expert;
            *out = row_product(dtype, at(dtype, o->x, r * o->width), weight_dtype, weight, o->width) + bias;
            if (weight_dtype == FD_ACT_FP32) continue;
            uint16_t rounded;
            store_one(weight_dtype, &rounded, 0, *out);
            *out = load_one(weight_dtype, &rounded, 0);
        }
    }
}

FD_INLINE void router_rows(const uint32_t dtype, const fd_router_rows_t *o, size_t first, size_t n) {
    if (o->single) router_rows_by(dtype, FD_ACT_FP32, o, first, n);
    else router_rows_by(dtype, dtype, o, first, n);
}

/* The head x, normalised by `factor` and the weights `norm`, if there are any, and with RoPE, to `to`; x and `to` do
 * not overlap. */
FD_INLINE void rope_head(const uint32_t dtype, const fd_rope_rows_t *o, const void *x, float factor, const void *norm,
                         const float *cos, const float *sin, void *to) {
    const size_t size = o->head_size, pairs = o->pairs;
    const vec_t factors = vec_set1(factor);
    size_t i = 0;
    for (; i + LANES <= pairs; i += LANES) {
        vec_t a = load(dtype, x, i), b = load(dtype, x, i + pairs);
        if (norm) {
            a = vec_mul(vec_mul(a, factors), load(dtype, norm, i));
            b = vec_mul(vec_mul(b, factors), load(dtype, norm, i + pairs));
        }
        const vec_t c = vec_load(cos + i), s = vec_load(sin + i);
        store(dtype, to, i, vec_sub(vec_mul(a, c), vec_mul(b, s)));
        store(dtype, to, i + pairs, vec_fma(b, c, vec_mul(a, s)));
    }
    for (; i < pairs; i++) {
        float a = load_one(dtype, x, i), b = load_one(dtype, x, i + pairs);
        if (norm) {
            a *= factor * load_one(dtype, norm, i);
            b *= factor * load_one(dtype, norm, i + pairs);
        }
        store_one(dtype, to, i, a * cos[i] - b * sin[i]);
        store_one(dtype, to, i + pairs, b * cos[i] + a * sin[i]);
    }
    for (i = 2 * pairs; i < size; i++)
        store_one(dtype, to, i, load_one(dtype, x, i) * factor * (norm ? load_one(dtype, norm, i) : 1.0f));
}

/* The `heads` heads of a row, of which each begins `step` elements behind the one before, as rope_head. */
FD_INLINE void rope_heads(const uint32_t dtype, const fd_rope_rows_t *o, const void *x, size_t step, size_t heads,
                          const void *norm, const float *cos, const float *sin, void *to) {
    const size_t size = o->head_size, normed = o->whole_norms ? heads * size : size;
    float factor = 1.0f;
    for (size_t i = 0; i < heads * size; i += size) {
        const void *head = at(dtype, x, i / size * step), *weights = norm ? at(dtype, norm, i % normed) : NULL;
        if (norm && i % normed == 0) factor = inverse_rms(dtype, head, normed, o->eps);
        rope_head(dtype, o, head, factor, weights, cos, sin, (void *)at(dtype, to, i));
    }
}

FD_INLINE void rope_rows(const uint32_t dtype, const fd_rope_rows_t *o, size_t row, size_t n) {
    const size_t size = o->head_size, head_bytes = size * fd_act_bytes(dtype), q_step = o->gate ? 2 * size : size;
    const fd_angles_t *angles = &o->angles;
    for (size_t r = row; r < row + n; r++) {
        const size_t first = r * o->pairs;
        const void *from = at(dtype, o->qkv, r * (o->q_heads * q_step + (o->k_as_v ? 1 : 2) * o->kv_heads * size));
        void *q = (void *)at(dtype, o->q, r * o->q_stride), *kv = (void *)at(dtype, o->kv, r * o->kv_stride);
        rope_heads(dtype, o, from, q_step, o->q_heads, o->q_norm, angles->q_cos + first, angles->q_sin + first, q);
        for (size_t head = 0; o->gate && head < o->q_heads; head++)
            memcpy((void *)at(dtype, o->gate, (r * o->q_heads + head) * size), at(dtype, from, head * q_step + size),
                   head_bytes);
        from = at(dtype, from, o->q_heads * q_step);
        rope_heads(dtype, o, from, size, o->kv_heads, o->k_norm, angles->cos + first, angles->sin + first, kv);
        if (!o->k_as_v) from = at(dtype, from, o->kv_heads * size);
        void *v = (void *)at(dtype, kv, o->kv_heads * size);
        const fd_norm_rows_t v_heads = {.x = (void *)from, .out = v, .weight = o->v_norm, .eps = o->eps, .width = size};
        if (o->v_norm) norm_rows(dtype, &v_heads, 0, o->kv_heads);
        else memcpy(v, from, o->kv_heads * head_bytes);
    }
}

FD_INLINE void turn_rows(const uint32_t dtype, const fd_turn_rows_t *o, size_t row, size_t n) {
    const size_t pairs = o->pairs, step = o->interleaved ? 2 : 1, second = o->interleaved ? 1 : pairs;
    for (size_t r = row; r < row + n; r++) {
        const float *cos = o->cos + r * pairs, *sin = o->sin + r * pairs;
        for (size_t head = 0; head < o->heads; head++) {
            const void *x = at(dtype, o->x, r * o->x_row + head * o->x_head);
            void *out = (void *)at(dtype, o->out, r * o->out_row + head * o->out_head);
            for (size_t i = 0; i < pairs; i++) {
                const float a = load_one(dtype, x, i * step), b = load_one(dtype, x, i * step + second);
                store_one(dtype, out, i, a * cos[i] - b * sin[i]);
                store_one(dtype, out, i + pairs, b * cos[i] + a * sin[i]);
            }
        }
    }
}

#define FD_ROW_OPS_OF(name, dtype, text)                                                                               \
    static void norm_##name(const fd_norm_rows_t *o, size_t row, size_t n) { norm_rows(dtype, o, row, n); }            \
    static void gate_##name(const fd_gate_rows_t *o, size_t row, size_t n) { gate_rows(dtype, o, row, n); }            \
    static void sigmoid_##name(const fd_sigmoid_rows_t *o, size_t row, size_t n) { sigmoid_rows(dtype, o, row, n); }   \
    static void rope_##name(const fd_rope_rows_t *o, size_t row, size_t n) { rope_rows(dtype, o, row, n); }            \
    static void turn_##name(const fd_turn_rows_t *o, size_t row, size_t n) { turn_rows(dtype, o, row, n); }            \
    static void mix_##name(const fd_mix_rows_t *o, size_t row, size_t n) { mix_rows(dtype, o, row, n); }               \
    static void router_##name(const fd_router_rows_t *o, size_t first, size_t n) { router_rows(dtype, o, first, n); }
#define FD_ROW_OPS_ENTRY(name, dtype, text, isa)                                                                       \
    [dtype] = {isa, norm_##name, gate_##name, sigmoid_##name, rope_##name, turn_##name, mix_##name, router_##name},
#define FD_ROW_OPS(isa)                                                                                                \
    FD_ACT_FORMATS(FD_ROW_OPS_OF)                                                                                      \
    const fd_row_ops_t fd_row_ops_##isa[FD_ACT_DTYPES] = {FD_ACT_FORMATS(FD_ROW_OPS_ENTRY, #isa)};
