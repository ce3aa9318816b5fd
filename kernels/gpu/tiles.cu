/* K and V on their way from pages through shared memory to tensor cores, for attend.cu.
 *
 * In a chunk both K and V lie with the sum index outside and 32 results inside (chunk.h), which tensor cores take as it
 * is. Attention is computed transposed, S^T = K Q^T and O^T = V^T P^T, so that KV is operand A of mma.m16n8k16 (16
 * tokens or dims by 16 of the sum index) and queries are its n. A query is a head of a row; a block serves QUERIES of
 * them, the heads of a KV head's group for one row of a sequence or for several.
 *
 * Lane (g, c) = (lane / 4, lane % 4) of a warp holds of A the rows g and g + 8, and of the sum index the slots 2c, 2c +
 * 1, 2c + 8 and 2c + 9. Which token, dim or sum element stands in which slot is free as long as A and B agree. It is
 * chosen so that one 16-byte read from shared memory is what a lane needs of a row of a column:
 *
 *   fp16         A read is 8 neighbouring results, 2 for each of 4 tiles of 16. Two columns make 64 results, of which
 *                lane g holds 8g .. 8g + 7. A byte permutation makes the pairs of A from two rows.
 *   bf16, int8   A read is 4 results of 2 or 4 sum elements each, for 2 tiles of 16; lane g holds 4g .. 4g + 3 of a
 *                column. Words of bf16 are pairs of A. For int8 a byte permutation puts bytes 0 and 2 (1 and 3) under
 *                the exponent of 1024; subtracting 1152 makes them fp16.
 *
 *   scores   sum index: dims    sum slots of lane c in step i: dims 16i + 4c + {0, 1, 2, 3}, all formats
 *   outputs  sum index: tokens  the tokens that the scores' accumulators hold; fd_transposed turns the 8x8 tiles of P^T
 *            from accumulators (token g, queries 2c, 2c + 1) into operand B (tokens 2c, 2c + 1, query g)
 *
 * A warp takes slabs of 64 tokens, which are half a page, and streams each through its own ring in shared memory, in
 * parts of about 8 KiB, first of K, then of V. No two warps wait for each other before the end. A 16-byte piece of a
 * 128-byte line is stored at piece ^ 2 * (2 bits of the line's number), so that 8 neighbouring lanes read from all 32
 * banks.
 *
 *   FD_GROUP                 query heads of a KV head, at most 16
 *   FD_WARPS, FD_STAGES      warps of a block, and parts in the ring of a warp
 */
constexpr int WARPS = FD_WARPS, STAGES = FD_STAGES, THREADS = WARPS * 32;
constexpr int GROUP = FD_GROUP, EIGHTS = GROUP <= 8 ? 1 : 2, QUERIES = 8 * EIGHTS;
constexpr int BLOCK_ROWS = QUERIES / GROUP; /* rows of a sequence that a block serves */
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

constexpr int divided(int n, int by) { return (n + by - 1) / by; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int SLAB = 64, STEPS = HEAD / 16;                          /* STEPS: of the sum of a score */
constexpr int K_PART = IS_INT8 ? 128 : 64, V_PART = IS_INT8 ? 4 : 2; /* dims of K and columns of V in a part */
constexpr int K_PARTS = divided(HEAD, K_PART), V_PARTS = divided(COLUMNS, V_PART), PARTS = K_PARTS + V_PARTS;
constexpr int LINE = 128, LINE_DIMS = IS_INT8 ? 4 : 2;               /* bytes, and dims of a line of K */
constexpr int K_LINES = smaller(HEAD, K_PART) / LINE_DIMS + IS_INT8; /* lines of a column in the largest part of K */
constexpr int K_LAST_LINES = (HEAD - (K_PARTS - 1) * K_PART) / LINE_DIMS + IS_INT8; /* in the last part of K */
constexpr int V_LINES = IS_INT8 ? 16 : 32; /* lines of a column and slab of V */
constexpr int STAGE_K = 2 * K_LINES * LINE + (IS_INT8 ? SLAB * 4 : 0),
              STAGE_V = (IS_FP16 ? V_PART : smaller(COLUMNS, V_PART)) * V_LINES *
                        LINE; /* fp16: columns are read in pairs */
constexpr int STAGE = larger(STAGE_K, STAGE_V);
constexpr int TILES = IS_FP16 ? 4 * V_PARTS : 2 * COLUMNS; /* of 16 dims of O */
/* A partial result: O [QUERIES][HEAD], m [QUERIES], l [QUERIES]. */
constexpr int PARTIAL = QUERIES * (HEAD + 2), PARTIAL_M = QUERIES * HEAD, PARTIAL_L = PARTIAL_M + QUERIES;
constexpr int RING = larger(STAGES * STAGE, divided(PARTIAL * 4, LINE) * LINE);

/* The token of a slab in tile `tile` of the scores, row g (h = 0) or g + 8 (h = 1); the dim of a tile of O likewise. */
__device__ __forceinline__ int fd_token_of(int tile, int h, int g) {
    return IS_FP16 ? 8 * g + 2 * tile + h : tile / 2 * 32 + 4 * g + tile % 2 * 2 + h;
}
__device__ __forceinline__ int fd_dim_of(int tile, int h, int g) {
    return IS_FP16 ? tile / 4 * 64 + 8 * g + tile % 4 * 2 + h : tile / 2 * 32 + 4 * g + tile % 2 * 2 + h;
}

/* ---- from memory to the ring ---- */

/* Starts copying LINES lines, each of which has `line_bytes` in memory. piece_of(line, piece) is the place of 16 bytes
 * of a line in memory, relative to the line, or -1 if nothing there is needed. */
template <int LINES, int SHIFT, class Piece>
__device__ __forceinline__ void fd_copy_lines(u8 *to, const u8 *from, int line_bytes, int lane, Piece piece_of) {
#pragma unroll
    for (int first = 0; first < LINES; first += 4) {
        const int line = first + lane / 8, piece = lane % 8, at = piece_of(line, piece);
        if (LINES % 4 == 0 || line < LINES)
            fd_copy16(to + line * LINE + (piece ^ (line >> SHIFT & 3) * 2) * 16,
                      at < 0 ? from : from + line * line_bytes + at, at >= 0);
    }
}

/* Starts copying part PART of K of half a chunk, of which the sequence has the first `left` tokens. */
template <int PART>
__device__ __forceinline__ void fd_fill_k(u8 *stage, const u8 *chunk, int half, int left, int lane) {
    constexpr bool LAST = PART == K_PARTS - 1;
    constexpr int LINES = LAST ? K_LAST_LINES : K_PART / LINE_DIMS;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const u8 *from = chunk + (2 * half + y) * K_ROWS * LANES * WORD + PART * K_PART / LINE_DIMS * LINE;
        fd_copy_lines<LINES, IS_INT8 ? 0 : 1>(stage + y * K_LINES * LINE, from, LINE, lane, [=](int, int piece) {
            const int token = 32 * y + (IS_FP16 ? 8 * (piece % 4) : 4 * piece);
            return token < left ? piece * 16 : -1;
        });
    }
    if (LAST && IS_INT8 && lane < 16)
        fd_copy16(stage + 2 * K_LINES * LINE + lane * 16, chunk + V_SCALES + half * SLAB * 4 + lane * 16, true);
}

/* Starts copying part PART of V. The last column may be 16 dims wide; the rest of its lines is not used. */
template <int PART>
__device__ __forceinline__ void fd_fill_v(u8 *stage, const u8 *chunk, int half, int left, int lane) {
#pragma unroll
    for (int x = 0; x < smaller(V_PART, COLUMNS - PART * V_PART); x++) {
        const int column = PART * V_PART + x, wide = smaller(HEAD - column * LANES, LANES), row_bytes = wide * WORD;
        const u8 *from = chunk + V_AT + (column * LANES * V_ROWS + half * (V_ROWS / 2) * wide) * WORD;
        const int line_bytes = IS_FP16 ? 2 * row_bytes : row_bytes;
        fd_copy_lines<V_LINES, IS_FP16   ? 3
                               : IS_BF16 ? 2
                                         : 1>(
            stage + x * V_LINES * LINE, from, line_bytes, lane, [=](int line, int piece) {
                const int in_row = IS_FP16 ? piece % 4 : piece, row = IS_FP16 ? piece / 4 : 0;
                const int token = IS_FP16 ? 2 * line + row : IS_BF16 ? 2 * line : 4 * line;
                return token < left && in_row * 16 < row_bytes ? row * row_bytes + in_row * 16 : -1;
            });
    }
}

template <int PART = 0>
__device__ __forceinline__ void fd_fill(u8 *stage, const u8 *chunk, int half, int left, int part, int lane) {
    if (part == PART) {
        if constexpr (PART < K_PARTS) fd_fill_k<PART>(stage, chunk, half, left, lane);
        else fd_fill_v<PART - K_PARTS>(stage, chunk, half, left, lane);
    } else if constexpr (PART < PARTS - 1) {
        fd_fill<PART + 1>(stage, chunk, half, left, part, lane);
    }
}

/* A word of bf16 holds two tokens. Clears the one behind a sequence's last token in the lines of a part of V: 0 times
 * what memory holds there might be a NaN. */
__device__ __forceinline__ void fd_clear_odd_token(u8 *stage, int left, int lane) {
    if (!IS_BF16 || left >= SLAB || left % 2 == 0) return;
    for (int x = 0; x < smaller(COLUMNS, V_PART); x++)
        *(u16 *)(stage + (x * V_LINES + left / 2) * LINE + lane * 4 + 2) = 0;
    __syncwarp();
}

/* ---- from the ring to products ---- */

__device__ __forceinline__ void fd_read_words(u32 *words, const u8 *at) {
    const uint4 x = fd_read16(at);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}
/* Operand A of tile `tile` from 4 rows of a column of fp16, of which a lane has read 16 bytes each. */
__device__ __forceinline__ void fd_operand_fp16(u32 *a, const u32 (*rows)[4], int tile) {
    a[0] = fd_permute(rows[0][tile], rows[1][tile], 0x5410), a[1] = fd_permute(rows[0][tile], rows[1][tile], 0x7632);
    a[2] = fd_permute(rows[2][tile], rows[3][tile], 0x5410), a[3] = fd_permute(rows[2][tile], rows[3][tile], 0x7632);
}
/* Operand A from the words of two results: of int8 one word each, of bf16 two in a row. */
__device__ __forceinline__ void fd_operand_int8(u32 *a, u32 word, u32 word8) {
    a[0] = fd_minus_1152(fd_permute(word, 0x64646464, 0x4240));
    a[1] = fd_minus_1152(fd_permute(word8, 0x64646464, 0x4240));
    a[2] = fd_minus_1152(fd_permute(word, 0x64646464, 0x4341));
    a[3] = fd_minus_1152(fd_permute(word8, 0x64646464, 0x4341));
}
__device__ __forceinline__ void fd_operand_bf16(u32 *a, const u32 (*rows)[4], int tile) {
    a[0] = rows[0][2 * tile], a[1] = rows[0][2 * tile + 1], a[2] = rows[1][2 * tile], a[3] = rows[1][2 * tile + 1];
}
/* d[tile] += a * b for each eight queries. */
template <int N>
__device__ __forceinline__ void fd_multiply(float (*d)[N][4], int tile, const u32 *a, const u32 (*b)[2]) {
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        if (IS_BF16) fd_multiply_bf16(d[n][tile], a, b[n]);
        else fd_multiply_fp16(d[n][tile], a, b[n]);
    }
}

/* Where lane (g, c) finds its 16 bytes of a line that it reads as c-th of four. */
__device__ __forceinline__ int fd_swizzled(int lane) {
    const int g = lane / 4, c = lane % 4;
    return IS_FP16 ? (g % 4 ^ 2 * c) * 16 : (g ^ 2 * c) * 16; /* fp16: of an even row; an odd row's is ^ 64 */
}

/* Adds to the scores s, tiles of 16 tokens, what a part of K gives. */
template <int PART>
__device__ __forceinline__ void fd_add_scores(float (*s)[4][4], const u8 *stage, const u32 (*q)[EIGHTS][2], int lane) {
    const int g = lane / 4, c = lane % 4, swizzled = fd_swizzled(lane);
    u32 a[4];
#pragma unroll
    for (int i = 0; i < smaller(K_PART / 16, STEPS - PART * (K_PART / 16)); i++) { /* 16 dims */
        const u32(*b)[2] = q[PART * (K_PART / 16) + i];
        if (IS_FP16) {
            u32 rows[4][4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                fd_read_words(rows[e], stage + (g / 4 * K_LINES + 8 * i + 2 * c + e / 2) * LINE +
                                           (e % 2 ? swizzled ^ 64 : swizzled));
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                fd_operand_fp16(a, rows, tile);
                fd_multiply<4>(s, tile, a, b);
            }
            continue;
        }
#pragma unroll
        for (int y = 0; y < 2; y++) {
            u32 rows[2][4];
            const int line = y * K_LINES + (IS_BF16 ? 8 * i + 2 * c : 4 * i + c);
            fd_read_words(rows[0], stage + line * LINE + swizzled);
            if (IS_BF16) fd_read_words(rows[1], stage + (line + 1) * LINE + swizzled);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (IS_BF16) fd_operand_bf16(a, rows, j);
                else fd_operand_int8(a, rows[0][2 * j], rows[0][2 * j + 1]);
                fd_multiply<4>(s, 2 * y + j, a, b);
            }
        }
    }
}

/* Adds to the outputs, tiles of 16 dims, what a part of V gives. p: P^T of each tile of tokens, rows 0..7 and 8..15. */
template <int PART>
__device__ __forceinline__ void fd_add_outputs(float (*out)[TILES][4], const u8 *stage, const u32 (*p)[4][2],
                                               int lane) {
    const int g = lane / 4, c = lane % 4, swizzled = fd_swizzled(lane);
    u32 a[4], b[EIGHTS][2];
#pragma unroll
    for (int i = 0; i < 4; i++) { /* 16 tokens */
        const int y = i / 2, z = i % 2;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                b[n][j] = IS_FP16 ? p[n][i][j]
                                  : fd_permute(p[n][2 * y + j][0], p[n][2 * y + j][1], z ? 0x7632 : 0x5410);
        if (IS_FP16) { /* lane c has tokens 16c + 2i + {0, 8, 1, 9} */
            u32 rows[4][4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                fd_read_words(rows[e], stage + (g / 4 * V_LINES + 8 * c + e % 2 * 4 + i) * LINE +
                                           (e / 2 ? swizzled ^ 64 : swizzled));
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                fd_operand_fp16(a, rows, tile);
                fd_multiply<TILES>(out, 4 * PART + tile, a, b);
            }
            continue;
        }
#pragma unroll
        for (int x = 0; x < smaller(V_PART, COLUMNS - PART * V_PART); x++) { /* tokens 32y + 8c + 4z + {0, 1, 2, 3} */
            u32 rows[2][4];
            const int line = x * V_LINES + (IS_BF16 ? 16 * y + 4 * c + 2 * z : 8 * y + 2 * c + z);
            fd_read_words(rows[0], stage + line * LINE + swizzled);
            if (IS_BF16) fd_read_words(rows[1], stage + (line + 1) * LINE + swizzled);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (IS_BF16) fd_operand_bf16(a, rows, j);
                else fd_operand_int8(a, rows[0][2 * j], rows[0][2 * j + 1]);
                fd_multiply<TILES>(out, 2 * (PART * V_PART + x) + j, a, b);
            }
        }
    }
}
