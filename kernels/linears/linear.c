/* Runs a product: rounds some of its rows, then multiplies them with all tiles, each phase shared among threads. */
#include "linear.h"

#include <stdlib.h>

#include "cpu/isa.h"
#include "cpu/parallel.h"

const fd_linear_ops_t *fd_linear_ops(fd_isa_t isa) {
#if FD_X86
    if (isa == FD_ISA_AMX) return &fd_linear_ops_amx;
    if (isa == FD_ISA_AVX512VNNI || isa == FD_ISA_AVX512BF16) return &fd_linear_ops_avx512vnni;
    if (isa == FD_ISA_AVXVNNI) return &fd_linear_ops_avxvnni;
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVX512) return &fd_linear_ops_avx2;
#endif
    return &fd_linear_ops_scalar;
}

typedef struct {
    const fd_linear_t *l;
    const fd_linear_ops_t *ops;
    fd_linear_rows_t rows;
    const float *x;
    float *y;
    uint32_t n;
} work_t;

static void round_rows(void *data, size_t first, size_t n) {
    work_t *work = data;
    for (size_t row = first; row < first + n; row++)
        work->ops->round_row(work->l, work->x + row * work->l->ins, (uint32_t)row, &work->rows);
}

static void compute_tiles(void *data, size_t first, size_t n) {
    work_t *work = data;
    for (size_t tile = first; tile < first + n; tile++)
        work->ops->tile(work->l, (uint32_t)tile, &work->rows, work->n, work->y);
}

/* Rounds and multiplies rows that have room in work->rows. */
static void run_rows(work_t *work, uint32_t threads) {
    const size_t blocks = work->n * (size_t)fd_linear_blocks(work->l);
    /* Less is done sooner than a thread wakes up. */
    enum { BLOCKS_WORTH_SHARING = 1024, BLOCK_TILES_WORTH_SHARING = 512 };
    enum { BLOCKS_WORTH_A_TURN = 128 }; /* of tiles: they take longer than the threads' hand-over of parts */
    fd_parallel(round_rows, work, work->n, 0, blocks < BLOCKS_WORTH_SHARING ? 1 : threads);
    const uint32_t tiles = fd_linear_tiles(work->l);
    const size_t least = (BLOCKS_WORTH_A_TURN + blocks - 1) / (blocks ? blocks : 1);
    fd_parallel(compute_tiles, work, tiles, least, blocks * tiles < BLOCK_TILES_WORTH_SHARING ? 1 : threads);
}

/* How many rows are rounded and multiplied at a time. Each tile reads them, so they should stay in a cache; but each
 * tile is read and unpacked for them, so they should be many. */
static uint32_t rows_at_a_time(const fd_linear_t *l, uint32_t rows) {
    enum { BYTES = 2 << 20, FEWEST = 512, MOST_BESIDE = 16 };
    const size_t row = fd_linear_blocks(l) * ((size_t)l->passes * FD_LINEAR_BLOCK + 3 * sizeof(float));
    const size_t most = BYTES / row > FEWEST ? BYTES / row : FEWEST, turns = (rows + most - 1) / most;
    return turns < 2 ? rows : (uint32_t)fd_round_up((rows + turns - 1) / turns, MOST_BESIDE);
}

fd_status_t fd_linear_run(const fd_linear_t *l, const fd_linear_ops_t *ops, const float *x, uint32_t rows, float *y,
                          uint32_t stride, uint32_t threads) {
    const uint32_t most = rows_at_a_time(l, rows), beside = ops->beside ? ops->beside(l, most) : 1;
    const size_t blocks = ((size_t)most + -most % beside) * fd_linear_blocks(l);
    const size_t numbers = blocks * l->passes * FD_LINEAR_BLOCK;
    int8_t *memory = aligned_alloc(64, (numbers + blocks * 3 * sizeof(float) + 63) / 64 * 64);
    if (!memory) return FD_INTERNAL;
    work_t work = {.l = l, .ops = ops};
    work.rows.x = memory;
    work.rows.stride = stride;
    work.rows.scales = (float *)(memory + numbers);
    work.rows.sums = work.rows.scales + blocks;
    work.rows.starts = (int32_t *)(work.rows.sums + blocks);
    for (uint32_t row = 0; row < rows; row += most) {
        work.n = rows - row < most ? rows - row : most;
        work.rows.wide = l->passes == 2 && ops->fewest_wide && work.n >= ops->fewest_wide && fd_linear_unpacks(l);
        work.rows.beside = ops->beside ? ops->beside(l, work.n) : 1;
        /* The rows that the last group lacks have scales and sums of 0. */
        if (work.n % work.rows.beside) memset(work.rows.scales, 0, 2 * blocks * sizeof(float));
        work.x = x + (size_t)row * l->ins, work.y = y + (size_t)row * stride;
        run_rows(&work, threads);
    }
    free(memory);
    return FD_OK;
}
