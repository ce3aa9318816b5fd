/* Rows of a quantised matrix as fp32, for embeddings. */
#include "cpu/half.h"
#include "linear.h"

/* Multiplies a block by H (see linear.h). */
static void hadamard(float *x) {
    for (uint32_t half = 1; half < FD_LINEAR_BLOCK; half *= 2)
        for (uint32_t i = 0; i < FD_LINEAR_BLOCK; i++) {
            if (i & half) continue;
            const float a = x[i], b = x[i + half];
            x[i] = a + b, x[i + half] = a - b;
        }
}

void fd_linear_row(const fd_linear_t *l, uint32_t out, float *row) {
    const uint32_t tile = out / FD_LINEAR_LANES, lane = out % FD_LINEAR_LANES;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l) + lane * 4;
    const size_t groups = (size_t)tile * l->groups * FD_LINEAR_LANES + lane;
    const uint32_t chunk_bytes = FD_LINEAR_LANES * 4, block_bytes = chunk_bytes * FD_LINEAR_BLOCK * l->bits / 32;
    const int32_t signs = l->negated_sums ? 0x80 : 0;
    for (uint32_t b = 0, done = 0; done < l->ins; b++, w += block_bytes, done += FD_LINEAR_BLOCK) {
        const size_t group = groups + (size_t)(b / l->group_blocks) * FD_LINEAR_LANES;
        const float unit = l->units[out], scale = fd_fp16_to_fp32(l->scales[group]) * unit;
        const float min = l->mins ? fd_fp16_to_fp32(l->mins[group]) * unit : 0.0f;
        float block[FD_LINEAR_BLOCK];
        for (uint32_t i = 0; i < FD_LINEAR_BLOCK; i++) {
            const uint32_t chunk = i / 4;
            const int32_t code = l->bits == 8 ? w[chunk * chunk_bytes + i % 4] ^ signs
                                              : w[chunk / 2 * chunk_bytes + i % 4] >> (chunk % 2 * 4) & 15;
            block[i] = (float)((l->table ? l->table[code] : code) - l->zero) * scale + min;
        }
        if (l->hadamard) hadamard(block);
        const uint32_t rest = l->ins - done;
        memcpy(row + done, block, (rest < FD_LINEAR_BLOCK ? rest : FD_LINEAR_BLOCK) * sizeof *row);
    }
}
