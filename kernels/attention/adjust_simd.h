/* Changes that few models make to their scores before the softmax: soft-capping (Gemma 2) and position biases (ALiBi).
 * The block functions call adjust_scores, which is not inlined, so other models pay for one untaken branch a chunk. */
#pragma once

#include "softmax_simd.h"

#define TANH_LIMIT 8.0f /* tanh rounds to 1 in fp32 above this, but for 1e-7 */

/* y times tanh(x) / x, where x = y * factor: an even rational function of x, so nothing is lost near 0. Its largest
 * relative error is 7e-9, which rounding raises to 3.4e-7. Multiplying y, not 1 / factor, keeps tiny factors from
 * overflowing. */
FD_INLINE vec_t cap_score(vec_t y, vec_t factor, vec_t limit) {
    y = vec_min(vec_max(y, vec_sub(vec_zero(), limit)), limit);
    const vec_t x = vec_mul(y, factor), z = vec_min(vec_mul(x, x), vec_set1(TANH_LIMIT * TANH_LIMIT));
    vec_t p = vec_fma(vec_set1(0x1.05a63p-26f), z, vec_set1(0x1.6f53ap-16f));
    p = vec_fma(p, z, vec_set1(0x1.d42262p-9f));
    p = vec_fma(p, z, vec_set1(0x1.1357d2p-3f));
    p = vec_fma(p, z, vec_set1(1.0f));
    vec_t q = vec_fma(vec_set1(0x1.c9894cp-21f), z, vec_set1(0x1.65b26ep-12f));
    q = vec_fma(q, z, vec_set1(0x1.acad5ep-6f));
    q = vec_fma(q, z, vec_set1(0x1.df013ap-2f));
    q = vec_fma(q, z, vec_set1(1.0f));
    return vec_mul(y, vec_div(p, q));
}

/* Replaces the scores of a block by capped or biased ones. A true score is q_scale times a score in `scores`, before
 * and after. */
static __attribute__((noinline)) void adjust_scores(const block_t *b, float scores[][FD_PAGE_TOKENS]) {
    const fd_attend_t *a = b->a;
    const uint32_t first = b->lo / LANES, last = (b->hi + LANES - 1) / LANES;
    float lane[LANES];
    for (uint32_t i = 0; i < LANES; i++) lane[i] = (float)i;
    for (uint32_t r = 0; r < b->rows; r++) {
        const float q_scale = b->state[r].q_scale;
        if (a->softcap != 0.0f) {
            const vec_t factor = vec_set1(q_scale / a->softcap), limit = vec_set1(TANH_LIMIT * a->softcap / q_scale);
            for (uint32_t i = first; i < last; i++)
                vec_store(&scores[r][i * LANES], cap_score(vec_load(&scores[r][i * LANES]), factor, limit));
        }
        if (a->slopes) {
            const uint32_t token = (b->row + r) / a->group, in_group = b->row + r - token * a->group;
            const vec_t slope = vec_set1(a->slopes[b->head * a->group + in_group] / q_scale);
            const int64_t distance = (int64_t)b->base - ((int64_t)a->q_pos + token); /* of the chunk's first token */
            for (uint32_t i = first; i < last; i++) {
                const vec_t x = vec_add(vec_load(lane), vec_set1((float)(distance + i * LANES)));
                vec_store(&scores[r][i * LANES], vec_fma(x, slope, vec_load(&scores[r][i * LANES])));
            }
        }
    }
}
