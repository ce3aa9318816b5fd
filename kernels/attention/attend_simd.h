/* The attention kernel of the vector ISAs, written once with the primitives that the including file defines: vec_t, the
 * vec_* and kv_* functions, MAX_BLOCK, block_rows and tile_vecs (docs/adding-an-isa.md lists them all).
 *
 * Every function here is inlined into an entry point that fixes the KV format and the number of rows, so branches on
 * these parameters cost nothing. Functions on queries and scores take the format of K, functions on weights and outputs
 * the format of V.
 *
 * Blocking. A query row is one query head of one query token. The rows of an fd_attend_t are cut into panels, and
 * panels into blocks. A panel may span several KV heads, whose chunks are adjacent in a page: the kernel then reads
 * longer runs of memory and jumps to another page less often. A panel walks over the chunks; in each chunk, each block
 *   1. computes scores in register tiles: it loads and unpacks a vector of K once for all rows of the block;
 *   2. masks the tokens that a row must not see, updates m and l, and turns scores into weights (online softmax, one
 *      step for each chunk);
 *   3. adds weights times V to acc in register tiles, again with one load for all rows.
 * The kernel converts the queries of a head right before the head's first chunk and writes the head's O rows right
 * after its last chunk. This spreads the work, so that prefetched lines arrive while it is done and its data is still
 * in L1.
 *
 * Tiles read a chunk from its first byte to its last (chunk.h). For each line that they read, they prefetch the line
 * prefetch_ahead() bytes further on.
 *
 * Integer formats multiply in integers. A query row is transformed as K was (cpu/hadamard.h) and rounded to 16-bit
 * integers once, and the weights of a row once for each chunk; each row is scaled by its largest magnitude (q_scale,
 * weight_scale). The products of a chunk are summed exactly in 32 bits, because 255 * 32767 * 256 < 2^31; a longer
 * query row of int8 is rounded to 15 bits. An ISA may round to 8 bits instead (kv_bits, kv_size), and may round the
 * multipliers of bf16 to bf16 (kv_store_query, kv_store_float_weights). With V = scale * stored + offset, the scales
 * are multiplied into the weights before the weights are rounded. The offsets contribute the same amount to every
 * dimension, which is summed in row_state_t.bias and added to O at the end. If V was transformed, the kernel then
 * transforms O back, unless the caller does.
 *
 * Where V is a part of K, a panel computes the weights of all its blocks in a chunk before it adds V.
 *
 * A panel calls before_last_chunk for each head, so an fd_attend_t with before_last_chunk must fit into one panel:
 * heads * q_len * group <= FD_PANEL_ROWS.
 *
 * Uninitialised memory beyond the causal limit cannot reach a result. Each token of K has a lane of its own, and step 2
 * overwrites the lanes of masked tokens with -infinity before it uses them. The kernel does not read V beyond the last
 * token that some row of the block sees, or (integers) multiplies it by zero.
 */
#pragma once

#include "merge_simd.h"
#include "softmax_simd.h"
#include "values_simd.h"

/* The first row of block `i`, if `rows` rows are cut into `n` blocks as evenly as possible. */
FD_INLINE uint32_t block_first_row(uint32_t rows, uint32_t n, uint32_t i) { return (uint32_t)((uint64_t)rows * i / n); }

/* Elements [d, d + LANES) of x, which has n elements, a multiple of 8; zeros beyond the last. */
FD_INLINE vec_t load_tail(const float *x, uint32_t d, uint32_t n) {
    return d + LANES <= n ? vec_load(x + d) : vec_load_half(x + d);
}

/* Converts a query row to multipliers and sets the row's state to that before the first chunk. A row below the limit
 * counts as zeros. With `slopes` the limit is higher, because slopes are divided by q_scale: a query so small does not
 * change a score to which a slope is added. */
FD_INLINE void init_row(const fd_kv_dtype_t dtype, const float *q, uint32_t head_size, int slopes, uint8_t *multipliers,
                        row_state_t *state) {
    const fd_kv_dtype_t format = fd_k_format(dtype);
    memset(state, 0, sizeof *state);
    state->m = -INFINITY;
    state->q_scale = 1.0f;
    if (!multiplies_ints(format)) {
        kv_store_query(format, multipliers, q, head_size);
        for (uint32_t d = 0; fd_kv_is_int(format) && d < head_size; d++) state->q_sum += q[d];
        return;
    }
    vec_t max = vec_zero(), sum = vec_zero();
    for (uint32_t d = 0; d < head_size; d += LANES) max = vec_max(max, kv_size(format, 0, load_tail(q, d, head_size)));
    /* The sums of more than 256 products of 16 bits and 8 bits would not fit into 32 bits. */
    const int halve = fd_elem_bits(format) == 8 && kv_bits(format) == 16 && head_size > 256;
    const float largest = vec_reduce_max(max), qmax = halve ? kv_qmax(format, 0) / 2 : kv_qmax(format, 0);
    const int nonzero = largest >= (slopes ? 1e-20f : FD_TINY);
    if (nonzero) state->q_scale = largest / qmax;
    const vec_t inverse = vec_set1(nonzero ? qmax / largest : 0.0f);
    uint32_t d = 0;
    for (; d + 4 * LANES <= head_size; d += 4 * LANES) {
        vec_t x[4];
        FD_UNROLL
        for (int i = 0; i < 4; i++) x[i] = vec_round(vec_mul(vec_load(q + d + i * LANES), inverse));
        sum = vec_add(sum, vec_add(vec_add(x[0], x[1]), vec_add(x[2], x[3])));
        kv_store_multipliers4(format, multipliers, d / LANES, x);
    }
    for (; d < head_size; d += LANES) {
        const vec_t x = vec_round(vec_mul(load_tail(q, d, head_size), inverse));
        sum = vec_add(sum, x);
        kv_store_multipliers(format, multipliers, d / LANES, x);
    }
    state->q_sum = vec_reduce_add(sum);
}

/* Finds the tokens that the block's rows see in the chunk whose first token is at position `base`. `row` is the index
 * of the block's first row in its KV head. */
FD_INLINE void find_visible(block_t *b, const fd_attend_t *a, uint32_t row, uint64_t base) {
    b->lo = FD_PAGE_TOKENS, b->hi = 0, b->full = 1;
    for (uint32_t r = 0; r < b->rows; r++) {
        const uint32_t j = (row + r) / a->group;
        uint32_t lo, hi;
        fd_clip(fd_visible_start(a, j), fd_visible_end(a, j), base, &lo, &hi);
        b->visible[r].lo = lo, b->visible[r].hi = hi;
        b->full &= lo == 0 && hi == FD_PAGE_TOKENS;
        if (lo < hi && lo < b->lo) b->lo = lo;
        if (lo < hi && hi > b->hi) b->hi = hi;
    }
}

enum { LEAST_BLOCK = 4 }; /* block_rows of any format is at least this */

/* Multipliers and softmax state of query rows [row0, row0 + rows) of each KV head; FD_PANEL_ROWS rows at most. */
typedef struct {
    /* The multipliers of all rows. There is room behind the last row, because a kernel may load MAX_BLOCK rows for a
     * smaller block. */
    uint8_t q[(FD_PANEL_ROWS + MAX_BLOCK - 1) * FD_MAX_HEAD_SIZE * sizeof(float)] __attribute__((aligned(64)));
    row_state_t state[FD_PANEL_ROWS];
    /* Where V is a part of K, each block of a KV head has its own; else all blocks use the first. */
    weights_t weights[FD_PANEL_ROWS / LEAST_BLOCK];
    /* What take_values writes. */
    uint8_t values[FD_PAGE_TOKENS * VALUES_STEP * sizeof(float)] __attribute__((aligned(64)));
    uint32_t row0, rows, n_blocks; /* for each head */
    size_t row_bytes;              /* bytes of multipliers for one row of q */
} panel_t;

/* Prefetches the next `lines` lines at *ahead, if *ahead is not NULL. The work between two tiles calls this, because
 * memory would otherwise be idle once it has read what the last tile prefetched. */
FD_INLINE void prefetch_on(const uint8_t **ahead, const int lines) {
    if (!*ahead) return;
    for (int i = 0; i < lines; i++, *ahead += LINE) __builtin_prefetch(*ahead, 0, PREFETCH_LOCALITY);
}
/* The lines that are prefetched for each query row that is converted, and for each token that is appended. */
enum { LINES_PER_ROW = 4, LINES_PER_TOKEN = 8 };

/* Row `row` of KV head `head` in acc. */
FD_INLINE float *acc_row(const fd_attend_t *a, uint32_t head, uint32_t row) {
    return a->acc + ((size_t)head * a->q_len * a->group + row) * a->v_size;
}

/* Prepares a head's rows for its first chunk: multipliers and softmax state. */
FD_INLINE void init_rows(const fd_kv_dtype_t dtype, const fd_attend_t *a, const uint32_t head_size, panel_t *p,
                         uint32_t head, const uint8_t **ahead) {
    for (uint32_t block = 0; block < p->n_blocks; block++) {
        const uint32_t r0 = block_first_row(p->rows, p->n_blocks, block),
                       n = block_first_row(p->rows, p->n_blocks, block + 1) - r0;
        uint8_t stored[MAX_BLOCK * STORED_ROW_BYTES] __attribute__((aligned(64)));
        float q[MAX_BLOCK][FD_MAX_HEAD_SIZE] __attribute__((aligned(64)));
        /* Two loops: each is a chain of operations for a row, and a core overlaps the chains of more rows if they are
         * short. */
        for (uint32_t r = 0; r < n; r++) {
            load_act(q[r], a->q + fd_q_offset(a, head, p->row0 + r0 + r), head_size, a->act_dtype, a->softmax_scale);
            if (fd_transforms_qk(dtype, a->hadamard)) fd_transform_qk(q[r], q[r], head_size, a->v_size, (int)a->v_in_k);
            prefetch_on(ahead, LINES_PER_ROW);
        }
        for (uint32_t r = 0; r < n; r++)
            init_row(dtype, q[r], head_size, a->slopes != NULL, stored + r * STORED_ROW_BYTES,
                     &p->state[head * p->rows + r0 + r]);
        kv_pack_query_rows(p->q + (head * p->rows + r0) * p->row_bytes, stored, n, p->row_bytes);
    }
}

/* Writes the results of a head's rows: m, l, and O rows if the caller wants them, else acc. */
FD_INLINE void finish_rows(const fd_kv_dtype_t dtype, const fd_attend_t *a, const uint32_t v_size, const panel_t *p,
                           uint32_t head, const uint8_t **ahead) {
    const int transforms = fd_transforms_vo(dtype, (int)a->v_in_k, a->hadamard);
    for (uint32_t r = 0; transforms && r < p->rows; r++) { /* the transform is its own inverse */
        float *acc = acc_row(a, head, p->row0 + r);
        fd_hadamard(acc, acc, v_size);
    }
    for (uint32_t r = 0; r < p->rows; r++) {
        prefetch_on(ahead, LINES_PER_ROW);
        const row_state_t *state = &p->state[head * p->rows + r];
        const uint32_t row = p->row0 + r;
        const size_t i = (size_t)head * a->q_len * a->group + row;
        float *acc = acc_row(a, head, row);
        float l = vec_reduce_add(vec_load(state->l));
        const float m = state->m * state->q_scale;
        float bias = fd_kv_is_int(dtype) ? vec_reduce_add(vec_load(state->bias)) : NO_BIAS;
        if (transforms) {
            fd_add_hadamard(acc, v_size, bias);
            bias = NO_BIAS;
        }
        a->m[i] = m;
        a->l[i] = l;
        if (a->o) {
            if (a->sinks) l = fd_add_sink(l, m, a->sinks[head * a->group + row % a->group]);
            finish_row(a->o + fd_o_offset(a, head, row), acc, bias, l, v_size, a->act_dtype);
            continue;
        }
        for (uint32_t d = 0; fd_kv_is_int(dtype) && !transforms && d < v_size; d++) acc[d] += bias;
    }
}

/* init_rows, which a zeroed acc follows, and finish_rows, with the usual head size, 128, as a constant, so that a row
 * stays in registers. */
FD_INLINE void init_head(const fd_kv_dtype_t dtype, const fd_attend_t *a, panel_t *p, uint32_t head,
                         const uint8_t **ahead) {
    if (a->head_size == 128) init_rows(dtype, a, 128, p, head, ahead);
    else init_rows(dtype, a, a->head_size, p, head, ahead);
    memset(acc_row(a, head, p->row0), 0, (size_t)p->rows * a->v_size * sizeof *a->acc);
}
FD_INLINE void finish_head(const fd_kv_dtype_t dtype, const fd_attend_t *a, const panel_t *p, uint32_t head,
                           const uint8_t **ahead) {
    if (a->v_size == 128) finish_rows(dtype, a, 128, p, head, ahead);
    else finish_rows(dtype, a, a->v_size, p, head, ahead);
}

/* Prefetches the panel's rows of KV head `head` in `rows`, which is q or (`write`) o. */
FD_INLINE void prefetch_rows(const fd_attend_t *a, const panel_t *p, uint32_t head, const uint8_t *rows,
                             const int write) {
    const size_t bytes = a->group * (write ? a->v_size : a->head_size) * fd_act_bytes(a->act_dtype);
    for (uint32_t token = p->row0 / a->group; token <= (p->row0 + p->rows - 1) / a->group; token++)
        for (size_t i = 0; i < bytes; i += LINE) {
            const uint32_t row = token * a->group;
            const uint8_t *at = rows + (write ? fd_o_offset(a, head, row) : fd_q_offset(a, head, row)) + i;
            if (write) __builtin_prefetch(at, 1);
            else __builtin_prefetch(at, 0);
        }
}

/* Writes the result of query rows [row0, row0 + rows) of each KV head when they see no token of the chunks. Calls of
 * init_head and finish_head would write the same, but each inlined copy of them is larger than the rest of
 * attend_panel. */
static void write_unattended_rows(const fd_attend_t *a, uint32_t row0, uint32_t rows) {
    for (uint32_t h = 0; h < a->heads; h++)
        for (uint32_t row = row0; row < row0 + rows; row++) {
            const size_t i = (size_t)h * a->q_len * a->group + row;
            a->m[i] = -INFINITY;
            a->l[i] = 0.0f;
            if (a->o) memset(a->o + fd_o_offset(a, h, row), 0, a->v_size * fd_act_bytes(a->act_dtype));
            else memset(acc_row(a, h, row), 0, a->v_size * sizeof *a->acc);
        }
}

/* Attends the panel's blocks of a KV head to a chunk. `b` has the fields that all blocks share. */
FD_INLINE void attend_blocks(const fd_attend_t *a, const block_fn *blocks, panel_t *p, block_t b,
                             const int all_visible) {
    for (b.index = 0; b.index < p->n_blocks; b.index++) {
        const uint32_t r = block_first_row(p->rows, p->n_blocks, b.index), i = b.head * p->rows + r;
        b.rows = block_first_row(p->rows, p->n_blocks, b.index + 1) - r;
        b.lo = 0, b.hi = FD_PAGE_TOKENS, b.full = 1;
        if (!all_visible) find_visible(&b, a, p->row0 + r, b.base);
        if (b.lo >= b.hi) continue;
        b.q = p->q + i * p->row_bytes;
        b.state = p->state + i;
        b.acc = acc_row(a, b.head, p->row0 + r);
        b.row = p->row0 + r;
        b.weights = &p->weights[b.v_in_k ? b.index : 0];
        blocks[b.rows - 1](&b);
    }
}

/* Adds weights times V where V is a part of K, VALUES_STEP dimensions at a time: taken out of K, they stay in L1 for
 * all blocks. Only tokens before position `end` are seen. Prefetches the part of the next chunk that no tile does
 * (prefetch_start). */
FD_INLINE void attend_values_in_k(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks, panel_t *p,
                                  block_t b, const int all_visible, uint64_t end) {
    const uint32_t tokens = end - b.base < FD_PAGE_TOKENS ? (uint32_t)(end - b.base) : FD_PAGE_TOKENS;
    for (size_t at = fd_chunk_end(dtype, b.head_size, b.v_size, 0) / 2 / LINE * LINE; at < b.chunk_bytes; at += LINE)
        __builtin_prefetch(b.next + at, 0, 2);
    b.weighs = 0, b.v = p->values;
    for (b.from = 0; b.from < b.v_size; b.from = b.to) {
        b.to = b.from + VALUES_STEP < b.v_size ? b.from + VALUES_STEP : b.v_size;
        take_values(fd_k_format(dtype), &b, tokens, p->values);
        attend_blocks(a, blocks, p, b, all_visible);
    }
}

/* Attends query rows [row0, row0 + rows) of each KV head, one panel, to all chunks. */
FD_INLINE void attend_panel(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks, uint32_t row0,
                            uint32_t rows) {
    const uint32_t head_size = a->head_size, v_size = a->v_size, max_rows = block_rows(dtype);
    const int adjusts = a->softcap != 0.0f || a->slopes, by_amd = PREFETCH_BY_VENDOR && fd_by_amd();
    panel_t p;
    p.row0 = row0, p.rows = rows, p.n_blocks = (rows + max_rows - 1) / max_rows,
    p.row_bytes = q_row_bytes(fd_k_format(dtype), head_size);
    const uint32_t first = row0 / a->group, last = (row0 + rows - 1) / a->group;
    const uint64_t start = fd_visible_start(a, first), end = fd_visible_end(a, last);
    int initialized = 0;
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint64_t base = a->first_token + (uint64_t)c * FD_PAGE_TOKENS;
        if (base + FD_PAGE_TOKENS <= start) continue;
        if (base >= end) break;
        const int all_visible = base >= fd_visible_start(a, last) && base + FD_PAGE_TOKENS <= fd_visible_end(a, first);
        const int more_chunks = c + 1 < a->n_chunks && base + FD_PAGE_TOKENS < end;
        for (uint32_t h = 0; h < a->heads; h++) {
            const uint8_t *chunk = a->chunks[c] + h * a->head_stride;
            const uint8_t *next_page = more_chunks ? a->chunks[c + 1] : a->prefetch_next ? a->prefetch_next : chunk;
            block_t b = {.chunk = chunk,
                         .n_blocks = p.n_blocks,
                         .head_size = head_size,
                         .v_size = v_size,
                         .v_in_k = (int)a->v_in_k,
                         .chunk_bytes = fd_chunk_end(dtype, head_size, v_size, (int)a->v_in_k),
                         .by_amd = by_amd,
                         .adjusts = adjusts,
                         .a = a,
                         .head = h,
                         .base = base};
            b.next = h + 1 < a->heads ? chunk + a->head_stride : next_page;
            const uint32_t tiles = (FD_PAGE_TOKENS + v_size) / FD_COLUMN_LANES;
            b.next_page = next_page + (size_t)h * tiles * early_lines_per_tile(dtype, (int)rows) * LINE;
            if (h == 0) __builtin_prefetch(next_page, 0, PREFETCH_LOCALITY); /* loads the page's TLB entry early */
            /* What the tiles of this chunk and of the next one begin to prefetch. */
            const size_t distance = prefetch_ahead(dtype, (int)rows, prefetch_near(&b));
            const int spreads = p.n_blocks == 1 && distance < b.chunk_bytes && !a->v_in_k;
            const uint8_t *ahead = spreads ? chunk + distance : NULL, *next_ahead = spreads ? b.next + distance : NULL;
            if (!initialized) init_head(dtype, a, &p, h, &ahead);
            if (!initialized && h + 1 < a->heads) prefetch_rows(a, &p, h + 1, a->q, 0);
            if (!more_chunks && a->o) prefetch_rows(a, &p, h, a->o, 1);
            if (!more_chunks && a->before_last_chunk) {
                prefetch_on(&ahead, LINES_PER_TOKEN);
                a->before_last_chunk(a->context, h);
            }
            b.weighs = 1, b.from = 0, b.to = a->v_in_k ? 0 : v_size, b.v = chunk + fd_chunk_v(dtype, head_size);
            attend_blocks(a, blocks, &p, b, all_visible);
            if (a->v_in_k) attend_values_in_k(dtype, a, blocks, &p, b, all_visible, end);
            if (!more_chunks) finish_head(dtype, a, &p, h, &next_ahead);
        }
        if (!more_chunks) return;
        initialized = 1;
    }
    write_unattended_rows(a, row0, rows);
}

/* Index scores of trained sparse attention (DeepSeek-V3.2, arXiv 2512.02556, equation 1): the query rows are heads of
 * an indexer, and all of them share the index key of a token. Adds the scores of one panel's heads, [row0, row0 +
 * rows), to those of the heads before it. */
FD_INLINE void index_panel(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks, uint32_t row0,
                           uint32_t rows) {
    const uint32_t max_rows = block_rows(dtype);
    float weights[FD_PANEL_ROWS];
    const uint8_t *nothing_ahead = NULL;
    panel_t p;
    p.row0 = row0, p.rows = rows, p.n_blocks = (rows + max_rows - 1) / max_rows,
    p.row_bytes = q_row_bytes(fd_k_format(dtype), a->head_size);
    init_rows(dtype, a, a->head_size, &p, 0, &nothing_ahead);
    for (uint32_t r = 0; r < rows; r++) weights[r] = a->index_weights[row0 + r] * p.state[r].q_scale;
    for (uint32_t c = 0; c < a->n_chunks; c++) {
        const uint8_t *next = c + 1 < a->n_chunks ? a->chunks[c + 1] : a->chunks[c];
        block_t b = {.chunk = a->chunks[c],
                     .next = next,
                     .next_page = next,
                     .chunk_bytes = fd_chunk_end(dtype, a->head_size, a->v_size, 1),
                     .n_blocks = p.n_blocks,
                     .head_size = a->head_size,
                     .weighs = 1,
                     .hi = FD_PAGE_TOKENS,
                     .full = 1,
                     .by_amd = PREFETCH_BY_VENDOR && fd_by_amd(),
                     .weights = p.weights,
                     .index_scores = a->index_scores + (size_t)c * FD_PAGE_TOKENS};
        if (!row0) memset(b.index_scores, 0, FD_PAGE_TOKENS * sizeof *b.index_scores);
        for (; b.index < p.n_blocks; b.index++) {
            const uint32_t r = block_first_row(rows, p.n_blocks, b.index);
            b.rows = block_first_row(rows, p.n_blocks, b.index + 1) - r;
            b.q = p.q + r * p.row_bytes;
            b.state = p.state + r;
            b.index_weights = weights + r;
            blocks[b.rows - 1](&b);
        }
    }
}

/* The body of an entry point: attends all query rows of `a`, or computes their index scores. blocks[n - 1] handles
 * blocks of n rows in format `dtype`. */
FD_INLINE void attend(const fd_kv_dtype_t dtype, const fd_attend_t *a, const block_fn *blocks) {
    const uint32_t rows = a->q_len * a->group;
    for (uint32_t r = 0; r < rows; r += FD_PANEL_ROWS) {
        const uint32_t n = rows - r < FD_PANEL_ROWS ? rows - r : FD_PANEL_ROWS;
        if (a->index_scores) index_panel(dtype, a, blocks, r, n);
        else attend_panel(dtype, a, blocks, r, n);
    }
}
