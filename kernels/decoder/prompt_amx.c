/* AMX (Intel SDM vol. 1, ch. 18): products of bf16 pairs in tiles of 16 rows, 16 pairs and 16 keys or dimensions.
 * AVX-512 computes the weights between them. The other dtypes take the functions of AVX-512.
 */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512bf16,amx-tile,amx-bf16")

#include "cpu/amx_tiles.h"
#include "cpu/vec_avx512bf16.h"

#define TILE_VECTORS 4
enum { TILE_ROWS = FD_AMX_ROWS, STEP_WORDS = FD_AMX_ROW_BYTES / 4 };

/* Tile registers: 0 to 3 are sums. They are macros because gcc's intrinsics paste the number into an instruction. */
#define ROWS 4
#define COLUMNS 5
#define FOR_TILES(n, f)                                                                                                \
    f(0);                                                                                                              \
    if ((n) == TILE_VECTORS) {                                                                                         \
        f(1);                                                                                                          \
        f(2);                                                                                                          \
        f(3);                                                                                                          \
    }

/* multiply_tile of prompt_simd.h for TILE_ROWS rows and 1 or TILE_VECTORS vectors. */
#define FD_OWN_MULTIPLY_TILE
FD_INLINE void multiply_whole_tile(const int vectors, const uint32_t *a, size_t a_stride, const uint32_t *b,
                                   size_t b_stride, size_t depth, float *c, size_t c_stride, const int add) {
#define LOAD(i) _tile_loadd(i, c + (i) * LANES, c_stride * sizeof *c)
#define ZERO(i) _tile_zero(i)
#define MULTIPLY(i)                                                                                                    \
    _tile_loadd(COLUMNS, b + (i) * LANES, b_stride * sizeof *b);                                                       \
    _tile_dpbf16ps(i, ROWS, COLUMNS)
#define STORE(i) _tile_stored(i, c + (i) * LANES, c_stride * sizeof *c)
    if (add) {
        FOR_TILES(vectors, LOAD)
    } else {
        FOR_TILES(vectors, ZERO)
    }
    for (size_t i = 0; i < depth; i += STEP_WORDS, b += STEP_WORDS * b_stride) {
        _tile_loadd(ROWS, a + i, a_stride * sizeof *a);
        FOR_TILES(vectors, MULTIPLY)
    }
    FOR_TILES(vectors, STORE)
}

#include "prompt_simd.h"

FD_PROMPT_FUNCTIONS(bf16, FD_ACT_BF16, 1)

static fd_status_t attend_in_tiles(const fd_prompt_t *o, size_t head, size_t row, size_t n) {
    fd_amx_config_t config = {.palette = 1};
    for (int i = 0; i <= COLUMNS; i++) config.row_bytes[i] = FD_AMX_ROW_BYTES, config.rows[i] = FD_AMX_ROWS;
    fd_amx_configure(&config);
    const fd_status_t status = attend_bf16(o, head, row, n);
    _tile_release();
    return status;
}

extern const fd_prompt_ops_t fd_prompt_bf16_amx;
const fd_prompt_ops_t fd_prompt_bf16_amx = {"amx", block_words_bf16, pack_bf16, attend_in_tiles};

FD_END_TARGET
#endif
