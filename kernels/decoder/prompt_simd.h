/* fd_prompt_ops_t of an ISA, written with its vec_* primitives.
 *
 * Both products of attention, Q K^T and P V, are computed in tiles (tile_simd.h). Of K, words lie side by side for the
 * keys of a panel, of V for the dimensions.
 */
#pragma once

#include <math.h>
#include <stdlib.h>

#include "cpu/act_simd.h"
#include "cpu/exp2_simd.h"
#include "prompt.h"
#include "tile_simd.h"

enum { KEYS = FD_PROMPT_KEYS, PANEL = TILE_VECTORS * LANES };

typedef uint16_t __attribute__((may_alias)) half_word_t;

/* The layout of a block: K [panel][depth][PANEL] and then V [keys_depth][width], in words. */
typedef struct {
    size_t depth;          /* words of a row of Q or K */
    size_t width;          /* elements of a row of V, in whole vectors */
    size_t keys_depth;     /* words of KEYS weights */
    size_t k_words, words; /* of K, and of the block */
} layout_t;

FD_INLINE layout_t layout_of(const int pairs, size_t k_size, size_t v_size) {
    const size_t per_word = pairs ? 2 : 1, words = (k_size + per_word - 1) / per_word;
    const size_t depth = (words + STEP_WORDS - 1) / STEP_WORDS * STEP_WORDS;
    const size_t width = (v_size + LANES - 1) / LANES * LANES, keys_depth = KEYS / per_word;
    return (layout_t){depth, width, keys_depth, depth * KEYS, depth * KEYS + keys_depth * width};
}

/* The query rows of some prompt rows for one KV head, from prompt row `row` on. */
typedef struct {
    layout_t layout;
    size_t row, filled;      /* filled: rows of Q */
    word_t *q;               /* [rows][depth] */
    float *out, *most, *sum; /* [rows][width]; [rows]: the largest score and the sum of weights so far */
    word_t *p;               /* of a tile: [TILE_ROWS][keys_depth] */
    float *scores;           /* of a tile: [TILE_ROWS][KEYS] */
} part_t;

/* The words of a row of n numbers: to[n] in fp32, or to[(n + 1) / 2]. */
FD_INLINE void pack_row(const uint32_t dtype, const int pairs, const void *x, word_t *to, size_t n) {
    if (!pairs) {
        load_act((float *)to, x, n, dtype, 1.0f);
        return;
    }
    to[(n - 1) / 2] = 0;
    memcpy(to, x, n * sizeof(uint16_t));
}

/* Packs the K of `n` tokens, which are tokens `t` to t + n - 1 of the block. */
FD_INLINE void pack_keys(const uint32_t dtype, const int pairs, const fd_prompt_pack_t *o, const void *k, size_t t,
                         size_t n, const layout_t *l, word_t *block) {
    enum { PACKED_TOKENS = 4, WORDS = 512 }; /* tokens that are packed at once; words of each token at a time */
    word_t row[PACKED_TOKENS][WORDS];
    const size_t k_size = o->blocks->k_size, per_word = pairs ? 2 : 1;
    for (size_t done = 0, now; done < n; done += now) {
        const size_t token = t + done;
        now = token % PACKED_TOKENS || n - done < PACKED_TOKENS ? 1 : PACKED_TOKENS;
        word_t *to = block + token / PANEL * l->depth * PANEL + token % PANEL;
        for (size_t from = 0; from < l->depth; from += WORDS) {
            const size_t words = l->depth - from < WORDS ? l->depth - from : WORDS;
            const size_t first = from * per_word, left = k_size - first;
            if (left < words * per_word) memset(row, 0, sizeof row);
            for (size_t i = 0; i < now; i++)
                pack_row(dtype, pairs, at(dtype, k, (done + i) * o->k_row + first), row[i],
                         left < words * per_word ? left : words * per_word);
            size_t w = 0;
#ifdef FD_HAS_INTERLEAVE4
            if (now == PACKED_TOKENS)
                for (; w + 16 <= words; w += 16) interleave4(to + (from + w) * PANEL, PANEL, row[0] + w, WORDS);
#endif
            for (; w < words; w++)
                for (size_t i = 0; i < now; i++) to[(from + w) * PANEL + i] = row[i][w];
        }
    }
}

/* Packs the V of these tokens. */
FD_INLINE void pack_values(const uint32_t dtype, const int pairs, const fd_prompt_pack_t *o, const void *v, size_t t,
                           size_t n, const layout_t *l, word_t *block) {
    const size_t size = o->blocks->v_size;
    if (!pairs) {
        for (size_t i = 0; i < n; i++) {
            word_t *to = block + l->k_words + (t + i) * l->width;
            load_act((float *)to, at(dtype, v, i * o->v_row), size, dtype, 1.0f);
            memset(to + size, 0, (l->width - size) * sizeof *to);
        }
        return;
    }
    for (size_t done = 0, now; done < n; done += now) {
        const size_t token = t + done;
        half_word_t *to = (half_word_t *)(block + l->k_words + token / 2 * l->width);
        const uint16_t *x = (const uint16_t *)v + done * o->v_row, *y = x + o->v_row;
        now = token % 2 || n - done < 2 ? 1 : 2;
        if (now == 2)
            for (size_t i = 0; i < size; i++) ((word_t *)to)[i] = x[i] | (uint32_t)y[i] << 16;
        else
            for (size_t i = 0; i < size; i++) to[2 * i + token % 2] = x[i];
    }
}

FD_INLINE void pack_block(const uint32_t dtype, const int pairs, const fd_prompt_pack_t *o, size_t head,
                          size_t number) {
    const layout_t l = layout_of(pairs, o->blocks->k_size, o->blocks->v_size);
    word_t *block = o->blocks->words + head * o->blocks->head_words + number * l.words;
    const size_t begin = number * KEYS, end = begin + KEYS < o->pos + o->n ? begin + KEYS : o->pos + o->n;
    const size_t first = o->pos > begin ? o->pos : begin, n = end - first, row = first - o->pos;
    /* Words of tokens that are yet to come, and padding, are multiplied by zero: they must be numbers. */
    if (first == begin && (n < KEYS || (pairs && o->blocks->v_size < l.width)))
        memset(block, 0, l.words * sizeof *block);
    pack_keys(dtype, pairs, o, at(dtype, o->k, head * o->k_head + row * o->k_row), first - begin, n, &l, block);
    pack_values(dtype, pairs, o, at(dtype, o->v, head * o->v_head + row * o->v_row), first - begin, n, &l, block);
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
        float *out = b->out + r * b->layout.width;
        const vec_t factors = vec_set1(factor);
        for (size_t i = 0; i < b->layout.width; i += LANES) vec_store(out + i, vec_mul(vec_load(out + i), factors));
        b->sum[r] *= factor;
        b->most[r] = here;
    }
    const vec_t scale = vec_set1(units), offset = vec_set1(-units * b->most[r]);
    vec_t sum = vec_zero();
    float *weights = (float *)b->p + of_tile * b->layout.keys_depth;
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

/* The lines of `words` words from `first` on, without the lines that `steps` steps of sums have asked for. */
FD_INLINE ahead_t ahead_of(const word_t *first, size_t words, size_t steps) {
    const size_t done = steps * AHEAD * LINE;
    return done < words * sizeof *first ? (ahead_t){(const uint8_t *)first + done, AHEAD * LINE}
                                        : (ahead_t){(const uint8_t *)first, 0};
}

/* The attention of the tile of `rows` rows from r on to the block whose first key is at position `key`. */
FD_INLINE void attend_tile(const int pairs, const int rows, const fd_prompt_t *o, const part_t *b, size_t r,
                           const word_t *block, size_t key) {
    const layout_t *l = &b->layout;
    const size_t left = b->filled - r, n = left < (size_t)rows ? left : (size_t)rows, base = o->pos + b->row;
    const size_t earliest = base + r / o->group, latest = base + (r + n - 1) / o->group;
    if (latest < key || first_seen(o, earliest) >= key + KEYS) return; /* these rows see none of the keys */
    ahead_t ahead = ahead_of(block + l->words, l->k_words, r / (size_t)rows * l->depth * (KEYS / PANEL));
    for (size_t panel = 0; panel < KEYS / PANEL; panel++, ahead.at += l->depth * ahead.step)
        multiply_tile(pairs, rows, TILE_VECTORS, b->q + r * l->depth, l->depth, block + panel * l->depth * PANEL, PANEL,
                      l->depth, b->scores + panel * PANEL, KEYS, 0, &ahead);
    for (size_t i = 0; i < n; i++) {
        const size_t position = base + (r + i) / o->group, begin = first_seen(o, position);
        const size_t first = begin > key ? begin - key : 0, last = position + 1 > key ? position + 1 - key : 0;
        weigh_row(pairs, b, i, r + i, first < KEYS ? first : KEYS, last < KEYS ? last : KEYS, o->scale * LOG2_E);
    }
    const word_t *v = block + l->k_words;
    float *out = b->out + r * l->width;
    ahead = ahead_of(v + l->words, l->words - l->k_words, r / (size_t)rows * l->keys_depth * (l->width / PANEL));
    size_t column = 0;
    for (; column + PANEL <= l->width; column += PANEL, ahead.at += l->keys_depth * ahead.step)
        multiply_tile(pairs, rows, TILE_VECTORS, b->p, l->keys_depth, v + column, l->width, l->keys_depth, out + column,
                      l->width, 1, &ahead);
    for (; column < l->width; column += LANES)
        multiply_tile(pairs, rows, 1, b->p, l->keys_depth, v + column, l->width, l->keys_depth, out + column, l->width,
                      1, &ahead);
}

/* The attention of all rows to a block, in tiles of about equal heights. Rows that a tile lacks would cost as much as
 * rows that it has. */
FD_INLINE void attend_block(const int pairs, const fd_prompt_t *o, const part_t *b, const word_t *block, size_t key) {
#ifndef FD_OWN_MULTIPLY_TILE
    const size_t tiles = (b->filled + TILE_ROWS - 1) / TILE_ROWS, height = (b->filled + tiles - 1) / tiles;
    if (height <= 2)
        for (size_t r = 0; r < b->filled; r += 2) attend_tile(pairs, 2, o, b, r, block, key);
    else if (height <= 4)
        for (size_t r = 0; r < b->filled; r += 4) attend_tile(pairs, 4, o, b, r, block, key);
    else
#endif
        for (size_t r = 0; r < b->filled; r += TILE_ROWS) attend_tile(pairs, TILE_ROWS, o, b, r, block, key);
}

FD_INLINE fd_status_t attend_part(const uint32_t dtype, const int pairs, const fd_prompt_t *o, size_t head, size_t row,
                                  size_t n) {
    enum { BUFFERS = 6, ALIGNED = 16 };
    const fd_prompt_blocks_t *blocks = o->blocks;
    const layout_t l = layout_of(pairs, blocks->k_size, blocks->v_size);
    const size_t filled = n * o->group, end = o->pos + row + n;
    const size_t rows = (filled + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    const size_t words[BUFFERS] = {rows * l.depth, rows * l.width,           rows,
                                   rows,           TILE_ROWS * l.keys_depth, TILE_ROWS * KEYS};
    size_t total = 0;
    for (int i = 0; i < BUFFERS; i++) total += (words[i] + ALIGNED - 1) / ALIGNED * ALIGNED;
    word_t *memory = aligned_alloc(ALIGNED * sizeof *memory, total * sizeof *memory), *buffers[BUFFERS];
    if (!memory) return FD_INTERNAL;
    memset(memory, 0, total * sizeof *memory);
    for (size_t i = 0, at = 0; i < BUFFERS; i++) {
        buffers[i] = memory + at;
        at += (words[i] + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    const part_t b = {.layout = l,
                      .row = row,
                      .filled = filled,
                      .q = buffers[0],
                      .out = (float *)buffers[1],
                      .most = (float *)buffers[2],
                      .sum = (float *)buffers[3],
                      .p = buffers[4],
                      .scores = (float *)buffers[5]};
    for (size_t r = 0; r < filled; r++) {
        const size_t q_head = head * o->group + r % o->group;
        pack_row(dtype, pairs, at(dtype, o->q, (row + r / o->group) * o->q_row + q_head * blocks->k_size),
                 b.q + r * l.depth, blocks->k_size);
        b.most[r] = -INFINITY;
    }
    for (size_t number = first_seen(o, o->pos + row) / KEYS; number * KEYS < end; number++)
        attend_block(pairs, o, &b, blocks->words + head * blocks->head_words + number * l.words, number * KEYS);
    for (size_t r = 0; r < filled; r++) {
        const size_t q_head = head * o->group + r % o->group;
        const float sink = o->sinks ? exp2f((o->sinks[q_head] - o->scale * b.most[r]) * LOG2_E) : 0.0f;
        void *to = (void *)at(dtype, o->out, (row + r / o->group) * o->out_row + q_head * blocks->v_size);
        finish_row(to, b.out + r * l.width, NO_BIAS, b.sum[r] + sink, (uint32_t)blocks->v_size, dtype);
    }
    free(memory);
    return FD_OK;
}

/* The functions of an activation dtype. */
#define FD_PROMPT_FUNCTIONS(name, dtype, pairs)                                                                        \
    static size_t block_words_##name(size_t k_size, size_t v_size) { return layout_of(pairs, k_size, v_size).words; }  \
    static void pack_##name(const fd_prompt_pack_t *o, size_t head, size_t block) {                                    \
        pack_block(dtype, pairs, o, head, block);                                                                      \
    }                                                                                                                  \
    static fd_status_t attend_##name(const fd_prompt_t *o, size_t head, size_t row, size_t n) {                        \
        return attend_part(dtype, pairs, o, head, row, n);                                                             \
    }

/* The functions of all dtypes, which compute with words of fp32. */
#define FD_PROMPT_OF(name, dtype, text) FD_PROMPT_FUNCTIONS(name, dtype, 0)
#define FD_PROMPT_ENTRY(name, dtype, text, isa) [dtype] = {isa, block_words_##name, pack_##name, attend_##name},
#define FD_PROMPT(isa)                                                                                                 \
    FD_ACT_FORMATS(FD_PROMPT_OF)                                                                                       \
    const fd_prompt_ops_t fd_prompt_##isa[FD_ACT_DTYPES] = {FD_ACT_FORMATS(FD_PROMPT_ENTRY, #isa)};
