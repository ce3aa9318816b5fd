/* merge and finish (fd_vec_ops_t), written with the vec_* primitives of the including file. */
#pragma once

#include <math.h>
#include <string.h>

#include "chunk.h"
#include "cpu/act_simd.h"

FD_INLINE void merge(float *m, float *l, float *acc, const float *m2, const float *l2, const float *acc2, uint32_t rows,
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
        const vec_t x = vec_set1(scale), x2 = vec_set1(scale2);
        uint32_t d = 0;
        for (; d + LANES <= v_size; d += LANES)
            vec_store(acc + d, vec_fma(vec_load(acc2 + d), x2, vec_mul(vec_load(acc + d), x)));
        for (; d < v_size; d++) acc[d] = acc[d] * scale + acc2[d] * scale2;
    }
}

FD_INLINE void finish(void *o, const float *acc, const float *l, uint32_t rows, uint32_t v_size, uint32_t act_dtype) {
    const size_t row_bytes = v_size * fd_act_bytes(act_dtype);
    for (uint32_t r = 0; r < rows; r++)
        finish_row((uint8_t *)o + r * row_bytes, acc + (size_t)r * v_size, NO_BIAS, l[r], v_size, act_dtype);
}
