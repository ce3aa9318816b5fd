/* The vector kernels, written once against the vectors of the ISA's file that includes this.
 *
 * That file defines `vec_t` of LANES floats or 32-bit integers, the vec_* and kv_* primitives on it, MAX_BLOCK (most query rows a
 * register tile holds; block_rows(dtype) of them are used) and tile_vecs(format, rows) (how many vectors of K or V go with
 * that many rows before registers run out). Every function here is inlined into an entry point that fixes dtype and rows, so
 * those parameters cost nothing. Queries and scores go by the format of K, weights and what they add up to by that of V.
 *
 * Blocking. Query rows (all heads of the group, all tokens of the query block) are cut into panels, panels into blocks. A panel may span
 * several KV heads, whose chunks lie one behind the other in a page: what is read from one page is then long, and the prefetch
 * seldom jumps. A panel walks the chunks; in each, a block
 *   1. scores its tokens in tiles of registers: a vector of K is loaded and taken apart once for all rows of the block;
 *   2. masks what a row must not see, updates m and l, turns scores into weights (online softmax, one step a chunk);
 *   3. adds weights times V in tiles of registers, again one load for all rows.
 * Tiles read a chunk from its first byte to its last (chunk.h), and as they go they prefetch what comes prefetch_ahead later, each step as many
 * bytes as it reads itself.
 *
 * Integer formats multiply in integers. A query row is rounded to 16-bit integers once, the weights of a row in a chunk
 * once a chunk, each scaled by its own largest; products of a chunk are summed exactly in 32 bits. (255 * 32767 * 256 < 2^31.)
 * An ISA may say that 8 bits are enough (kv_bits), and round the multipliers of bf16 to bf16 (kv_store_query, kv_store_float_weights).
 * With x = scale * stored + offset, the scales of V go into the weights before they are rounded; the offsets give the same for every
 * dimension and are added at the end.
 *
 * What the caller appends in before_last it appends to a chunk that is in the cache by then. So there must be one panel only: a->heads * a->q_len
 * * a->group <= FD_PANEL_ROWS.
 *
 * Garbage beyond the causal limit: K's tokens are in lanes of their own, which step 2 overwrites with -infinity before anything is
 * computed from them; V beyond the last token that some row of the block sees is not read, or (integers) multiplied by zero.
 */
#ifndef FD_ATTEND_SIMD_H
#define FD_ATTEND_SIMD_H

#include "softmax_simd.h"

/* First query row and rows of block `i` of the `n` that rows [0, rows) are cut into, as evenly as can be. */
FD_INLINE uint32_t block_row(uint32_t rows, uint32_t n, uint32_t i) { return (uint32_t)((uint64_t)rows * i / n); }

/* Elements [d, d + LANES) of x, as far as it has them; then zeros. */
FD_INLINE vec_t load_up_to(const float *x, uint32_t d, uint32_t n) { return d + LANES <= n ? vec_load(x + d) : vec_load_half(x + d); }

/* A query row as a kernel multiplies by it, and its state before the first chunk. */
FD_INLINE void begin_row(const fd_kv_dtype_t dtype, const float *q, uint32_t head_size, uint8_t *multipliers, row_state_t *state) {
    const fd_kv_dtype_t format = fd_k_format(dtype);
    memset(state, 0, sizeof *state);
    state->m = -INFINITY;
    state->unit = 1.0f;
    if (!fd_kv_is_int(format)) {
        kv_store_query(format, multipliers, q, head_size);
        return;
    }
    vec_t max = vec_zero(), sum = vec_zero();
    for (uint32_t d = 0; d < head_size; d += LANES) max = vec_max(max, vec_abs(load_up_to(q, d, head_size)));
    const float largest = vec_reduce_max(max), levels = kv_levels(format, 0);
    if (largest >= FD_TINY) state->unit = largest / levels;
    const vec_t inverse = vec_set1(largest >= FD_TINY ? levels / largest : 0.0f);
    for (uint32_t d = 0; d < head_size; d += LANES) {
        const vec_t x = vec_round(vec_mul(load_up_to(q, d, head_size), inverse));
        sum = vec_add(sum, x);
        kv_store_multipliers(format, multipliers, d / LANES, x);
    }
    state->q_sum = vec_reduce_add(sum);
}

/* What the row's sums give in the end. */
FD_INLINE void end_row(const fd_kv_dtype_t dtype, const row_state_t *state, uint32_t head_size, float *m, float *l, float *acc) {
    *m = state->m * state->unit;
    *l = vec_reduce_add(vec_load(state->l));
    if (!fd_kv_is_int(dtype)) return;
    const float rest = vec_reduce_add(vec_load(state->rest));
    for (uint32_t d = 0; d < head_size; d++) acc[d] += rest;
}

/* Fills in which tokens of the chunk at position `base` the block's rows see, the first of them row `row` of its KV head. */
FD_INLINE void see(block_t *b, const fd_attend_t *a, uint32_t row, uint64_t base) {
    b->lo = FD_PAGE_TOKENS, b->hi = 0, b->full = 1;
    for (uint32_t r = 0; r < b->rows; r++) {
        const uint32_t j = (row + r) / a->group;
        uint32_t lo, hi;
        fd_clip(fd_row_start(a, j), fd_row_end(a, j), base, &lo, &hi);
        b->seen[r].lo = lo, b->seen[r].hi = hi;
        b->full &= lo == 0 && hi == FD_PAGE_TOKENS;
        if (lo < hi && lo < b->lo) b->lo = lo;
        if (lo < hi && hi > b->hi) b->hi = hi;
    }
}

/* Rows [row0, row0 + rows) of every KV head, FD_PANEL_ROWS at most in all. */
FD_INLINE void attend_panel(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks, uint32_t row0, uint32_t rows) {
    /* A kernel may load MAX_BLOCK rows for any block. */
    uint8_t q[(FD_PANEL_ROWS + MAX_BLOCK - 1) * FD_MAX_CHUNK_HEAD * sizeof(float)] __attribute__((aligned(64)));
    row_state_t state[FD_PANEL_ROWS];
    const uint32_t head_size = a->head_size, head_rows = a->q_len * a->group;
    const uint32_t most = block_rows(dtype), n_blocks = (rows + most - 1) / most;
    const size_t row_bytes = q_row_bytes(fd_k_format(dtype), head_size);
    for (uint32_t h = 0; h < a->heads; h++)
        for (uint32_t block = 0; block < n_blocks; block++) {
            const uint32_t r0 = block_row(rows, n_blocks, block), n = block_row(rows, n_blocks, block + 1) - r0;
            uint8_t separate[MAX_BLOCK * ROW_ROOM] __attribute__((aligned(64)));
            for (uint32_t r = 0; r < n; r++)
                begin_row(dtype, a->q + ((size_t)h * head_rows + row0 + r0 + r) * head_size, head_size, separate + r * ROW_ROOM, &state[h * rows + r0 + r]);
            place_rows(q + (h * rows + r0) * row_bytes, separate, n, row_bytes);
        }

    const uint32_t first = row0 / a->group, last = (row0 + rows - 1) / a->group;
    const uint64_t start = fd_row_start(a, first), end = fd_row_end(a, last);
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint64_t base = a->first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start) continue;
        if (base >= end) break;
        const int whole = base >= fd_row_start(a, last) && base + FD_PAGE_TOKENS <= fd_row_end(a, first);
        const int more = c + 1 < a->n_chunks && base + FD_PAGE_TOKENS < end;
        for (uint32_t h = 0; h < a->heads; h++) {
            block_t b = {.chunk = a->chunks[c] + h * a->head_stride, .n_blocks = n_blocks, .head_size = head_size, .bytes = fd_chunk_end(dtype, head_size)};
            b.next = h + 1 < a->heads ? b.chunk + a->head_stride : more ? a->chunks[c + 1] : a->after ? a->after : b.chunk;
            const uint32_t tiles = (FD_PAGE_TOKENS + head_size) / FD_COLUMN_LANES;
            b.early = (more ? a->chunks[c + 1] : a->after ? a->after : b.chunk) + (size_t)h * tiles * early_lines(dtype, (int)rows) * LINE;
            if (h == 0 && c + 1 < a->n_chunks) __builtin_prefetch(a->chunks[c + 1], 0, PREFETCH_LOCALITY); /* its address is translated by then */
            if (!more && a->before_last) a->before_last(a->context, h);
            for (; b.index < n_blocks; b.index++) {
                const uint32_t r = block_row(rows, n_blocks, b.index), i = h * rows + r;
                b.rows = block_row(rows, n_blocks, b.index + 1) - r;
                b.lo = 0, b.hi = FD_PAGE_TOKENS, b.full = 1;
                if (!whole) see(&b, a, row0 + r, base);
                if (b.lo >= b.hi) continue;
                b.q = q + i * row_bytes;
                b.state = state + i;
                b.acc = a->acc + ((size_t)h * head_rows + row0 + r) * head_size;
                blocks[b.rows - 1](&b);
            }
        }
    }
    for (uint32_t i = 0; i < a->heads * rows; i++) {
        const size_t row = (size_t)i / rows * head_rows + row0 + i % rows;
        end_row(dtype, &state[i], head_size, a->m + row, a->l + row, a->acc + row * head_size);
    }
}

/* `blocks` are of the KV dtype. */
FD_INLINE void attend(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks) {
    const uint32_t rows = a->q_len * a->group;
    memset(a->acc, 0, (size_t)a->heads * rows * a->head_size * sizeof *a->acc);
    for (uint32_t r = 0; r < rows; r += FD_PANEL_ROWS)
        attend_panel(dtype, a, blocks, r, rows - r < FD_PANEL_ROWS ? rows - r : FD_PANEL_ROWS);
}

#endif
