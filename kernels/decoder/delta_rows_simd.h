/* The gated delta rule for rows of different sequences, written with the vec_* primitives of the including file and
 * with the functions of row_ops_simd.h. */
#pragma once

#include <math.h>

#include "delta.h"
#include "row_ops_simd.h"

/* Rows of a state that are read together, and how many vectors of each: all of a row of 128 where registers hold their
 * sums, so that memory is read from its first byte to its last. */
enum { DELTA_ROWS = 8, DELTA_VECTORS = LANES == 8 ? 4 : 8 };

FD_INLINE float delta_silu(float x) { return x / (1.0f + expf(-x)); }
/* log(1 + e^x). */
FD_INLINE float delta_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Convolves `n` channels from `channel` on of row i, whose own numbers are x, into the scratch, and moves them into the
 * rows before the next one. */
FD_INLINE void convolve_channels(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r, size_t i,
                                 size_t channel, const void *x, size_t n) {
    const size_t before = d->kernel - 1, channels = fd_delta_channels(d), slot = before * channels;
    const void *from = at(dtype, r->inputs, (size_t)r->sources[i] * slot + channel);
    void *to = (void *)at(dtype, r->inputs, (size_t)r->targets[i] * slot + channel);
    const float *weights = d->conv + channel;
    float *out = r->scratch + i * channels + channel;
    size_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const vec_t own = load(dtype, x, c);
        vec_t sum = vec_mul(own, vec_load(weights + before * channels + c));
        for (size_t t = 0; t < before; t++) {
            const vec_t seen = load(dtype, from, t * channels + c);
            sum = vec_fma(seen, vec_load(weights + t * channels + c), sum);
            if (t) store(dtype, to, (t - 1) * channels + c, seen);
        }
        store(dtype, to, (before - 1) * channels + c, own);
        vec_store(out + c, silu(sum));
    }
    for (; c < n; c++) {
        const float own = load_one(dtype, x, c);
        float sum = own * weights[before * channels + c];
        for (size_t t = 0; t < before; t++) {
            const float seen = load_one(dtype, from, t * channels + c);
            sum += seen * weights[t * channels + c];
            if (t) store_one(dtype, to, (t - 1) * channels + c, seen);
        }
        store_one(dtype, to, (before - 1) * channels + c, own);
        out[c] = delta_silu(sum);
    }
}

FD_INLINE float dot(const float *x, const float *y, size_t n) {
    vec_t sums = vec_zero();
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) sums = vec_fma(vec_load(x + i), vec_load(y + i), sums);
    float sum = vec_reduce_add(sums);
    for (; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* Multiplies x [n] so that its length is `length`. */
FD_INLINE void set_length(float *x, size_t n, float eps, float length) {
    const float factor = length / sqrtf(dot(x, x, n) + eps);
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

/* The channels of the heads of Q lie side by side, as those of K and of V do: each of the three is convolved from its
 * first head to its last, so that memory is read in long runs. */
FD_INLINE void delta_convolve(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r, size_t head,
                              size_t n) {
    const size_t k_size = d->k_size, v_size = d->v_heads / d->k_heads * d->v_size, end = head + n;
    const size_t channels = fd_delta_channels(d), first_k = d->k_heads * k_size, first_v = 2 * first_k;
    for (size_t i = 0; i < r->n; i++) {
        const void *y = at(dtype, r->y, (size_t)r->rows[i] * r->y_stride);
        float *q = r->scratch + i * channels, *k = q + first_k;
        for (size_t h = head; h < end; h++)
            convolve_channels(dtype, d, r, i, h * k_size, at(dtype, y, d->q.first + h * d->q.step), k_size);
        for (size_t h = head; h < end; h++)
            convolve_channels(dtype, d, r, i, first_k + h * k_size, at(dtype, y, d->k.first + h * d->k.step), k_size);
        for (size_t h = head; h < end; h++)
            convolve_channels(dtype, d, r, i, first_v + h * v_size, at(dtype, y, d->v.first + h * d->v.step), v_size);
        for (size_t h = head; h < end; h++) {
            set_length(q + h * k_size, k_size, d->unit_eps, 1.0f / sqrtf((float)k_size));
            set_length(k + h * k_size, k_size, d->unit_eps, 1.0f);
        }
    }
}

/* Fetches a part of the next state into L2 while this one is computed: a state is read from memory in its first pass
 * only, and memory would be idle in the second one. NULL: there is no next state. */
FD_INLINE void fetch(const float *next, size_t first, size_t n) {
    enum { LINE = 64 / sizeof(float) };
    if (next)
        for (size_t i = first; i < first + n; i += LINE) __builtin_prefetch(next + i, 0, 2);
}

/* The sums over the rows i of a state s [k_size][v_size] of k[i] s[i] and q[i] s[i]. Fetches the first half of the next
 * state. */
FD_INLINE void look_up(const float *s, const float *next, size_t k_size, size_t v_size, const float *k, const float *q,
                       float *of_k, float *of_q) {
    memset(of_k, 0, v_size * sizeof *of_k);
    memset(of_q, 0, v_size * sizeof *of_q);
    for (size_t first = 0; first < k_size; first += DELTA_ROWS) {
        const size_t end = first + DELTA_ROWS < k_size ? first + DELTA_ROWS : k_size;
        fetch(next, first * v_size / 2, (end - first) * v_size / 2);
        size_t c = 0;
        for (; c + DELTA_VECTORS * LANES <= v_size; c += DELTA_VECTORS * LANES) {
            vec_t sums_k[DELTA_VECTORS], sums_q[DELTA_VECTORS];
            FD_UNROLL
            for (size_t j = 0; j < DELTA_VECTORS; j++)
                sums_k[j] = vec_load(of_k + c + j * LANES), sums_q[j] = vec_load(of_q + c + j * LANES);
            for (size_t i = first; i < end; i++) {
                const vec_t ki = vec_set1(k[i]), qi = vec_set1(q[i]);
                FD_UNROLL
                for (size_t j = 0; j < DELTA_VECTORS; j++) {
                    const vec_t x = vec_load(s + i * v_size + c + j * LANES);
                    sums_k[j] = vec_fma(x, ki, sums_k[j]), sums_q[j] = vec_fma(x, qi, sums_q[j]);
                }
            }
            FD_UNROLL
            for (size_t j = 0; j < DELTA_VECTORS; j++)
                vec_store(of_k + c + j * LANES, sums_k[j]), vec_store(of_q + c + j * LANES, sums_q[j]);
        }
        for (; c < v_size; c++)
            for (size_t i = first; i < end; i++)
                of_k[c] += k[i] * s[i * v_size + c], of_q[c] += q[i] * s[i * v_size + c];
    }
}

/* to = fade * from + k uᵀ, both [k_size][v_size]; they may be the same. Fetches the second half of the next state. */
FD_INLINE void write_state(const float *from, float *to, const float *next, size_t k_size, size_t v_size,
                           const float *k, const float *u, float fade) {
    const vec_t fades = vec_set1(fade);
    for (size_t i = 0; i < k_size; i++, from += v_size, to += v_size) {
        fetch(next, (k_size + i) * v_size / 2, v_size / 2);
        const vec_t ki = vec_set1(k[i]);
        size_t c = 0;
        for (; c + LANES <= v_size; c += LANES)
            vec_store(to + c, vec_fma(vec_load(u + c), ki, vec_mul(vec_load(from + c), fades)));
        for (; c < v_size; c++) to[c] = fade * from[c] + k[i] * u[c];
    }
}

/* out = o / sqrt(mean(o^2) + eps) * norm * silu(z). */
FD_INLINE void gate_head(const uint32_t dtype, const fd_delta_t *d, const float *o, const void *z, void *out) {
    const float inverse = inverse_rms(FD_ACT_FP32, o, d->v_size, d->eps);
    const vec_t factor = vec_set1(inverse);
    size_t c = 0;
    for (; c + LANES <= d->v_size; c += LANES) {
        const vec_t normed = vec_mul(vec_mul(vec_load(o + c), factor), vec_load(d->norm + c));
        store(dtype, out, c, vec_mul(normed, silu(load(dtype, z, c))));
    }
    for (; c < d->v_size; c++)
        store_one(dtype, out, c, o[c] * inverse * d->norm[c] * delta_silu(load_one(dtype, z, c)));
}

/* V head h's beta, and the logarithm of its decay, in a row of projections. */
FD_INLINE float delta_beta(const uint32_t dtype, const fd_delta_t *d, const void *y, size_t h) {
    const size_t group = d->v_heads / d->k_heads;
    return fd_sigmoid(load_one(dtype, y, d->beta.first + h / group * d->beta.step + h % group));
}
FD_INLINE float delta_decay(const uint32_t dtype, const fd_delta_t *d, const void *y, size_t h) {
    const size_t group = d->v_heads / d->k_heads;
    const float own = load_one(dtype, y, d->decay.first + h / group * d->decay.step + h % group);
    return d->rate[h] * delta_softplus(own + d->bias[h]);
}
/* Where the Z of V head h stands in a row of projections. */
FD_INLINE const void *delta_z(const uint32_t dtype, const fd_delta_t *d, const void *y, size_t h) {
    const size_t group = d->v_heads / d->k_heads;
    return at(dtype, y, d->z.first + h / group * d->z.step + h % group * d->v_size);
}

FD_INLINE void delta_advance(const uint32_t dtype, const fd_delta_t *d, const fd_delta_rows_t *r, size_t head,
                             size_t n) {
    const size_t k_size = d->k_size, v_size = d->v_size, group = d->v_heads / d->k_heads, k_width = d->k_heads * k_size;
    const size_t channels = fd_delta_channels(d), state = k_size * v_size;
    for (size_t i = 0; i < r->n; i++) {
        const void *y = at(dtype, r->y, (size_t)r->rows[i] * r->y_stride);
        const float *row = r->scratch + i * channels;
        for (size_t h = head; h < head + n; h++) {
            const float *q = row + h / group * k_size, *k = q + k_width, *v = row + 2 * k_width + h * v_size;
            float *u = r->scratch + r->n * channels + h * 2 * v_size, *o = u + v_size;
            const float beta = delta_beta(dtype, d, y, h), fade = expf(delta_decay(dtype, d, y, h));
            const float *from = r->sums + ((size_t)r->sources[i] * d->v_heads + h) * state;
            float *to = r->sums + ((size_t)r->targets[i] * d->v_heads + h) * state;
            const float *next = NULL;
            if (h + 1 < head + n) next = from + state;
            else if (i + 1 < r->n) next = r->sums + ((size_t)r->sources[i + 1] * d->v_heads + head) * state;
            look_up(from, next, k_size, v_size, k, q, u, o);
            const float qk = dot(q, k, k_size);
            for (size_t c = 0; c < v_size; c++) u[c] = beta * (v[c] - fade * u[c]);
            for (size_t c = 0; c < v_size; c++) o[c] = fade * o[c] + qk * u[c];
            write_state(from, to, next, k_size, v_size, k, u, fade);
            gate_head(dtype, d, o, delta_z(dtype, d, y, h),
                      (void *)at(dtype, r->out, ((size_t)r->rows[i] * d->v_heads + h) * v_size));
        }
    }
}
