/* What the native decoder computes between two products: residual and norm, RoPE and the place of each head, the gate.
 *
 * Rows are in fp32, fp16 or bf16, by a number that every kernel takes; sums and products are in fp32, and a result is
 * rounded once. A block computes in phases (FD_EACH_THREAD), between which its threads wait for each other. Scales and
 * epsilons come as the bits of a float.
 *
 *   block   FD_BLOCK_THREADS threads
 */
#ifndef FD_BLOCK_THREADS
#define FD_BLOCK_THREADS 256
#endif
#define FD_MOST_HEAD 1024 /* elements of a head */

#define FD_EACH_THREAD(t) for (unsigned t = threadIdx.x, fd_more = 1; fd_more; fd_more = 0, __syncthreads())

/* Adds up sums [FD_BLOCK_THREADS] into sums[0]. */
__device__ __forceinline__ void fd_add_up(float *sums) {
    for (unsigned n = FD_BLOCK_THREADS / 2; n; n /= 2) FD_EACH_THREAD(t) if (t < n) sums[t] += sums[t + n];
}

/* x [rows][width] += scale * y, if y is not NULL; out [rows][width] = x / sqrt(mean(x^2) + eps) * weight [width].
 *
 *   grid    (rows, 1) */
FD_KERNEL fd_add_norm(void *x, const void *y, const void *weight, void *out, unsigned width, unsigned dtype,
                      unsigned scale, unsigned eps) {
    __shared__ float sums[FD_BLOCK_THREADS];
    const fd_index_t row = (fd_index_t)blockIdx.x * width;
    FD_EACH_THREAD(t) {
        float sum = 0.0f;
        for (unsigned i = t; i < width; i += FD_BLOCK_THREADS) {
            if (y)
                fd_store(x, row + i, dtype,
                         fd_load(x, row + i, dtype) + __uint_as_float(scale) * fd_load(y, row + i, dtype));
            const float value = fd_load(x, row + i, dtype);
            sum += value * value;
        }
        sums[t] = sum;
    }
    fd_add_up(sums);
    const float factor = 1.0f / sqrtf(sums[0] / (float)width + __uint_as_float(eps));
    FD_EACH_THREAD(t) {
        for (unsigned i = t; i < width; i += FD_BLOCK_THREADS)
            fd_store(out, row + i, dtype, fd_load(x, row + i, dtype) * factor * fd_load(weight, i, dtype));
    }
}

/* Writes the heads of qkv [rows][(q_heads + 2 * kv_heads) * size] to q [rows][q_stride] and kv [rows][kv_stride], K
 * heads before V heads. Heads are normalised by q_norm, k_norm and v_norm [size], if these are not NULL, and those of Q
 * and K turned by the angles whose cosines and sines are cos and sin, of Q heads q_cos and q_sin, [rows][pairs] each:
 * elements i and i + pairs are a pair.
 *
 *   grid    (rows, q_heads + 2 * kv_heads) */
FD_KERNEL fd_write_heads(const void *qkv, const void *q_norm, const void *k_norm, const void *v_norm, const float *cos,
                         const float *sin, const float *q_cos, const float *q_sin, void *q, void *kv, unsigned q_heads,
                         unsigned kv_heads, unsigned size, unsigned pairs, unsigned q_stride, unsigned kv_stride,
                         unsigned dtype, unsigned eps) {
    __shared__ float head[FD_MOST_HEAD], sums[FD_BLOCK_THREADS];
    const fd_index_t row = blockIdx.x;
    const unsigned index = blockIdx.y;
    const int is_q = index < q_heads, is_v = index >= q_heads + kv_heads;
    const void *norm = is_q ? q_norm : is_v ? v_norm : k_norm;
    const fd_index_t from = (row * (q_heads + 2 * kv_heads) + index) * size;
    FD_EACH_THREAD(t) {
        float sum = 0.0f;
        for (unsigned i = t; i < size; i += FD_BLOCK_THREADS) {
            head[i] = fd_load(qkv, from + i, dtype);
            sum += head[i] * head[i];
        }
        sums[t] = sum;
    }
    if (norm) {
        fd_add_up(sums);
        const float factor = 1.0f / sqrtf(sums[0] / (float)size + __uint_as_float(eps));
        FD_EACH_THREAD(t) {
            for (unsigned i = t; i < size; i += FD_BLOCK_THREADS) head[i] *= factor * fd_load(norm, i, dtype);
        }
    }
    void *out = is_q ? q : kv;
    const fd_index_t to = is_q ? row * q_stride + index * size : row * kv_stride + (index - q_heads) * size;
    FD_EACH_THREAD(t) {
        for (unsigned i = t; i < size; i += FD_BLOCK_THREADS) {
            float value = head[i];
            if (!is_v && i < 2 * pairs) {
                const unsigned pair = i < pairs ? i : i - pairs;
                const float c = (is_q ? q_cos : cos)[row * pairs + pair], s = (is_q ? q_sin : sin)[row * pairs + pair];
                value = i < pairs ? value * c - head[i + pairs] * s : value * c + head[i - pairs] * s;
            }
            fd_store(out, to + i, dtype, value);
        }
    }
}

/* The rows of x [rows][2 * width] are gate, up; out [rows][width] = silu(gate) * up.
 *
 *   grid    (rows, width / FD_BLOCK_THREADS, rounded up) */
FD_KERNEL fd_silu_gate(const void *x, void *out, unsigned width, unsigned dtype) {
    const fd_index_t row = blockIdx.x;
    FD_EACH_THREAD(t) {
        const unsigned i = blockIdx.y * FD_BLOCK_THREADS + t;
        if (i < width) {
            const float gate = fd_load(x, 2 * row * width + i, dtype),
                        up = fd_load(x, (2 * row + 1) * width + i, dtype);
            fd_store(out, row * width + i, dtype, gate / (1.0f + expf(-gate)) * up);
        }
    }
}
