/* Picks the functions of an ISA, packs a matrix, and shares its panels among threads. */
#include "dense16.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

FD_VECTOR_OPS(fd_dense16_ops_t, fd_dense16);
extern const fd_dense16_ops_t fd_dense16_avx512bf16, fd_dense16_amx;

const fd_dense16_ops_t *fd_dense16_ops(fd_isa_t isa, uint32_t dtype, uint32_t act) {
    if (isa == FD_ISA_SCALAR || (dtype != FD_ACT_FP16 && dtype != FD_ACT_BF16)) return NULL;
#if FD_X86
    if (act == FD_ACT_BF16 && dtype == FD_ACT_BF16) {
        if (isa == FD_ISA_AMX) return &fd_dense16_amx;
        if (isa == FD_ISA_AVX512BF16) return &fd_dense16_avx512bf16;
    }
#endif
    return act == FD_ACT_FP32 ? FD_VECTOR_OPS_OF(fd_dense16, isa, dtype) : NULL;
}

size_t fd_dense16_packed_bytes(const fd_dense16_ops_t *ops, size_t outs, size_t ins) {
    return fd_round_up(outs, ops->panel) * fd_round_up(ins, ops->step) * sizeof(uint16_t);
}

typedef struct {
    const fd_dense16_ops_t *ops;
    size_t outs, ins;
    const uint16_t *from;
    uint16_t *to;
} pack_t;

/* Packs the inputs of the tiles from `tile` to `end` - 1 of output `out`, whose lane in its panel is `lane`. */
static void pack_tiles(const pack_t *p, size_t out, size_t lane, size_t tile, size_t end, uint16_t *panel) {
    const fd_dense16_ops_t *ops = p->ops;
    const size_t lanes = ops->lanes, t = ops->per_word, tiles = ops->panel / lanes, size = ops->step * lanes;
    for (; tile < end; tile++) {
        uint16_t *to = panel + (tile * tiles + lane / lanes) * size + lane % lanes * t;
        for (size_t i = tile * ops->step; i < (tile + 1) * ops->step; i += t, to += lanes * t)
            for (size_t k = 0; k < t; k++) to[k] = out < p->outs && i + k < p->ins ? p->from[out * p->ins + i + k] : 0;
    }
}

static void pack_panels(void *data, size_t first, size_t n) {
    enum { AT_ONCE = 64 }; /* inputs: lines of the rows that stay in a cache */
    const pack_t *p = data;
    const fd_dense16_ops_t *ops = p->ops;
    const size_t steps = fd_round_up(p->ins, ops->step) / ops->step, at_once = AT_ONCE / ops->step;
    for (size_t panel = first; panel < first + n; panel++)
        for (size_t begin = 0; begin < steps; begin += at_once)
            for (size_t lane = 0; lane < ops->panel; lane++)
                pack_tiles(p, panel * ops->panel + lane, lane, begin, begin + at_once < steps ? begin + at_once : steps,
                           p->to + panel * ops->panel * steps * ops->step);
}

void fd_dense16_pack(const fd_dense16_ops_t *ops, size_t outs, size_t ins, const uint16_t *from, uint16_t *to,
                     unsigned threads) {
    pack_t pack = {ops, outs, ins, from, to};
    fd_parallel(pack_panels, &pack, fd_round_up(outs, ops->panel) / ops->panel, 1,
                fd_worth_threads(outs * ins, threads));
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

fd_status_t fd_dense16_multiply(const fd_dense16_ops_t *ops, const fd_dense16_t *l, const void *x, size_t rows, void *y,
                                unsigned threads) {
    enum { WORTH_A_THREAD = 1 << 16 }; /* weights that are read sooner than a thread wakes up */
    enum { WORTH_A_TURN = 1 << 16 };   /* multiply-adds that take longer than the threads' hand-over of parts */
    if (!rows) return FD_OK;
    const size_t most = l->outs * l->ins / WORTH_A_THREAD + 1, blocks = (rows + FD_DENSE16_ROWS - 1) / FD_DENSE16_ROWS;
    const unsigned worth = most < threads ? (unsigned)most : threads;
    if (ops->multiply_all) return ops->multiply_all(l, x, rows, y, worth);
    const size_t tiles = (rows + FD_DENSE16_TILE - 1) / FD_DENSE16_TILE; /* blocks have much the same number of them */
    run_t run = {ops, l, x, y, rows, blocks, (tiles + blocks - 1) / blocks * FD_DENSE16_TILE};
    const size_t part = ops->panel * l->ins * (rows < run.block_rows ? rows : run.block_rows);
    fd_parallel(run_parts, &run, (l->outs + ops->panel - 1) / ops->panel * blocks, (WORTH_A_TURN + part - 1) / part,
                worth);
    return FD_OK;
}
