/* The portable kernel: the reference of the others, and the one of machines without AVX2. */
#include "cpu/half.h"
#include "linear.h"

static inline int32_t dot_offset(const fd_linear_t *l) { return -l->zero; }
static inline int32_t dot_steps(const fd_linear_t *l) { return 127; }

#include "round_row.h"

static void tile(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES;
    const uint32_t lanes = l->outs - first < FD_LINEAR_LANES ? l->outs - first : FD_LINEAR_LANES;
    const uint8_t *weights = l->weights + tile * fd_linear_tile_bytes(l);
    const size_t groups = (size_t)tile * l->groups * FD_LINEAR_LANES;
    const int32_t low = 1 << FD_LINEAR_LOW_BITS;
    const uint32_t block_bytes = FD_LINEAR_LANES * FD_LINEAR_BLOCK * l->bits / 8;
    for (uint32_t r = 0; r < n; r++) {
        float acc[FD_LINEAR_LANES] = {0};
        for (uint32_t b = 0; b < blocks; b++) {
            const size_t at = (size_t)r * blocks + b;
            const int8_t *x = rows->x + at * l->passes * FD_LINEAR_BLOCK;
            const uint8_t *w = weights + (size_t)b * block_bytes;
            int32_t dot[FD_LINEAR_LANES];
            for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane++) dot[lane] = rows->starts[at];
            for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++)
                for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane++)
                    for (uint32_t j = 0; j < 4; j++) {
                        const uint32_t in_chunk = lane * 4 + j;
                        const int32_t code = l->bits == 8 ? w[c * 64 + in_chunk]
                                                          : w[c / 2 * 64 + in_chunk] >> (c % 2 * 4) & 15;
                        const int32_t q = l->table ? l->table[code] : code;
                        const uint32_t input = c * 4 + j;
                        dot[lane] += q * (l->passes == 1 ? x[input] : x[input] * low + x[FD_LINEAR_BLOCK + input]);
                    }
            const size_t g = groups + b / l->group_blocks * FD_LINEAR_LANES;
            const float scale = rows->scales[at], sum = rows->sums[at];
            for (uint32_t lane = 0; lane < FD_LINEAR_LANES; lane++) {
                const float weight_scale = fd_fp16_to_fp32(l->scales[g + lane]);
                const float min = l->mins ? fd_fp16_to_fp32(l->mins[g + lane]) : 0.0f;
                acc[lane] += (float)dot[lane] * (weight_scale * scale) + min * sum;
            }
        }
        for (uint32_t lane = 0; lane < lanes; lane++)
            y[(size_t)r * rows->stride + first + lane] = acc[lane] * l->units[first + lane] +
                                                         (l->bias ? l->bias[first + lane] : 0.0f);
    }
}

const fd_linear_ops_t fd_linear_ops_scalar = {"scalar", 0, 0, round_row, tile, NULL};
