/* Kernels for AMX (Intel SDM vol. 1, ch. 18) with AVX-512, VNNI and VBMI. Tiles multiply bf16, int8 and int4; AVX-512
 * does the rest.
 *
 * A tile of K or V is 16 rows of 64 bytes. The words of chunk.h are laid out as a tile product reads them: a tile row
 * has 16 lanes (tokens of K, dimensions of V), and the 16 rows span 64 elements of the sum index in bytes, or 32 in
 * bf16. One tile instruction does the work of 16 vector instructions for each query row, so a chunk is read about as
 * fast as L2 delivers it, however large the GQA group is.
 *
 * The left operand is a tile of up to 16 rows of multipliers, two for each of up to 8 query rows, because the tile
 * products take narrow multipliers. The two rows are the high and the low byte of a 16-bit integer, or a value
 * truncated to bf16 and the remainder truncated to bf16, together 16 bits of significand. int4 is unpacked to bytes
 * first. bf16 products treat subnormals as zeros.
 */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vbmi,amx-tile,amx-int8,amx-bf16")

#include "cpu/amx_tiles.h"
#include "kv_avx512.h"

enum {
    TILE_ROWS = FD_AMX_ROWS,
    TILE_ROW_BYTES = FD_AMX_ROW_BYTES,
    WIDTH = 64, /* lanes of a product: four tiles, which are two columns */
    WIDTH_VECS = WIDTH / LANES
};
enum { ROW_BYTES = FD_COLUMN_LANES * 4 /* bytes of a row of a column of 32-bit words */ };

FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 16; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return format == FD_KV_INT4 ? 4 : 2; }
/* Both bytes of a query's integer are signed, so the largest is 127 * 256 + 127; weights are unsigned. */
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return is_v ? 65535.0f : 32639.0f; }

/* Bytes from a row's high halves to its low halves, which begin in the middle of the row's space, as kv_store_*
 * functions store them. */
FD_INLINE size_t low_half_offset(int is_v) {
    return is_v ? FD_PAGE_TOKENS * sizeof(float) / 2 : FD_MAX_HEAD_SIZE * sizeof(float) / 2;
}

/* The index, for permutex2var_epi8, of the low byte of element e of 64 integers, after packus_epi32 has packed them to
 * 16-bit words, two vectors at a time. */
#define FD_PACKED(e) ((e) / 32 * 64 + 2 * ((e) % 16 / 4 * 8 + (e) / 16 % 2 * 4 + (e) % 4))
#define FD_WORD(e)                                                                                                     \
    FD_PACKED(e), FD_PACKED((e) + 2), FD_PACKED((e) + 1), FD_PACKED((e) + 3) /* in the byte order of chunk.h */
#define FD_WORDS(e) FD_WORD(e), FD_WORD((e) + 4), FD_WORD((e) + 8), FD_WORD((e) + 12)
static const uint8_t packed_words[64] = {FD_WORDS(0), FD_WORDS(16), FD_WORDS(32), FD_WORDS(48)};

#define FD_HAS_STORE_WEIGHTS4
/* Splits four vectors of integers in 0..65535 into unsigned high and low bytes and stores both. */
FD_INLINE void kv_store_weights4(uint8_t *to, const vec_t *x) {
    const __m512i low = _mm512_loadu_si512(packed_words), high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
    const __m512i x01 = _mm512_packus_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const __m512i x23 = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi8(x01, high, x23));
    _mm512_storeu_si512(to + low_half_offset(1), _mm512_permutex2var_epi8(x01, low, x23));
}

/* Splits vector i of a query row's integers into signed high and low bytes and stores both. */
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    const __m512i low = _mm512_cvtps_epi32(x),
                  high = _mm512_srai_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(128)), 8);
    uint8_t *at = (uint8_t *)to + i * LANES;
    store_word_bytes(at, high);
    store_word_bytes(at + low_half_offset(0), low);
}

/* Truncates 2 * LANES floats to bf16 (the high halves) and the remainders to bf16 (the low halves); stores both. */
FD_INLINE void store_split(uint8_t *to, size_t to_low, vec_t x0, vec_t x1) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const vec_t high = vec_bits(_mm512_set1_epi32((int)0xffff0000));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(vec_ints(x0), odd, vec_ints(x1)));
    x0 = vec_sub(x0, _mm512_and_ps(x0, high));
    x1 = vec_sub(x1, _mm512_and_ps(x1, high));
    _mm512_storeu_si512(to + to_low, _mm512_permutex2var_epi16(vec_ints(x0), odd, vec_ints(x1)));
}
#define FD_OWN_STORE_QUERY
FD_INLINE void kv_store_query(fd_kv_dtype_t format, void *to, const float *q, uint32_t head_size) {
    for (uint32_t d = 0; d < head_size; d += 2 * LANES)
        store_split((uint8_t *)to + d * sizeof(uint16_t), low_half_offset(0), vec_load(q + d), vec_load(q + d + LANES));
}

#define FD_OWN_PACK_QUERY_ROWS
/* Packs the queries of a block as rows of a tile: the high halves of a row, its low halves, then the next row. */
FD_INLINE void kv_pack_query_rows(uint8_t *block, const uint8_t *rows, uint32_t n_rows, size_t row_bytes) {
    for (uint32_t r = 0; r < n_rows; r++, block += row_bytes, rows += 2 * low_half_offset(0)) {
        memcpy(block, rows, row_bytes / 2);
        memcpy(block + row_bytes / 2, rows + low_half_offset(0), row_bytes / 2);
    }
}

#include "adjust_simd.h"
#include "softmax_simd.h"
#include "attend_simd.h"

/* Tiles 0 to 3 hold sums, tile 4 the left operand, and tiles 5 and 6 alternate as the right operand. For bf16, tile 4
 * holds the high halves and tile 7 the low halves of the left operand, and their products go into the same sums. */
FD_INLINE void configure_tiles(fd_kv_dtype_t dtype, uint32_t block) {
    fd_amx_config_t config = {.palette = 1};
    for (int tile = 0; tile < FD_AMX_TILES; tile++) {
        config.row_bytes[tile] = TILE_ROW_BYTES;
        config.rows[tile] = tile == 5 || tile == 6 ? TILE_ROWS : dtype == FD_KV_BF16 ? block : 2 * block;
    }
    fd_amx_configure(&config);
}

/* The elements of a word of K or V as the tiles read it; int4 has been unpacked to bytes. */
FD_INLINE uint32_t tile_word_elems(fd_kv_dtype_t format) { return format == FD_KV_BF16 ? 2 : 4; }

/* Unpacks `rows` rows of int4 words to twice as many rows of bytes, and prefetches from `ahead` as much as it reads.
 * This is a pass of its own, because a tile load right after the stores would wait until these reach the cache. */
FD_INLINE void unpack_nibbles(const uint8_t *matrix, uint32_t rows, const uint8_t *ahead, uint8_t *unpacked) {
    const __m512i nibble = _mm512_set1_epi8(0xf);
    for (uint32_t row = 0; row < rows; row++, unpacked += ROW_BYTES)
        for (uint32_t at = 0; at < ROW_BYTES; at += LINE, matrix += LINE, ahead += LINE, unpacked += LINE) {
            const __m512i x = _mm512_load_si512(matrix);
            _mm512_store_si512(unpacked, _mm512_and_si512(x, nibble));
            _mm512_store_si512(unpacked + ROW_BYTES, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
            __builtin_prefetch(ahead, 0, PREFETCH_LOCALITY);
        }
}

/* Copies a tile of V in bf16, whose first row has tokens `token` and `token` + 1, and zeroes tokens outside [lo, hi).
 * A zero weight would not mask those tokens, because zero times NaN is NaN. */
FD_INLINE void zero_masked_tokens(const uint8_t *words, uint32_t token, uint32_t lo, uint32_t hi,
                                  uint8_t tile[][TILE_ROW_BYTES]) {
    for (uint32_t i = 0; i < TILE_ROWS; i++) {
        const uint32_t even = token + 2 * i, odd = even + 1;
        const uint32_t mask = (even >= lo && even < hi ? 0xffffu : 0) | (odd >= lo && odd < hi ? 0xffff0000u : 0);
        _mm512_store_si512(tile[i],
                           _mm512_and_si512(_mm512_loadu_si512(words + i * ROW_BYTES), _mm512_set1_epi32((int)mask)));
    }
}

/* Multiplies one tile of the product's width: sum `i` += left operand times `right`. */
#define FD_TILE(i, right)                                                                                              \
    do {                                                                                                               \
        const uint8_t *words = matrix + (i) / 2 * depth * ROW_BYTES + (i) % 2 * TILE_ROW_BYTES;                        \
        if (format == FD_KV_BF16 && is_v && !b->full) {                                                                \
            zero_masked_tokens(words, step * 2 * TILE_ROWS, b->lo, b->hi, tile[i]);                                    \
            _tile_loadd(right, tile[i], TILE_ROW_BYTES);                                                               \
        } else {                                                                                                       \
            _tile_loadd(right, words, ROW_BYTES);                                                                      \
        }                                                                                                              \
        if (format == FD_KV_BF16) {                                                                                    \
            _tile_dpbf16ps(i, 4, right);                                                                               \
            _tile_dpbf16ps(i, 7, right);                                                                               \
        } else if (is_v) _tile_dpbuud(i, 4, right);                                                                    \
        else _tile_dpbsud(i, 4, right);                                                                                \
        FD_UNROLL                                                                                                      \
        for (uint32_t line = 0; line < TILE_ROWS && format != FD_KV_INT4; line++)                                      \
            __builtin_prefetch(ahead + line * LINE, 0, PREFETCH_LOCALITY);                                             \
        ahead += TILE_ROWS * LINE;                                                                                     \
    } while (0)

/* Multiplies the rows of `left`, whose halves are `half` bytes apart, by two columns of K or V. A column is `depth`
 * rows deep, and its first `steps` tiles are multiplied. products[r] receives the product of row r; for integers,
 * products[2 r] is the product of the row's high bytes and products[2 r + 1] that of its low bytes. The function
 * prefetches from `ahead` as much as it reads, except for int4, which unpack_nibbles has prefetched. */
FD_INLINE void multiply_tiles(const fd_kv_dtype_t format, const int is_v, const block_t *b, const uint8_t *left,
                              size_t half, const uint8_t *matrix, uint32_t depth, uint32_t steps, const uint8_t *ahead,
                              float products[][WIDTH]) {
    uint8_t tile[4][TILE_ROWS][TILE_ROW_BYTES] __attribute__((aligned(64))); /* tiles with masked tokens zeroed */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t step = 0; step < steps; step++, left += TILE_ROW_BYTES, matrix += TILE_ROWS * ROW_BYTES) {
        if (format == FD_KV_BF16) {
            _tile_loadd(4, left, 2 * half);
            _tile_loadd(7, left + half, 2 * half);
        } else {
            _tile_loadd(4, left, half);
        }
        FD_TILE(0, 5);
        FD_TILE(1, 6);
        FD_TILE(2, 5);
        FD_TILE(3, 6);
    }
    _tile_stored(0, products[0], sizeof products[0]);
    _tile_stored(1, products[0] + LANES, sizeof products[0]);
    _tile_stored(2, products[0] + 2 * LANES, sizeof products[0]);
    _tile_stored(3, products[0] + 3 * LANES, sizeof products[0]);
}

/* Vector i of the product of row r, both halves combined. */
FD_INLINE vec_t combine_halves(fd_kv_dtype_t format, float products[][WIDTH], uint32_t r, uint32_t i) {
    if (format == FD_KV_BF16) return vec_load(&products[r][i * LANES]);
    const vec_t high = vec_load(&products[2 * r][i * LANES]), low = vec_load(&products[2 * r + 1][i * LANES]);
    return vec_from_int(vec_add_int(vec_bits(_mm512_slli_epi32(vec_ints(high), 8)), low));
}

/* Returns the address from which block `b` prefetches while it reads from byte `offset` of its chunk. The panel's first
 * block prefetches the next chunk; the other blocks prefetch the lines that they read themselves. */
FD_INLINE const uint8_t *prefetch_from(const block_t *b, size_t offset) {
    return (b->index ? b->chunk : b->next) + offset;
}

/* Computes the scores of a block for all tokens of a chunk. */
FD_INLINE void score_chunk(const fd_kv_dtype_t dtype, const block_t *b, uint8_t *unpacked) {
    const fd_kv_dtype_t format = fd_k_format(dtype);
    float products[2 * MAX_BLOCK][WIDTH] __attribute__((aligned(64)));
    const uint32_t steps = b->head_size / tile_word_elems(format) / TILE_ROWS,
                   stored = fd_k_depth(format, b->head_size);
    const uint32_t depth = format == FD_KV_INT4 ? steps * TILE_ROWS : stored;
    const uint8_t *k = b->chunk, *ahead = prefetch_from(b, 0);
    if (format == FD_KV_INT4) {
        for (uint32_t i = 0; i < FD_PAGE_TOKENS / FD_COLUMN_LANES; i++)
            unpack_nibbles(k + i * stored * ROW_BYTES, stored - 1, ahead + i * stored * ROW_BYTES,
                           unpacked + i * depth * ROW_BYTES);
        k = unpacked;
    }
    for (uint32_t i = 0; i < PAGE_VECS; i++) {
        if (i % WIDTH_VECS == 0) {
            multiply_tiles(format, 0, b, b->q, q_row_bytes(format, b->head_size) / 2, k, depth, steps, ahead, products);
            k += 2 * depth * ROW_BYTES, ahead += 2 * stored * ROW_BYTES;
        }
        vec_t scale = vec_zero(), offset = vec_zero();
        if (fd_kv_is_int(format)) {
            load_affine(format, b->chunk + fd_chunk_k_affine(dtype, b->head_size, i * LANES), &scale, &offset);
            __builtin_prefetch(prefetch_from(b, fd_chunk_k_affine(dtype, b->head_size, i * LANES)), 0,
                               PREFETCH_LOCALITY);
            offset = vec_fma(scale, vec_set1(-(float)fd_zero_point(format)), offset);
        }
        for (uint32_t r = 0; r < b->rows; r++) {
            vec_t s = combine_halves(format, products, r, i % WIDTH_VECS);
            if (fd_kv_is_int(format)) s = vec_fma(s, scale, vec_mul(offset, vec_set1(b->state[r].q_sum)));
            vec_store(&b->weights->of[r][i * LANES], s);
        }
    }
}

/* Splits the fp32 weights that online_softmax stored into the halves of a left operand. */
FD_INLINE void split_weights(const block_t *b, float weights[][FD_PAGE_TOKENS]) {
    const uint32_t first = b->lo / LANES, last = (b->hi + LANES - 1) / LANES;
    for (uint32_t r = 0; r < b->rows; r++) {
        vec_t w[PAGE_VECS];
        FD_UNROLL
        for (uint32_t i = 0; i < PAGE_VECS; i++)
            w[i] = b->full || (i >= first && i < last) ? vec_load(&weights[r][i * LANES]) : vec_zero();
        FD_UNROLL
        for (uint32_t i = 0; i < PAGE_VECS; i += 2)
            store_split((uint8_t *)weights[r] + i * LANES * sizeof(uint16_t), low_half_offset(1), w[i], w[i + 1]);
    }
}

/* Computes acc = rescale * acc + weights times V for a block, for dimensions [from, to). */
FD_INLINE void add_values(const fd_kv_dtype_t dtype, const block_t *b, uint8_t *unpacked) {
    const fd_kv_dtype_t format = fd_v_format(dtype);
    float products[2 * MAX_BLOCK][WIDTH] __attribute__((aligned(64)));
    const uint32_t depth = FD_PAGE_TOKENS / tile_word_elems(format), steps = depth / TILE_ROWS;
    const uint8_t *weights = (const uint8_t *)b->weights->of, *v = b->v;
    /* Where V is a part of K, scores have prefetched all of the next chunk. */
    const uint8_t *ahead = b->v_in_k ? v : prefetch_from(b, fd_chunk_v(dtype, b->head_size));
    if (format == FD_KV_INT4) {
        unpack_nibbles(v, fd_v_depth(format) * (b->to - b->from) / FD_COLUMN_LANES, ahead, unpacked);
        v = unpacked;
    }
    for (uint32_t d = b->from; d < b->to; d += WIDTH) {
        multiply_tiles(format, 1, b, weights, low_half_offset(1), v, depth, steps, ahead, products);
        v += 2 * depth * ROW_BYTES, ahead += 2 * depth * ROW_BYTES;
        for (uint32_t r = 0; r < b->rows; r++) {
            float *acc = b->acc + (size_t)r * b->v_size + d;
            const vec_t old = vec_set1(b->weights->rescale[r]),
                        new = vec_set1(fd_kv_is_int(format) ? b->weights->scale[r] : 1.0f);
            FD_UNROLL
            for (uint32_t i = 0; i < WIDTH_VECS; i++) {
                const vec_t product = combine_halves(format, products, r, i),
                            rescaled = vec_mul(vec_load(acc + i * LANES), old);
                vec_store(acc + i * LANES, vec_fma(product, new, rescaled));
            }
        }
    }
}

FD_INLINE void attend_block(const fd_kv_dtype_t dtype, const block_t *b) {
    /* K, then V of int4, unpacked to bytes. */
    uint8_t unpacked[FD_PAGE_TOKENS * FD_MAX_HEAD_SIZE] __attribute__((aligned(64)));
    if (b->weighs) {
        score_chunk(dtype, b, unpacked);
        if (b->index_scores) {
            add_index_scores((int)b->rows, b);
            return;
        }
        if (b->adjusts) adjust_scores(b, b->weights->of);
        if (b->full) online_softmax(dtype, (int)b->rows, 1, b);
        else online_softmax(dtype, (int)b->rows, 0, b);
        if (dtype == FD_KV_BF16) split_weights(b, b->weights->of);
    }
    if (b->from < b->to) add_values(dtype, b, unpacked);
}

/* Defines the entry point of a KV format. Tiles cover 64 dimensions at a time, so other head sizes are left to AVX-512.
 * So are fewer than `min_rows` rows: tiles save arithmetic only, and tile arithmetic hardly overlaps with waiting for
 * memory, as most vector arithmetic does. */
#define FD_KERNEL(name, dtype, min_rows)                                                                               \
    static void attend_##name##_block(const block_t *b) { attend_block(dtype, b); }                                    \
    static void fd_attend_##name##_amx(const fd_attend_t *a) {                                                         \
        const uint32_t rows = a->q_len * a->group;                                                                     \
        static const block_fn blocks[MAX_BLOCK] = {                                                                    \
            attend_##name##_block, attend_##name##_block, attend_##name##_block, attend_##name##_block,                \
            attend_##name##_block, attend_##name##_block, attend_##name##_block, attend_##name##_block,                \
        };                                                                                                             \
        if (a->head_size % TILE_ROW_BYTES || a->v_size % TILE_ROW_BYTES || rows < min_rows) {                          \
            fd_attend_##name##_avx512vnni(a);                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        configure_tiles(dtype, rows < MAX_BLOCK ? rows : MAX_BLOCK);                                                   \
        attend(dtype, a, blocks);                                                                                      \
        _tile_release();                                                                                               \
    }

FD_KERNEL(bf16, FD_KV_BF16, 9)
FD_KERNEL(int8, FD_KV_INT8, 8)
FD_KERNEL(int4, FD_KV_INT4, 9)
FD_KERNEL(int8_int4, FD_KV_INT8_INT4, 8)

/* Tiles cannot multiply these formats. */
#define fd_attend_fp32_amx fd_attend_fp32_avx512
#define fd_attend_fp16_amx fd_attend_fp16_avx512
#define FD_KV_OPS(name, dtype, text) [dtype] = {"amx", fd_append_##name##_avx512, fd_attend_##name##_amx},
const fd_kv_ops_t fd_kv_ops_amx[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

FD_END_TARGET
#endif
