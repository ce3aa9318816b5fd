/* The two matrix products of a block of query rows, in register tiles (attend_simd.h): scores, and weights times V. */
#pragma once

#include "adjust_simd.h"
#include "softmax_simd.h"

/* Loads LANES words of K or V: fp16 converted to fp32, others as raw 32 bits. */
FD_INLINE vec_t kv_load(fd_kv_dtype_t format, const uint8_t *p) {
    return format == FD_KV_FP16 ? vec_load_fp16(p) : vec_load((const float *)p);
}
/* Loads LANES / 2 words and zeros. Only ISAs with 16 lanes call it; they replace it, as softmax_simd.h says. */
#ifndef FD_OWN_LOAD_HALF
FD_INLINE vec_t kv_load_half(fd_kv_dtype_t format, const uint8_t *p) { return kv_load(format, p); }
#endif

/* The multipliers of a block of rows in memory. The 32 bits that multiply part u of word s for row r are at byte
 * s * word_stride + u * part_stride + r * row_stride. Queries are interleaved (kv_pack_query_rows), so that one step
 * touches few cache lines. Weights lie row by row, as online_softmax stored them. */
typedef struct {
    const uint8_t *at;
    size_t word_stride, part_stride, row_stride;
} multipliers_t;

FD_INLINE multipliers_t query_multipliers(fd_kv_dtype_t format, int rows, const uint8_t *q) {
    const size_t part = rows * sizeof(float);
    return (multipliers_t){q, kv_parts(format) * part, part, sizeof(float)};
}

FD_INLINE multipliers_t weight_multipliers(fd_kv_dtype_t format, float weights[][FD_PAGE_TOKENS]) {
    return (multipliers_t){(const uint8_t *)weights, kv_parts(format) * sizeof(float), sizeof(float),
                           FD_PAGE_TOKENS * sizeof(float)};
}

/* The vectors that one step of a product computes for a block of rows: of scores, or (`is_v`) of O. Constant after
 * inlining. */
typedef struct {
    fd_kv_dtype_t format;
    int is_v, rows, vecs;
    int half; /* the only vector has LANES / 2 lanes */
} tile_t;

/* Words [from, to) of the columns (chunk.h) under a tile; word s is `stride` * s bytes behind `at`. */
typedef struct {
    const uint8_t *at;
    size_t stride;
    uint32_t from, to;
} columns_t;

/* Where the first word's step prefetches, how many bytes a step moves on, and whether that is far ahead, into L2. */
typedef struct {
    const uint8_t *at;
    size_t step;
    int far;
} ahead_t;

#ifdef FD_HAS_NARROW_SUMS
/* Adds the products of one word of each lane of the tile to `narrow`, or (`first`) replaces `narrow` by them. */
FD_INLINE void multiply_word(const tile_t tile, const int first, const uint8_t *word, multipliers_t multipliers,
                             const uint8_t *ahead, vec_t narrow[][MAX_VECS]) {
    const size_t vec_bytes = LANES * fd_word_bytes(tile.format);
    const int parts = kv_parts(tile.format);
    vec_t words[MAX_VECS];
    FD_UNROLL
    for (int i = 0; i < tile.vecs; i++) {
        if (i * vec_bytes % LINE == 0) __builtin_prefetch(ahead + i * vec_bytes, 0, PREFETCH_LOCALITY);
        words[i] = vec_pin(kv_load(tile.format, word + i * vec_bytes));
    }
    FD_UNROLL
    for (int u = 0; u < parts; u++) {
        vec_t x[MAX_VECS];
        FD_UNROLL
        for (int i = 0; i < tile.vecs; i++) x[i] = vec_pin(kv_unpack(tile.format, tile.is_v, words[i], u));
        FD_UNROLL
        for (int r = 0; r < tile.rows; r++) {
            const vec_t y = vec_broadcast(multipliers.at + u * multipliers.part_stride + r * multipliers.row_stride);
            FD_UNROLL
            for (int i = 0; i < tile.vecs; i++)
                narrow[r][i] = first && u == 0 ? kv_multiply_narrow(tile.format, tile.is_v, x[i], y)
                                               : kv_multiply_add_narrow(tile.format, tile.is_v, x[i], y, narrow[r][i]);
        }
    }
}

/* multiply, below, for a format whose products are first summed in 16 bits, over kv_narrow_words words. It multiplies
 * one part of all vectors before the next part. */
FD_INLINE void multiply_narrow(const tile_t tile, columns_t columns, multipliers_t multipliers, const uint8_t *ahead,
                               vec_t sum[][MAX_VECS]) {
    const size_t step = tile.vecs * LANES * fd_word_bytes(tile.format);
    const uint32_t most = kv_narrow_words(tile.format);
    const size_t stride = columns.stride;
    const uint8_t *word = columns.at + columns.from * stride;
    multipliers.at += columns.from * multipliers.word_stride;
    for (uint32_t s = columns.from; s < columns.to;) {
        vec_t narrow[MAX_BLOCK][MAX_VECS];
        multiply_word(tile, 1, word, multipliers, ahead, narrow);
        if (columns.to - s >= most) { /* unrolled, as nearly always */
            FD_UNROLL
            for (uint32_t i = 1; i < most; i++) {
                multipliers_t others = multipliers;
                others.at += i * multipliers.word_stride;
                multiply_word(tile, 0, word + i * stride, others, ahead + i * step, narrow);
            }
            word += most * stride, multipliers.at += most * multipliers.word_stride, ahead += most * step, s += most;
        } else {
            while (word += stride, multipliers.at += multipliers.word_stride, ahead += step, ++s < columns.to)
                multiply_word(tile, 0, word, multipliers, ahead, narrow);
        }
        FD_UNROLL
        for (int r = 0; r < tile.rows; r++) FD_UNROLL
        for (int i = 0; i < tile.vecs; i++) sum[r][i] = kv_widen_add(narrow[r][i], sum[r][i]);
    }
}
#else
FD_INLINE uint32_t kv_narrow_words(fd_kv_dtype_t format) { return 0; }
#endif

/* `far`: into L2, because the line would have left L1 before it is read. */
FD_INLINE void prefetch_line(const uint8_t *line, const int far) {
    if (far) __builtin_prefetch(line, 0, 2);
    else __builtin_prefetch(line, 0, PREFETCH_LOCALITY);
}

/* For each row r and vector i: adds to sum[r][i] the products of the row's multipliers and lanes [i * LANES,
 * (i + 1) * LANES) of a column (chunk.h), over words [from, to) of the column. Bits of a word that are not set in
 * `bits` count as 0. A single row has two sums, one of even and one of odd parts, which shortens the chain of dependent
 * additions (n_sums).
 *
 * A step prefetches a line, loads a line and multiplies it by all rows before it goes on to the next line. This reads
 * memory a fifth faster than all loads and prefetches of the step together; vec_pin keeps the compiler from reordering
 * them. If the multipliers of a step do not fit into registers beside the sums, because words have many parts and there
 * are many rows, a step instead multiplies one part of all vectors before the next part (by_part). */
FD_INLINE void multiply_and_prefetch(const tile_t tile, const uint32_t bits, columns_t columns,
                                     multipliers_t multipliers, ahead_t ahead, const int far, vec_t sum[][MAX_VECS]) {
    const fd_kv_dtype_t format = tile.format;
    const int is_v = tile.is_v, rows = tile.rows, vecs = tile.vecs;
#ifdef FD_HAS_NARROW_SUMS
    if (kv_narrow_words(format)) {
        multiply_narrow(tile, columns, multipliers, ahead.at, sum);
        return;
    }
#endif
    const size_t vec_bytes = LANES * fd_word_bytes(format);
    const int parts = kv_parts(format), by_part = parts > 1 && parts * rows > LANES / 2, step_vecs = by_part ? vecs : 1;
    const uint8_t *word = columns.at + columns.from * columns.stride;
    multipliers.at += columns.from * multipliers.word_stride;
    for (uint32_t s = columns.from; s < columns.to;
         s++, word += columns.stride, multipliers.at += multipliers.word_stride, ahead.at += ahead.step) {
        FD_UNROLL
        for (int i0 = 0; i0 < vecs; i0 += step_vecs) {
            vec_t words[MAX_VECS];
            FD_UNROLL
            for (int i = i0; i < i0 + step_vecs; i++) {
                if (i * vec_bytes % LINE == 0) prefetch_line(ahead.at + i * vec_bytes, far);
                words[i] = vec_pin(tile.half ? kv_load_half(format, word) : kv_load(format, word + i * vec_bytes));
                if (bits != ~0u) words[i] = vec_and_bits(words[i], bits);
            }
            FD_UNROLL
            for (int u = 0; u < parts; u++) {
                vec_t x[MAX_VECS];
                FD_UNROLL
                for (int i = i0; i < i0 + step_vecs; i++) {
                    x[i] = kv_unpack(format, is_v, words[i], u);
                    if (by_part) x[i] = vec_pin(x[i]);
                }
                FD_UNROLL
                for (int r = 0; r < rows; r++) {
                    const vec_t y =
                        vec_broadcast(multipliers.at + u * multipliers.part_stride + r * multipliers.row_stride);
                    const int to_sum = rows == 1 ? u & 1 : r;
                    FD_UNROLL
                    for (int i = i0; i < i0 + step_vecs; i++)
                        sum[to_sum][i] = kv_multiply_add(format, is_v, x[i], y, sum[to_sum][i]);
                }
            }
        }
    }
}

FD_INLINE void multiply(const tile_t tile, const uint32_t bits, columns_t columns, multipliers_t multipliers,
                        ahead_t ahead, vec_t sum[][MAX_VECS]) {
    if (PREFETCH_NEAR && ahead.far) multiply_and_prefetch(tile, bits, columns, multipliers, ahead, 1, sum);
    else multiply_and_prefetch(tile, bits, columns, multipliers, ahead, 0, sum);
}

/* The number of sums for each vector of a tile. */
FD_INLINE int n_sums(const fd_kv_dtype_t format, const int rows) {
    return rows == 1 && kv_parts(format) > 1 && !kv_narrow_words(format) ? 2 : rows;
}

/* The sum of row r and vector i as floats; a single row's two sums are added. */
FD_INLINE vec_t read_sum(const fd_kv_dtype_t format, const int rows, vec_t sum[][MAX_VECS], int r, int i) {
    const int one = n_sums(format, rows) == rows;
    if (!multiplies_ints(format)) return one ? sum[r][i] : vec_add(sum[0][i], sum[1][i]);
    return vec_from_int(one ? sum[r][i] : vec_add_int(sum[0][i], sum[1][i]));
}

/* Half of the bytes of a tile whose vectors are `depth` words deep; 0 if two blocks do not share its prefetches. The
 * loops of sums in 16 bits have no register for a step of their own. */
FD_INLINE size_t half_tile(const fd_kv_dtype_t format, int vecs, uint32_t depth) {
    return kv_narrow_words(format) ? 0 : (size_t)depth * vecs * LANES * fd_word_bytes(format) / 2;
}
/* How many bytes the prefetches of a tile move on with a word of its vectors (prefetch_start). */
FD_INLINE size_t ahead_step(const fd_kv_dtype_t format, const block_t *b, int vecs) {
    const size_t step = vecs * LANES * fd_word_bytes(format);
    return (b->n_blocks == 2 || b->v_in_k) && !kv_narrow_words(format) ? step / 2 : step;
}

/* Computes scores[r][t] = sum over d of q[d][r] K[d][t] for tokens t in [t0, t0 + vecs * LANES). */
FD_INLINE void score_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const block_t *b, uint32_t t0) {
    const fd_kv_dtype_t format = fd_k_format(dtype);
    const size_t word = fd_word_bytes(format);
    const uint32_t steps = b->head_size / fd_word_elems(format), depth = fd_k_depth(format, b->head_size);
    const uint8_t *ahead =
        prefetch_start(dtype, rows, b, t0 * depth * word, t0 / (vecs * LANES), half_tile(format, vecs, steps));
    prefetch_next_page(dtype, rows, b, t0 / FD_COLUMN_LANES);
    vec_t sum[MAX_BLOCK][MAX_VECS];
    FD_UNROLL
    for (int r = 0; r < n_sums(format, rows); r++) FD_UNROLL
    for (int i = 0; i < vecs; i++) sum[r][i] = vec_zero();
    multiply((tile_t){format, 0, rows, vecs, 0}, ~0u,
             (columns_t){b->chunk + fd_lane_offset(format, depth, t0), FD_COLUMN_LANES * word, 0, steps},
             query_multipliers(format, rows, b->q), (ahead_t){ahead, ahead_step(format, b, vecs), b->v_in_k}, sum);
    FD_UNROLL
    for (int i = 0; i < vecs; i++) {
        const uint32_t t = t0 + i * LANES;
        vec_t scale = vec_zero(), offset = vec_zero();
        if (fd_kv_is_int(format)) {
            __builtin_prefetch(ahead + (steps * vecs + i) * LANES * word, 0, PREFETCH_LOCALITY);
            load_affine(format, b->chunk + fd_chunk_k_affine(dtype, b->head_size, t), &scale, &offset);
            if (multiplies_ints(format)) offset = vec_fma(scale, vec_set1(-(float)fd_zero_point(format)), offset);
        }
        FD_UNROLL
        for (int r = 0; r < rows; r++) {
            vec_t s = read_sum(format, rows, sum, r, i);
            if (fd_kv_is_int(format)) s = vec_fma(s, scale, vec_mul(offset, vec_set1(b->state[r].q_sum)));
            vec_store(&b->weights->of[r][t], s);
        }
    }
}

/* Computes acc[r][d] = rescale[r] acc[r][d] + sum over t in [lo, hi) of weights[r][t] V[t][d] for dimensions d in
 * [d0, d0 + vecs * LANES), or [d0, d0 + LANES / 2) if `half`. */
FD_INLINE void value_tile(const fd_kv_dtype_t dtype, const int rows, const int vecs, const int half, const block_t *b,
                          uint32_t d0) {
    const fd_kv_dtype_t format = fd_v_format(dtype);
    const uint32_t elems = fd_word_elems(format), depth = fd_v_depth(format);
    const size_t offset = fd_chunk_v(dtype, b->head_size), stride = fd_lane_stride(format, b->v_size, d0);
    const float *rescale = b->weights->rescale, *weight_scale = b->weights->scale;
    const uint8_t *v = b->v + fd_lane_offset(format, depth, d0 - b->from);
    const multipliers_t w = weight_multipliers(format, b->weights->of);
    const uint8_t *ahead = prefetch_start(dtype, rows, b, offset + d0 * depth * fd_word_bytes(format),
                                          d0 / (vecs * LANES), half_tile(format, vecs, depth));
    prefetch_next_page(dtype, rows, b, (FD_PAGE_TOKENS + d0) / FD_COLUMN_LANES);
    vec_t sum[MAX_BLOCK][MAX_VECS];
    FD_UNROLL
    for (int r = 0; r < n_sums(format, rows); r++) FD_UNROLL
    for (int i = 0; i < vecs; i++) {
        const float *acc = b->acc + (size_t)r * b->v_size + d0 + i * LANES;
        if (fd_kv_is_int(format) || r >= rows) sum[r][i] = vec_zero();
        else sum[r][i] = vec_mul(half ? vec_load_half(acc) : vec_load(acc), vec_set1(rescale[r]));
    }
    const tile_t tile = {format, 1, rows, vecs, half};
    uint32_t from = b->lo / elems, to = (b->hi + elems - 1) / elems;
    if (format == FD_KV_BF16) { /* the first and last word may hold a masked token, whose value may be NaN */
        if (b->lo % 2) {
            multiply(tile, 0xffff0000u, (columns_t){v, stride, from, from + 1}, w, (ahead_t){v, 0, 0}, sum);
            from++;
        }
        if (b->hi % 2) {
            to--;
            multiply(tile, 0xffffu, (columns_t){v, stride, to, to + 1}, w, (ahead_t){v, 0, 0}, sum);
        }
    }
    multiply(tile, ~0u, (columns_t){v, stride, from, to}, w, (ahead_t){ahead, ahead_step(format, b, vecs), b->v_in_k},
             sum);
    FD_UNROLL
    for (int r = 0; r < rows; r++) FD_UNROLL
    for (int i = 0; i < vecs; i++) {
        float *acc = b->acc + (size_t)r * b->v_size + d0 + i * LANES;
        vec_t x = read_sum(format, rows, sum, r, i);
        if (fd_kv_is_int(format)) {
            const vec_t old = vec_mul(half ? vec_load_half(acc) : vec_load(acc), vec_set1(rescale[r]));
            x = vec_fma(x, vec_set1(weight_scale[r]), old);
        }
        if (half) vec_store_half(acc, x);
        else vec_store(acc, x);
    }
}

/* Scores and softmax of a block in a chunk, or its index scores. */
FD_INLINE void compute_weights(const fd_kv_dtype_t dtype, const int rows, const block_t *b) {
    const int score_vecs = tile_vecs(fd_k_format(dtype), rows);
    const uint32_t step = (uint32_t)score_vecs * LANES;
    for (uint32_t t = b->lo / step * step; t < b->hi; t += step) score_tile(dtype, rows, score_vecs, b, t);
    if (b->index_scores) {
        add_index_scores(rows, b);
        return;
    }
    if (b->adjusts) adjust_scores(b, b->weights->of);
    if (b->full) online_softmax(dtype, rows, 1, b);
    else online_softmax(dtype, rows, 0, b);
}

/* Adds weights times V of a block in a chunk, for dimensions [from, to). */
FD_INLINE void add_values(const fd_kv_dtype_t dtype, const int rows, const block_t *b) {
    const int vecs = tile_vecs(fd_v_format(dtype), rows);
    const uint32_t whole_vecs = b->to / LANES;
    uint32_t i = b->from / LANES;
    for (; i + vecs <= whole_vecs; i += vecs) value_tile(dtype, rows, vecs, 0, b, i * LANES);
    if (vecs > 4 && i + 4 <= whole_vecs) value_tile(dtype, rows, 4, 0, b, i * LANES), i += 4;
    if (vecs > 2 && i + 2 <= whole_vecs) value_tile(dtype, rows, 2, 0, b, i * LANES), i += 2;
    if (vecs > 1 && i + 1 <= whole_vecs) value_tile(dtype, rows, 1, 0, b, i * LANES), i += 1;
    if (b->to % LANES) value_tile(dtype, rows, 1, 1, b, i * LANES);
}

FD_INLINE void attend_block(const fd_kv_dtype_t dtype, const int rows, const block_t *b) {
    if ((uint32_t)rows > block_rows(dtype)) __builtin_unreachable(); /* saves the time to compile it */
    if (b->weighs) compute_weights(dtype, rows, b);
    if (b->from < b->to) add_values(dtype, rows, b);
}

/* Defines the block_fn of one KV format for blocks of `rows` rows. */
#define FD_BLOCK(name, dtype, rows)                                                                                    \
    static void attend_##name##_block##rows(const block_t *b) { attend_block(dtype, rows, b); }

/* Define the block_fns of a KV format, and the table of them, where MAX_BLOCK is 4, 6 or 8. The table is indexed by
 * rows
 * - 1, and its first block_rows(dtype) entries are used. */
#define FD_BLOCKS_4(name, dtype)                                                                                       \
    FD_BLOCK(name, dtype, 1)                                                                                           \
    FD_BLOCK(name, dtype, 2)                                                                                           \
    FD_BLOCK(name, dtype, 3)                                                                                           \
    FD_BLOCK(name, dtype, 4)
#define FD_TABLE_4(name) attend_##name##_block1, attend_##name##_block2, attend_##name##_block3, attend_##name##_block4
#define FD_BLOCKS_6(name, dtype)                                                                                       \
    FD_BLOCKS_4(name, dtype)                                                                                           \
    FD_BLOCK(name, dtype, 5)                                                                                           \
    FD_BLOCK(name, dtype, 6)
#define FD_TABLE_6(name) FD_TABLE_4(name), attend_##name##_block5, attend_##name##_block6
#define FD_BLOCKS_8(name, dtype)                                                                                       \
    FD_BLOCKS_6(name, dtype)                                                                                           \
    FD_BLOCK(name, dtype, 7)                                                                                           \
    FD_BLOCK(name, dtype, 8)
#define FD_TABLE_8(name) FD_TABLE_6(name), attend_##name##_block7, attend_##name##_block8

/* Defines fd_attend_<name>_<isa>; `most` is the number of MAX_BLOCK. */
#define FD_ATTEND(name, dtype, isa, most)                                                                              \
    FD_BLOCKS_##most(name, dtype) void fd_attend_##name##_##isa(const fd_attend_t *a);                                 \
    void fd_attend_##name##_##isa(const fd_attend_t *a) {                                                              \
        static const block_fn blocks[MAX_BLOCK] = {FD_TABLE_##most(name)};                                             \
        attend(dtype, a, blocks);                                                                                      \
    }
