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
    const fd_linear_task_t *tasks;
    size_t panels; /* of each linear */
} run_t;

/* The blocks of a task's rows: at most FD_DENSE16_ROWS rows each, with much the same number of tiles. */
typedef struct {
    size_t n, rows;
} blocks_t;

static blocks_t blocks_of(size_t rows) {
    const size_t n = (rows + FD_DENSE16_ROWS - 1) / FD_DENSE16_ROWS,
                 tiles = (rows + FD_DENSE16_TILE - 1) / FD_DENSE16_TILE;
    return (blocks_t){n, n ? (tiles + n - 1) / n * FD_DENSE16_TILE : 0};
}

/* A part is a block of a task's rows and a panel; those of a panel follow one another. */
static void run_parts(void *data, size_t first, size_t n) {
    const run_t *run = data;
    const fd_linear_task_t *task = run->tasks;
    blocks_t blocks = blocks_of(task->rows);
    for (; n; n--, first++) {
        for (; first >= run->panels * blocks.n; blocks = blocks_of((++task)->rows)) first -= run->panels * blocks.n;
        const fd_dense16_t *l = task->linear;
        const size_t row = first % blocks.n * blocks.rows, rows = task->rows - row;
        const uint8_t *x = (const uint8_t *)task->x + row * l->ins * run->ops->number_bytes;
        uint8_t *y = (uint8_t *)task->y + row * l->outs * run->ops->number_bytes;
        run->ops->multiply(l, x, rows < blocks.rows ? rows : blocks.rows, y, first / blocks.n);
    }
}

typedef struct {
    const fd_dense16_ops_t *ops;
    const fd_linear_task_t *tasks;
    unsigned threads; /* of each task */
    int failed;
} tasks_run_t;

static void run_tasks(void *data, size_t first, size_t n) {
    tasks_run_t *run = data;
    for (const fd_linear_task_t *task = run->tasks + first; task < run->tasks + first + n; task++)
        if (task->rows && run->ops->multiply_all(task->linear, task->x, task->rows, task->y, run->threads) != FD_OK)
            __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

fd_status_t fd_dense16_multiply(const fd_dense16_ops_t *ops, const fd_linear_task_t *tasks, size_t n,
                                unsigned threads) {
    enum { WORTH_A_THREAD = 1 << 16 }; /* weights that are read sooner than a thread wakes up */
    enum { WORTH_A_TURN = 1 << 16 };   /* multiply-adds that take longer than the threads' hand-over of parts */
    size_t rows = 0, blocks = 0, used = 0;
    for (size_t i = 0; i < n; i++)
        rows += tasks[i].rows, blocks += blocks_of(tasks[i].rows).n, used += tasks[i].rows != 0;
    if (!rows) return FD_OK;
    const fd_dense16_t *l = tasks->linear;
    const size_t together = ops->multiply_all ? 1 : used, most = l->outs * l->ins * together / WORTH_A_THREAD + 1;
    const unsigned worth = most < threads ? (unsigned)most : threads;
    if (ops->multiply_all) {
        /* One after another, tasks take used / worth times as long as one in one thread; side by side, each thread has
         * ceil(used / threads) of them. */
        tasks_run_t run = {ops, tasks, worth, 0};
        if ((used + threads - 1) / threads * worth > used) run_tasks(&run, 0, n);
        else run.threads = 1, fd_parallel(run_tasks, &run, n, 1, threads);
        return run.failed ? FD_INTERNAL : FD_OK;
    }
    run_t run = {ops, tasks, (l->outs + ops->panel - 1) / ops->panel};
    const size_t part = ops->panel * l->ins * ((rows + blocks - 1) / blocks);
    fd_parallel(run_parts, &run, run.panels * blocks, (WORTH_A_TURN + part - 1) / part, worth);
    return FD_OK;
}
