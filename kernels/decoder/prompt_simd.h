/* fd_prompt_fn of an ISA, written with its vec_* primitives. The including file defines TILE_VECTORS, with which a tile
 * of sums fits into the registers, and, if it multiplies pairs of bf16, FD_BF16_PAIRS with its functions.
 *
 * Both products of attention, Q K^T and P V, are computed in tiles of TILE_ROWS rows by TILE_VECTORS vectors. A tile
 * broadcasts words of its rows and multiplies them with whole vectors of words: of K, words lie side by side for the
 * keys of a panel, of V for the dimensions. A word is a number in fp32, or a pair of bf16.
 */
#ifndef FD_PROMPT_SIMD_H
#define FD_PROMPT_SIMD_H

#include <math.h>
#include <stdlib.h>

#include "act_simd.h"
#include "exp2_simd.h"
#include "prompt.h"

enum { TILE_ROWS = 6, KEYS = 64, PANEL = TILE_VECTORS * LANES, LINE = 64, AHEAD = 2 };

/* The rows of a part: `n` prompt rows from `row` on, for one KV head. */
typedef struct {
    size_t head, row, n;
    size_t filled, rows;     /* n * group, and that in whole tiles */
    size_t depth, width;     /* words of a row of Q; elements of a row of V, in whole vectors */
    size_t keys_depth;       /* words of a row of P */
    uint32_t *q, *k, *v;     /* [rows][depth], [panel][depth][PANEL], [keys_depth][width] */
    float *out, *most, *sum; /* [rows][width]; [rows]: the largest score and the sum of weights so far */
    uint32_t *p;             /* of a tile: [TILE_ROWS][keys_depth] */
    float *scores;           /* of a tile: [TILE_ROWS][KEYS] */
} part_t;

FD_INLINE const void *prompt_at(const uint32_t dtype, const void *p, size_t i) {
    return (const uint8_t *)p + i * fd_act_bytes(dtype);
}

/* The words of a row of n numbers: to[n] in fp32, or to[(n + 1) / 2]. */
FD_INLINE void pack_row(const uint32_t dtype, const int pairs, const void *x, uint32_t *to, size_t n) {
    if (!pairs) {
        load_act((float *)to, x, n, dtype, 1.0f);
        return;
    }
    to[(n - 1) / 2] = 0;
    memcpy(to, x, n * sizeof(uint16_t));
}

/* Where a tile's products ask for memory that is needed later: AHEAD lines from `at` on for each step of the sums. With
 * few rows, packing would otherwise wait for memory that is idle during the products. */
typedef struct {
    const uint8_t *at;
    size_t step; /* bytes; 0: the lines were asked for already */
} ahead_t;

/* sums [TILE_ROWS][vectors] of a [TILE_ROWS][depth] and b [depth][vectors]; added to c, or written there. */
FD_INLINE void multiply_tile(const int pairs, const int vectors, const uint32_t *a, size_t a_stride, const uint32_t *b,
                             size_t b_stride, size_t depth, float *c, size_t c_stride, const int add, ahead_t ahead) {
    vec_t sums[TILE_ROWS][TILE_VECTORS];
    FD_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        FD_UNROLL
        for (int j = 0; j < vectors; j++)
            sums[r][j] = add ? vec_load(c + (size_t)r * c_stride + (size_t)j * LANES) : vec_zero();
    }
    for (size_t i = 0; i < depth; i++, b += b_stride, ahead.at += ahead.step) {
        FD_UNROLL
        for (size_t line = 0; line < AHEAD; line++) __builtin_prefetch(ahead.at + line * LINE, 0, 2);
        vec_t x[TILE_VECTORS];
        FD_UNROLL
        for (int j = 0; j < vectors; j++) x[j] = vec_load((const float *)b + (size_t)j * LANES);
        FD_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            const vec_t y = vec_broadcast(a + (size_t)r * a_stride + i);
            FD_UNROLL
            for (int j = 0; j < vectors; j++) {
#ifdef FD_BF16_PAIRS
                if (pairs) sums[r][j] = vec_add_pairs(sums[r][j], y, x[j]);
                else
#endif
                    sums[r][j] = vec_fma(y, x[j], sums[r][j]);
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        FD_UNROLL
        for (int j = 0; j < vectors; j++) vec_store(c + (size_t)r * c_stride + (size_t)j * LANES, sums[r][j]);
    }
}

/* The words of K of the keys from `key` on, of which `n` exist; the others are zero. */
FD_INLINE void pack_keys(const uint32_t dtype, const int pairs, const fd_prompt_t *o, size_t key, size_t n,
                         const part_t *b) {
    enum { TOGETHER = 4 }; /* keys whose words are stored side by side at once */
    uint32_t row[TOGETHER][512];
    const size_t depth = b->depth;
    for (size_t t = 0; t < KEYS; t += TOGETHER) {
        uint32_t *to = b->k + t / PANEL * depth * PANEL + t % PANEL;
        for (size_t from = 0; from < depth; from += 512) {
            const size_t words = depth - from < 512 ? depth - from : 512, per_word = pairs ? 2 : 1;
            const size_t first = from * per_word, left = o->k_size - first;
            for (size_t i = 0; i < TOGETHER; i++) {
                if (t + i >= n) memset(row[i], 0, words * sizeof row[i][0]);
                else
                    pack_row(dtype, pairs,
                             prompt_at(dtype, o->k, b->head * o->k_head + (key + t + i) * o->k_row + first), row[i],
                             left < words * per_word ? left : words * per_word);
            }
            size_t w = 0;
#ifdef FD_HAS_INTERLEAVE4
            for (; w + 16 <= words; w += 16) interleave4(to + (from + w) * PANEL, PANEL, row[0] + w, 512);
#endif
            for (; w < words; w++)
                for (size_t i = 0; i < TOGETHER; i++) to[(from + w) * PANEL + i] = row[i][w];
        }
    }
}

/* The words of V of these keys. */
FD_INLINE void pack_values(const uint32_t dtype, const int pairs, const fd_prompt_t *o, size_t key, size_t n,
                           const part_t *b) {
    const size_t per_word = pairs ? 2 : 1, width = b->width, size = o->v_size;
    for (size_t w = 0; w < b->keys_depth; w++) {
        uint32_t *to = b->v + w * width;
        const size_t t = w * per_word;
        if (t >= n || size < width) memset(to, 0, width * sizeof *to);
        if (t >= n) continue;
        const void *x = prompt_at(dtype, o->v, b->head * o->v_head + (key + t) * o->v_row);
        if (!pairs) {
            load_act((float *)to, x, size, dtype, 1.0f);
            continue;
        }
        const uint16_t *low = x, *high = low + o->v_row;
        const int both = t + 1 < n;
        for (size_t i = 0; i < size; i++) to[i] = low[i] | (both ? (uint32_t)high[i] << 16 : 0);
    }
}

/* Turns the scores of row r, of which those from `first` to `last` - 1 are seen, into weights exp2(units * (score -
 * most)), and scales the row's sums where `most` grows. */
FD_INLINE void weigh_row(const int pairs, const part_t *b, size_t of_tile, size_t r, size_t first, size_t last,
                         float units) {
    float *scores = b->scores + of_tile * KEYS;
    for (size_t t = 0; t < first; t++) scores[t] = -INFINITY;
    for (size_t t = last; t < KEYS; t++) scores[t] = -INFINITY;
    vec_t x[KEYS / LANES], largest = vec_set1(-INFINITY);
    FD_UNROLL
    for (int j = 0; j < KEYS / LANES; j++) {
        x[j] = vec_load(scores + j * LANES);
        largest = vec_max(x[j], largest);
    }
    const float here = vec_reduce_max(largest);
    if (here > b->most[r]) {
        const float factor = exp2f(units * (b->most[r] - here));
        float *out = b->out + r * b->width;
        const vec_t factors = vec_set1(factor);
        for (size_t i = 0; i < b->width; i += LANES) vec_store(out + i, vec_mul(vec_load(out + i), factors));
        b->sum[r] *= factor;
        b->most[r] = here;
    }
    const vec_t scale = vec_set1(units), offset = vec_set1(-units * b->most[r]);
    vec_t sum = vec_zero();
    float *weights = (float *)b->p + of_tile * b->keys_depth;
    FD_UNROLL
    for (int j = 0; j < KEYS / LANES; j++) {
        x[j] = vec_exp2_of_float(vec_fma(x[j], scale, offset));
        sum = vec_add(sum, x[j]);
#ifdef FD_BF16_PAIRS
        if (!pairs)
#endif
            vec_store(weights + j * LANES, x[j]);
    }
    b->sum[r] += vec_reduce_add(sum);
#ifdef FD_BF16_PAIRS
    if (pairs) {
        FD_UNROLL
        for (int j = 0; j < KEYS / LANES; j += 2) vec_store(weights + j / 2 * LANES, vec_round_pairs(x[j], x[j + 1]));
    }
#endif
}

/* The positions [first, last) that the row at `position` attends to. */
FD_INLINE size_t first_seen(const fd_prompt_t *o, size_t position) {
    const size_t windowed = o->window && position >= o->window ? position - o->window + 1 : 0;
    const size_t segment = o->segment ? position / o->segment * o->segment : 0;
    return windowed > segment ? windowed : segment;
}

/* The lines of the next block of keys, after `steps` steps of sums. */
FD_INLINE ahead_t ahead_of(const uint32_t dtype, const void *rows, size_t element, size_t stride, size_t steps) {
    const uint8_t *first = prompt_at(dtype, rows, element);
    const size_t done = steps * AHEAD * LINE, bytes = KEYS * stride * fd_act_bytes(dtype);
    return done < bytes ? (ahead_t){first + done, AHEAD * LINE} : (ahead_t){first, 0};
}

/* The attention of the tile whose first row is r to the packed keys from `key` on. */
FD_INLINE void attend_tile(const uint32_t dtype, const int pairs, const fd_prompt_t *o, const part_t *b, size_t r,
                           size_t key) {
    const size_t left = b->filled - r, n = left < TILE_ROWS ? left : TILE_ROWS, base = o->pos + b->row;
    const size_t earliest = base + r / o->group, latest = base + (r + n - 1) / o->group;
    if (latest < key || first_seen(o, earliest) >= key + KEYS) return; /* these rows see none of the keys */
    ahead_t ahead = ahead_of(dtype, o->k, b->head * o->k_head + (key + KEYS) * o->k_row, o->k_row,
                             r / TILE_ROWS * b->depth * (KEYS / PANEL));
    for (size_t panel = 0; panel < KEYS / PANEL; panel++, ahead.at += b->depth * ahead.step)
        multiply_tile(pairs, TILE_VECTORS, b->q + r * b->depth, b->depth, b->k + panel * b->depth * PANEL, PANEL,
                      b->depth, b->scores + panel * PANEL, KEYS, 0, ahead);
    for (size_t i = 0; i < n; i++) {
        const size_t position = base + (r + i) / o->group, begin = first_seen(o, position);
        const size_t first = begin > key ? begin - key : 0, last = position + 1 > key ? position + 1 - key : 0;
        weigh_row(pairs, b, i, r + i, first < KEYS ? first : KEYS, last < KEYS ? last : KEYS, o->scale * LOG2_E);
    }
    float *out = b->out + r * b->width;
    size_t column = 0;
    ahead = ahead_of(dtype, o->v, b->head * o->v_head + (key + KEYS) * o->v_row, o->v_row,
                     r / TILE_ROWS * b->keys_depth * (b->width / PANEL));
    for (; column + PANEL <= b->width; column += PANEL, ahead.at += b->keys_depth * ahead.step)
        multiply_tile(pairs, TILE_VECTORS, b->p, b->keys_depth, b->v + column, b->width, b->keys_depth, out + column,
                      b->width, 1, ahead);
    for (; column < b->width; column += LANES)
        multiply_tile(pairs, 1, b->p, b->keys_depth, b->v + column, b->width, b->keys_depth, out + column, b->width, 1,
                      ahead);
}

FD_INLINE int attend_part(const uint32_t dtype, const int pairs, const fd_prompt_t *o, size_t head, size_t row,
                          size_t n) {
    enum { BUFFERS = 8, ALIGNED = 16 };
    const size_t per_word = pairs ? 2 : 1, filled = n * o->group, end = o->pos + row + n;
    const size_t rows = (filled + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, keys_depth = KEYS / per_word;
    const size_t depth = (o->k_size + per_word - 1) / per_word, width = (o->v_size + LANES - 1) / LANES * LANES;
    const size_t words[BUFFERS] = {rows * depth, KEYS * depth, keys_depth * width,     rows * width,
                                   rows,         rows,         TILE_ROWS * keys_depth, TILE_ROWS * KEYS};
    size_t total = 0;
    for (int i = 0; i < BUFFERS; i++) total += (words[i] + ALIGNED - 1) / ALIGNED * ALIGNED;
    uint32_t *memory = aligned_alloc(ALIGNED * sizeof *memory, total * sizeof *memory), *buffers[BUFFERS];
    if (!memory) return -1;
    memset(memory, 0, total * sizeof *memory);
    for (size_t i = 0, at = 0; i < BUFFERS; i++) {
        buffers[i] = memory + at;
        at += (words[i] + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    const part_t b = {.head = head,
                      .row = row,
                      .n = n,
                      .filled = filled,
                      .depth = depth,
                      .width = width,
                      .keys_depth = keys_depth,
                      .q = buffers[0],
                      .k = buffers[1],
                      .v = buffers[2],
                      .out = (float *)buffers[3],
                      .most = (float *)buffers[4],
                      .sum = (float *)buffers[5],
                      .p = buffers[6],
                      .scores = (float *)buffers[7]};
    for (size_t r = 0; r < filled; r++) {
        const size_t q_head = head * o->group + r % o->group;
        pack_row(dtype, pairs, prompt_at(dtype, o->q, (row + r / o->group) * o->q_row + q_head * o->k_size),
                 b.q + r * depth, o->k_size);
        b.most[r] = -INFINITY;
    }
    for (size_t key = first_seen(o, o->pos + row) / KEYS * KEYS; key < end; key += KEYS) {
        const size_t keys = end - key < KEYS ? end - key : KEYS;
        pack_keys(dtype, pairs, o, key, keys, &b);
        pack_values(dtype, pairs, o, key, keys, &b);
        for (size_t r = 0; r < filled; r += TILE_ROWS) attend_tile(dtype, pairs, o, &b, r, key);
    }
    for (size_t r = 0; r < filled; r++) {
        const size_t q_head = head * o->group + r % o->group;
        const float sink = o->sinks ? exp2f((o->sinks[q_head] - o->scale * b.most[r]) * LOG2_E) : 0.0f;
        void *to = (void *)prompt_at(dtype, o->out, (row + r / o->group) * o->out_row + q_head * o->v_size);
        finish_row(to, b.out + r * width, NO_BIAS, b.sum[r] + sink, (uint32_t)o->v_size, dtype);
    }
    free(memory);
    return 0;
}

#define FD_PROMPT_FN(name, isa, dtype, pairs)                                                                          \
    int fd_prompt_##name##_##isa(const fd_prompt_t *o, size_t head, size_t row, size_t n) {                            \
        return attend_part(dtype, pairs, o, head, row, n);                                                             \
    }

#endif
