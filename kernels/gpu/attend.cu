/* Attention of a step's rows over the pages of their sequences. tiles.cu has the way of K and V. */

/* ---- queries ---- */

constexpr int hadamard_size(int left) {
    int size = 128;
    while (size > left) size /= 2;
    return size;
}

/* The Hadamard transform (kernels/cpu/hadamard.h) of a query: lane c holds x[i] = dims 16i + 4c + {0, 1, 2, 3}. */
template <int FIRST = 0> __device__ __forceinline__ void fd_transform_query(float (*x)[4], int c) {
    constexpr int SIZE = hadamard_size(HEAD - FIRST * 16), N = SIZE / 16;
#pragma unroll
    for (int half = 1; half < SIZE; half *= 2) {
        float y[N][4];
#pragma unroll
        for (int at = 0; at < N * 4; at++) {
            const int i = at / 4, e = at % 4;
            const float mine = x[FIRST + i][e];
            const float other = half < 4    ? x[FIRST + i][e ^ half]
                                : half < 16 ? fd_shuffle_xor(mine, half / 4)
                                            : x[FIRST + (i ^ half / 16)][e];
            const bool second = half < 4 ? e & half : half < 16 ? c & half / 4 : i & half / 16;
            y[i][e] = second ? other - mine : mine + other;
        }
#pragma unroll
        for (int at = 0; at < N * 4; at++) x[FIRST + at / 4][at % 4] = y[at / 4][at % 4];
    }
#pragma unroll
    for (int at = 0; at < N * 4; at++) x[FIRST + at / 4][at % 4] *= 1.0f / sqrtf((float)SIZE);
    if constexpr (FIRST + N < STEPS) fd_transform_query<FIRST + N>(x, c);
}

/* Two numbers in the format of operands: fp16, which saturates, or bf16. */
__device__ __forceinline__ u32 fd_operand_pair(float low, float high) {
    if (IS_BF16) return (u32)fd_to_bf16(high) << 16 | fd_to_bf16(low);
    return fd_half_pair(fminf(fmaxf(low, -65504.0f), 65504.0f), fminf(fmaxf(high, -65504.0f), 65504.0f));
}

/* ---- softmax ---- */

/* What a lane holds of the softmax of queries 8n + 2c + j. l is the sum over the lane's tokens only. Scores are powers
 * of two; V of int8 is in units of `unit`. */
struct fd_softmax {
    float m[EIGHTS][2], l[EIGHTS][2], unit;
    int first[EIGHTS][2], seen[EIGHTS][2]; /* the positions that a query sees: from which on, and how many */
    bool sloped;
    float slope[EIGHTS][2]; /* what a position adds to a score (ALiBi) */
};

/* Scales of the tokens that a lane holds, by tile and row: of K for scores, of V in units of state->unit. Returns the
 * factor by which the unit has changed. */
__device__ __forceinline__ float fd_scales(float (*of_k)[2], float (*of_v)[2], const u8 *stage, fd_softmax *state,
                                           int left, int lane) {
    const int g = lane / 4;
    float largest = state->unit;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        u32 words[4], v_words[4];
        fd_read_words(words, stage + (y * K_LINES + K_LAST_LINES - 1) * LINE + g * 16);
        fd_read_words(v_words, stage + 2 * K_LINES * LINE + y * 128 + g * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            of_k[2 * y + i / 2][i % 2] = __uint_as_float(words[i]);
            const float x = 32 * y + 4 * g + i < left ? __uint_as_float(v_words[i]) : 0.0f;
            of_v[2 * y + i / 2][i % 2] = x, largest = fmaxf(largest, x);
        }
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, fd_shuffle_xor(largest, mask));
    const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f, change = state->unit * inverse;
    state->unit = largest;
#pragma unroll
    for (int i = 0; i < 8; i++) of_v[i / 2][i % 2] *= inverse;
    return change;
}

/* Turns the scores of a slab whose first token is at `base` into weights p, and scales what has been summed before. */
__device__ __forceinline__ void fd_weigh(float (*s)[4][4], u32 (*p)[4][2], float (*out)[TILES][4], const u8 *stage,
                                         fd_softmax *state, int base, int left, float scale, float cap, int lane) {
    const int g = lane / 4;
    float of_k[4][2], of_v[4][2], unit_change = 1.0f;
    if (IS_INT8) unit_change = fd_scales(of_k, of_v, stage, state, left, lane);
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        float top[2] = {state->m[n][0], state->m[n][1]}, fade[2];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int tile = i / 4, h = i / 2 % 2, j = i % 2;
            float x = s[n][tile][i % 4] * (IS_INT8 ? scale * of_k[tile][h] : scale);
            if (cap > 0.0f) x = cap - 2.0f * cap / (1.0f + fd_exp2(x)); /* cap * tanh(.): `scale` has the rest */
            const int before = base + fd_token_of(tile, h, g) - state->first[n][j];
            if (state->sloped) x += state->slope[n][j] * (float)(before - state->seen[n][j] + 1);
            s[n][tile][i % 4] = (u32)before < (u32)state->seen[n][j] ? x : -FD_INFINITY;
            top[j] = fmaxf(top[j], s[n][tile][i % 4]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) top[j] = fmaxf(top[j], fd_shuffle_xor(top[j], mask));
            const float before = state->m[n][j];
            state->m[n][j] = top[j];
            if (top[j] == -FD_INFINITY) top[j] = 0.0f; /* nothing seen so far */
            fade[j] = fd_exp2(before - top[j]), state->l[n][j] *= fade[j];
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *x = &s[n][i / 4][i % 4];
            *x = fd_exp2(*x - top[i % 2]), state->l[n][i % 2] += *x;
            if (IS_INT8) *x *= of_v[i / 4][i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float *x = &s[n][i / 2][i % 2 * 2];
            p[n][i / 2][i % 2] = fd_transposed(fd_operand_pair(x[0], x[1]));
        }
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) out[n][i / 4][i % 4] *= fade[i % 2] * unit_change;
    }
}

/* ---- the kernel ---- */

/* Calls the parts of a slab in their order: part(constant). */
template <int N> struct fd_constant {
    static constexpr int value = N;
};
template <int PART = 0, class Call> __device__ __forceinline__ void fd_each_part(Call call) {
    call(fd_constant<PART>());
    if constexpr (PART < PARTS - 1) fd_each_part<PART + 1>(call);
}

/* Merges n partial results of element `at` of O, which lie `stride` floats apart, into x, l and m. */
template <class Load>
__device__ __forceinline__ void fd_merge(const float *partials, int n, int stride, int at, Load load, float *x,
                                         float *l, float *m) {
    const int query = at / HEAD;
    *m = -FD_INFINITY, *l = *x = 0.0f;
    for (int i = 0; i < n; i++) *m = fmaxf(*m, load(partials + i * stride + PARTIAL_M + query));
#pragma unroll 4
    for (int i = 0; i < n; i++) {
        const float *one = partials + i * stride, its = load(one + PARTIAL_M + query);
        const float by = its == -FD_INFINITY ? 0.0f : fd_exp2(its - *m);
        *l += by * load(one + PARTIAL_L + query), *x += by * load(one + at);
    }
}

/* Attends a row of q [counts[0]][q_stride] for each of rows, to the tokens [row.first, row.position] of its sequence,
 * of these only to the last `window`, and to those of its own segment, if these lengths are not 0. `chunks` is the
 * chunk of page 0 and KV head 0; pages are page_bytes apart. A score is scale * q k or, if `softcap` is not 0, softcap
 * * tanh(scale * q k / softcap); to which is added slopes [query heads], if not NULL, times the token's position
 * relative to the row's. `scale` and `softcap` are the bits of floats.
 *
 * With `lse` NULL, o [rows][o_stride] is the answer; `sinks` [query heads], if not NULL, is one more score of each
 * head, without a V. Otherwise o is the answer without sinks, and lse [rows][lse_stride] the log-sum-exp of its scores
 * for each query head. A row that sees nothing has 0 and -INFINITY. A row of no sequence (-1) holds no query: the row
 * before it is a partial one (FD_ROW_PARTIAL of region.h), whose log-sum-exps go to the o row of the row of no
 * sequence.
 *
 * A sequence's slabs are cut into at most gridDim.x equal runs. The last block of a KV head to finish merges their
 * results and resets its counter. `scratch` holds the counters, which are 0 between launches, and partial results.
 *
 *   grid    (splits, KV heads, rows of the size class)
 *   block   THREADS, with WARPS * RING bytes of dynamic shared memory */
FD_KERNEL_OF(THREADS)
fd_attend(const u8 *chunks, const int *table, const fd_step_row *rows, const u32 *counts, const void *q, void *o,
          float *lse, const float *sinks, const float *slopes, u8 *scratch, u32 page_bytes, u32 table_blocks,
          u32 q_stride, u32 o_stride, u32 lse_stride, u32 scale, u32 softcap, u32 window, u32 segment) {
    FD_DYNAMIC_SHARED(shared);
    __shared__ u32 rank;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int split = (int)blockIdx.x, splits = (int)gridDim.x;
    const u32 head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;

    /* The rows of this block: the first one's number in its sequence is a multiple of BLOCK_ROWS. */
    if (row >= counts[0] || rows[row].sequence < 0 || rows[row].index % BLOCK_ROWS) return;
    const int sequence = rows[row].sequence, position = rows[row].position, cut = rows[row].first;
    int n_rows = 1;
    while (n_rows < BLOCK_ROWS && row + n_rows < counts[0] && rows[row + n_rows].sequence == sequence) n_rows++;
    const auto first_seen = [&](int i) {
        const int last = position + i;
        const int in_window = window ? last - (int)window + 1 : 0,
                  in_segment = segment ? last - last % (int)segment : 0;
        return larger(larger(in_window, in_segment), cut);
    };
    const int length = position + n_rows, begin = first_seen(0) / SLAB,
              slabs = larger(divided(length, SLAB) - begin, 0);
    const int rounds = divided(slabs, WARPS), per_split = divided(rounds, splits);
    const int active = per_split ? divided(rounds, per_split) : 1; /* splits that have slabs */
    if (split >= active) return;
    const int first = begin + split * per_split * WARPS + warp;
    const int end = begin + smaller((split + 1) * per_split * WARPS, slabs);

    /* The ring: `produce` starts the copies of the next part into the stage that was used last. */
    u8 *ring = shared + warp * RING;
    const int *pages = table + (u64)(u32)sequence * table_blocks;
    int filling = first, fill_at = 0, use_at = 0, page = first < end ? pages[first / 2] : 0,
        next_page = first + WARPS < end ? pages[(first + WARPS) / 2] : 0;
    const auto produce = [&](int part) {
        if (filling < end)
            fd_fill(ring + fill_at, chunks + fd_chunk_offset(page, page_bytes, head), filling % 2,
                    length - filling * SLAB, part, lane);
        fd_commit();
        fill_at = fill_at == (STAGES - 1) * STAGE ? 0 : fill_at + STAGE;
        if (part < PARTS - 1) return;
        filling += WARPS, page = next_page;
        next_page = filling + WARPS < end ? pages[(filling + WARPS) / 2] : 0;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) produce(i % PARTS);

    u32 q_operand[STEPS][EIGHTS][2];
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        const int query = 8 * n + g, i = query / GROUP;
        const u64 at = (u64)(row + i) * q_stride + (head * GROUP + query % GROUP) * HEAD + 4 * c;
        float x[STEPS][4];
#pragma unroll
        for (int e = 0; e < STEPS * 4; e++)
            x[e / 4][e % 4] = i < n_rows ? fd_load(q, at + e / 4 * 16 + e % 4, FD_ACT) : 0.0f;
        if (FD_HADAMARD && IS_INT8) fd_transform_query(x, c);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int e = 0; e < 2; e++) q_operand[step][n][e] = fd_operand_pair(x[step][2 * e], x[step][2 * e + 1]);
    }

    const float cap = __uint_as_float(softcap) * LOG2_E;
    const float factor = softcap ? 2.0f * LOG2_E * __uint_as_float(scale) / __uint_as_float(softcap)
                                 : LOG2_E * __uint_as_float(scale);
    float out[EIGHTS][TILES][4] = {};
    fd_softmax state;
    state.unit = 0.0f, state.sloped = slopes;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = (8 * n + 2 * c + j) / GROUP;
            state.m[n][j] = -FD_INFINITY, state.l[n][j] = 0.0f;
            state.slope[n][j] = slopes && i < n_rows ? slopes[head * GROUP + (8 * n + 2 * c + j) % GROUP] * LOG2_E
                                                     : 0.0f;
            state.first[n][j] = first_seen(i);
            state.seen[n][j] = i < n_rows ? larger(position + i + 1 - first_seen(i), 0) : 0;
        }

    for (int slab = first; slab < end; slab += WARPS) {
        const int left = length - slab * SLAB;
        float s[EIGHTS][4][4] = {};
        u32 p[EIGHTS][4][2];
        fd_each_part([&](auto constant) {
            constexpr int PART = decltype(constant)::value;
            fd_wait<STAGES - 2>();
            __syncwarp();
            produce((PART + STAGES - 1) % PARTS);
            u8 *stage = ring + use_at;
            use_at = use_at == (STAGES - 1) * STAGE ? 0 : use_at + STAGE;
            if constexpr (PART < K_PARTS) {
                fd_add_scores<PART>(s, stage, q_operand, lane);
                if (PART == K_PARTS - 1) fd_weigh(s, p, out, stage, &state, slab * SLAB, left, factor, cap, lane);
            } else {
                fd_clear_odd_token(stage, left, lane);
                fd_add_outputs<PART - K_PARTS>(out, stage, p, lane);
            }
        });
    }

    /* The warps' results meet in shared memory, each in the ring that its warp has read to the end. */
    fd_wait<0>();
    __syncwarp();
    float *mine = (float *)ring;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) {
            const int dim = fd_dim_of(i / 4, i / 2 % 2, g);
            if (HEAD % 64 == 0 || dim < HEAD)
                mine[(8 * n + 2 * c + i % 2) * HEAD + dim] = out[n][i / 4][i % 4] * (IS_INT8 ? state.unit : 1.0f);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) state.l[n][j] += fd_shuffle_xor(state.l[n][j], mask);
            mine[PARTIAL_M + 8 * n + 2 * c + j] = state.m[n][j], mine[PARTIAL_L + 8 * n + 2 * c + j] = state.l[n][j];
        }
    }
    __syncthreads();

    const bool partial = row + 1 < counts[0] && rows[row + 1].sequence < 0;
    float *sums = lse ? lse + (u64)row * lse_stride : nullptr;
    if (partial) sums = (float *)((u8 *)o + (u64)(row + 1) * o_stride * (FD_ACT == FD_FP32 ? 4 : 2));
    const auto finish = [&](int at, float x, float l, float m) {
        const int query = at / HEAD, dim = at % HEAD;
        const u32 its_row = row + query / GROUP, q_head = head * GROUP + query % GROUP;
        if (sums && dim == 0)
            sums[(u64)(query / GROUP) * lse_stride + q_head] = l > 0.0f ? (m + fd_log2(l)) * LN_2 : -FD_INFINITY;
        if (!sums && sinks && l > 0.0f) l += fd_exp2(sinks[q_head] * LOG2_E - m);
        fd_store(o, (u64)its_row * o_stride + q_head * HEAD + dim, FD_ACT, l > 0.0f ? x / l : 0.0f);
    };
    const u64 pair = (u64)row * heads + head, pairs = (u64)gridDim.z * heads;
    float *partials = (float *)(scratch + (pairs * 4 + 255) / 256 * 256) + pair * splits * PARTIAL;
    float x, l, m;
    for (int at = (int)threadIdx.x; at < n_rows * GROUP * HEAD; at += THREADS) {
        fd_merge((const float *)shared, WARPS, RING / 4, at, [](const float *from) { return *from; }, &x, &l, &m);
        if (active == 1) {
            finish(at, x, l, m);
            continue;
        }
        float *to = partials + split * PARTIAL;
        to[at] = x;
        if (at % HEAD == 0) to[PARTIAL_M + at / HEAD] = m, to[PARTIAL_L + at / HEAD] = l;
    }
    if (active == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) rank = atomicInc((u32 *)scratch + pair, (u32)active - 1); /* the last one sets it back to 0 */
    __syncthreads();
    if (rank != (u32)active - 1) return;
    __threadfence();
    for (int at = (int)threadIdx.x; at < n_rows * GROUP * HEAD; at += THREADS) {
        fd_merge(partials, active, PARTIAL, at, [](const float *from) { return __ldcg(from); }, &x, &l, &m);
        finish(at, x, l, m);
    }
}
