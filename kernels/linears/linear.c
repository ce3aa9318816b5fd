/* Runs a product: rounds its rows, then computes its tiles, each phase shared among threads. */
#include "linear.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "dispatch.h"

const fd_linear_ops_t *fd_linear_ops(fd_isa_t isa) {
#if FD_X86
    if (isa == FD_ISA_AMX) return &fd_linear_ops_amx;
    if (isa == FD_ISA_AVX512VNNI || isa == FD_ISA_AVX512BF16) return &fd_linear_ops_avx512vnni;
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI || isa == FD_ISA_AVX512) return &fd_linear_ops_avx2;
#endif
    return &fd_linear_ops_scalar;
}

/* GOMP_parallel of the OpenMP library that torch has loaded: its threads exist already, and a pool beside it would take
 * the cores from it. */
typedef void parallel_fn(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn *find_parallel(void) {
    static parallel_fn *found;
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) { /* threads that race here find the same */
        *(void **)&found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    return found;
}

typedef struct {
    const fd_linear_t *l;
    const fd_linear_ops_t *ops;
    fd_linear_rows_t rows;
    const float *x;
    float *y;
    uint32_t n, parts, step, next; /* a thread takes `step` of `parts` at a time; `next` is the first that is free */
} work_t;

static uint32_t take(work_t *work, uint32_t *end) {
    const uint32_t first = __atomic_fetch_add(&work->next, work->step, __ATOMIC_RELAXED);
    *end = first + work->step < work->parts ? first + work->step : work->parts;
    return first;
}

static void round_rows(void *data) {
    work_t *work = data;
    for (uint32_t end, row = take(work, &end); row < work->parts; row = take(work, &end))
        for (; row < end; row++) work->ops->round_row(work->l, work->x + (size_t)row * work->l->ins, row, &work->rows);
}

static void compute_tiles(void *data) {
    work_t *work = data;
    for (uint32_t end, tile = take(work, &end); tile < work->parts; tile = take(work, &end))
        for (; tile < end; tile++) work->ops->tile(work->l, tile, &work->rows, work->n, work->y);
}

static void share(work_t *work, void (*body)(void *), uint32_t parts, uint32_t threads) {
    parallel_fn *parallel = threads > 1 ? find_parallel() : NULL;
    work->parts = parts;
    work->next = 0;
    work->step = parallel ? parts / (threads * 4) + 1 : parts;
    if (parallel) parallel(body, work, threads, 0);
    else body(work);
}

int fd_linear_run(const fd_linear_t *l, fd_isa_t isa, const float *x, uint32_t rows, float *y, uint32_t threads) {
    const size_t blocks = (size_t)rows * fd_linear_blocks(l);
    const size_t numbers = blocks * l->passes * FD_LINEAR_BLOCK;
    int8_t *memory = aligned_alloc(64, (numbers + blocks * 3 * sizeof(float) + 63) / 64 * 64);
    if (!memory) return -1;
    work_t work = {.l = l, .ops = fd_linear_ops(isa), .x = x, .y = y, .n = rows};
    work.rows.x = memory;
    work.rows.scales = (float *)(memory + numbers);
    work.rows.sums = work.rows.scales + blocks;
    work.rows.starts = (int32_t *)(work.rows.sums + blocks);
    /* Less is done sooner than a thread wakes up. */
    enum { BLOCKS_WORTH_SHARING = 1024, BLOCK_TILES_WORTH_SHARING = 512 };
    share(&work, round_rows, rows, blocks < BLOCKS_WORTH_SHARING ? 1 : threads);
    const uint32_t tiles = fd_linear_tiles(l);
    share(&work, compute_tiles, tiles, blocks * tiles < BLOCK_TILES_WORTH_SHARING ? 1 : threads);
    free(memory);
    return 0;
}
