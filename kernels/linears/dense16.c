/* Picks the functions of an ISA, packs a matrix, and shares its panels among threads. */
#include "dense16.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

#if FD_X86
extern const fd_dense16_ops_t fd_dense16_avx2[FD_ACT_DTYPES], fd_dense16_avx512[FD_ACT_DTYPES];
extern const fd_dense16_ops_t fd_dense16_avx512bf16;
#elif FD_ARM64
extern const fd_dense16_ops_t fd_dense16_neon[FD_ACT_DTYPES];
#endif

const fd_dense16_ops_t *fd_dense16_ops(fd_isa_t isa, uint32_t dtype, uint32_t act) {
    if (isa == FD_ISA_SCALAR || (dtype != FD_ACT_FP16 && dtype != FD_ACT_BF16)) return NULL;
#if FD_X86
    if (isa == FD_ISA_AVX512BF16 && act == FD_ACT_BF16 && dtype == FD_ACT_BF16) return &fd_dense16_avx512bf16;
#endif
    if (act != FD_ACT_FP32) return NULL;
#if FD_X86
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI) return &fd_dense16_avx2[dtype];
    return &fd_dense16_avx512[dtype];
#elif FD_ARM64
    return &fd_dense16_neon[dtype];
#else
    return NULL;
#endif
}

void fd_dense16_pack(const fd_dense16_ops_t *ops, size_t outs, size_t ins, const uint16_t *from, uint16_t *to) {
    enum { AT_ONCE = 64 }; /* inputs: lines of the rows that stay in a cache */
    const size_t panel = ops->panel, t = ops->per_word;
    for (size_t first = 0; first < outs; first += panel, to += ins * panel)
        for (size_t begin = 0; begin < ins; begin += AT_ONCE) {
            const size_t end = begin + AT_ONCE < ins ? begin + AT_ONCE : ins;
            for (size_t j = 0; j < panel; j++)
                for (size_t i = begin; i < end; i++)
                    to[(i / t * panel + j) * t + i % t] = first + j < outs ? from[(first + j) * ins + i] : 0;
        }
}

typedef struct {
    const fd_dense16_ops_t *ops;
    const fd_dense16_t *l;
    const uint8_t *x;
    uint8_t *y;
    size_t rows, blocks, block_rows; /* blocks of at most FD_DENSE16_ROWS rows */
} run_t;

static void run_parts(void *data, size_t first, size_t n) {
    run_t *run = data;
    for (size_t part = first; part < first + n; part++) {
        const size_t row = part % run->blocks * run->block_rows, rows = run->rows - row;
        const uint8_t *x = run->x + row * run->l->ins * run->ops->number_bytes;
        uint8_t *y = run->y + row * run->l->outs * run->ops->number_bytes;
        run->ops->multiply(run->l, x, rows < run->block_rows ? rows : run->block_rows, y, part / run->blocks);
    }
}

void fd_dense16_multiply(const fd_dense16_ops_t *ops, const fd_dense16_t *l, const void *x, size_t rows, void *y,
                         unsigned threads) {
    enum { WORTH_A_THREAD = 1 << 16 }; /* weights that are read sooner than a thread wakes up */
    enum { WORTH_A_TURN = 1 << 16 };   /* multiply-adds that take longer than the threads' hand-over of parts */
    if (!rows) return;
    const size_t most = l->outs * l->ins / WORTH_A_THREAD + 1, blocks = (rows + FD_DENSE16_ROWS - 1) / FD_DENSE16_ROWS;
    const size_t tiles = (rows + FD_DENSE16_TILE - 1) / FD_DENSE16_TILE; /* blocks have much the same number of them */
    run_t run = {ops, l, x, y, rows, blocks, (tiles + blocks - 1) / blocks * FD_DENSE16_TILE};
    const size_t part = ops->panel * l->ins * (rows < run.block_rows ? rows : run.block_rows);
    fd_parallel(run_parts, &run, (l->outs + ops->panel - 1) / ops->panel * blocks, (WORTH_A_TURN + part - 1) / part,
                most < threads ? (unsigned)most : threads);
}
