/* Runs products: rounds some of their rows, then multiplies them with all tiles, each phase shared among threads. */
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

enum { LINE = 64 };

/* Rows of a task that are rounded and multiplied together. */
typedef struct {
    const fd_linear_t *l;
    const float *x;
    float *y;
    uint32_t n;
    size_t bytes; /* of its rounded rows */
    fd_linear_rows_t rows;
} piece_t;

/* Pieces whose tiles are computed in one loop. */
typedef struct {
    const fd_linear_ops_t *ops;
    piece_t *pieces;
    size_t n, blocks; /* blocks of all rows */
    uint32_t tiles;   /* of each linear */
} batch_t;

static void round_rows(void *data, size_t first, size_t n) {
    const batch_t *batch = data;
    const piece_t *piece = batch->pieces;
    for (; n; n--, first++) {
        for (; first >= piece->n; piece++) first -= piece->n;
        batch->ops->round_row(piece->l, piece->x + first * piece->l->ins, (uint32_t)first, &piece->rows);
    }
}

static void compute_tiles(void *data, size_t first, size_t n) {
    const batch_t *batch = data;
    for (size_t i = first; i < first + n; i++) {
        const piece_t *piece = &batch->pieces[i / batch->tiles];
        batch->ops->tile(piece->l, (uint32_t)(i % batch->tiles), &piece->rows, piece->n, piece->y);
    }
}

/* Rounds and multiplies a batch, whose rounded rows have room in `memory`. */
static void run_batch(batch_t *batch, uint8_t *memory, uint32_t threads) {
    /* Less is done sooner than a thread wakes up. */
    enum { BLOCKS_WORTH_SHARING = 1024, BLOCK_TILES_WORTH_SHARING = 512 };
    enum { BLOCKS_WORTH_A_TURN = 128 }; /* of tiles: they take longer than the threads' hand-over of parts */
    size_t rows = 0;
    for (piece_t *piece = batch->pieces; piece < batch->pieces + batch->n; memory += piece++->bytes) {
        fd_linear_rows_t *r = &piece->rows;
        const size_t blocks = fd_round_up(piece->n, r->beside) * fd_linear_blocks(piece->l);
        r->x = (int8_t *)memory;
        r->scales = (float *)(memory + blocks * piece->l->passes * FD_LINEAR_BLOCK);
        r->sums = r->scales + blocks;
        r->starts = (int32_t *)(r->sums + blocks);
        /* The rows that the last group lacks have scales and sums of 0. */
        if (piece->n % r->beside) memset(r->scales, 0, 2 * blocks * sizeof(float));
        rows += piece->n;
    }
    fd_parallel(round_rows, batch, rows, 0, batch->blocks < BLOCKS_WORTH_SHARING ? 1 : threads);
    const size_t tiles = batch->n * batch->tiles, each = (batch->blocks + batch->n - 1) / batch->n;
    const size_t least = (BLOCKS_WORTH_A_TURN + each - 1) / (each ? each : 1);
    fd_parallel(compute_tiles, batch, tiles, least, each * tiles < BLOCK_TILES_WORTH_SHARING ? 1 : threads);
}

/* Bytes of rounded rows that stay in a cache while all tiles read them. */
enum { BYTES_AT_A_TIME = 2 << 20 };

/* How many rows are rounded and multiplied at a time. Each tile reads them, so they should stay in a cache; but each
 * tile is read and unpacked for them, so they should be many. */
static uint32_t rows_at_a_time(const fd_linear_t *l, uint32_t rows) {
    enum { FEWEST = 512, MOST_BESIDE = 16 };
    const size_t row = fd_linear_blocks(l) * ((size_t)l->passes * FD_LINEAR_BLOCK + 3 * sizeof(float));
    const size_t fit = BYTES_AT_A_TIME / row, most = fit > FEWEST ? fit : FEWEST, turns = (rows + most - 1) / most;
    return turns < 2 ? rows : (uint32_t)fd_round_up((rows + turns - 1) / turns, MOST_BESIDE);
}

/* Cuts tasks into pieces; returns how many. Without `pieces` it only counts them. */
static size_t cut(const fd_linear_ops_t *ops, const fd_linear_task_t *tasks, size_t n, uint32_t stride,
                  piece_t *pieces) {
    size_t count = 0;
    for (const fd_linear_task_t *task = tasks; task < tasks + n; task++) {
        const fd_linear_t *l = task->linear;
        const uint32_t rows = (uint32_t)task->rows, most = rows_at_a_time(l, rows);
        for (uint32_t row = 0; row < rows; row += most, count++) {
            if (!pieces) continue;
            piece_t *piece = &pieces[count];
            *piece = (piece_t){.l = l, .n = rows - row < most ? rows - row : most};
            piece->x = (const float *)task->x + (size_t)row * l->ins;
            piece->y = (float *)task->y + (size_t)row * stride;
            fd_linear_rows_t *r = &piece->rows;
            r->stride = stride;
            r->wide = l->passes == 2 && ops->fewest_wide && piece->n >= ops->fewest_wide && fd_linear_unpacks(l);
            r->beside = ops->beside ? ops->beside(l, piece->n) : 1;
            const size_t blocks = fd_round_up(piece->n, r->beside) * fd_linear_blocks(l);
            piece->bytes = fd_round_up(blocks * (l->passes * FD_LINEAR_BLOCK + 3 * sizeof(float)), LINE);
        }
    }
    return count;
}

/* Makes a batch of the first of n pieces, as many as stay in a cache. Returns their bytes. */
static size_t fill(batch_t *batch, piece_t *pieces, size_t n) {
    size_t bytes = 0;
    batch->pieces = pieces, batch->n = batch->blocks = 0;
    for (; n && (!bytes || bytes + pieces->bytes <= BYTES_AT_A_TIME); n--, pieces++) {
        bytes += pieces->bytes;
        batch->blocks += pieces->n * (size_t)fd_linear_blocks(pieces->l);
        batch->n++;
    }
    return bytes;
}

fd_status_t fd_linear_run(const fd_linear_ops_t *ops, const fd_linear_task_t *tasks, size_t n, uint32_t stride,
                          uint32_t threads) {
    enum { FEW = 8 };
    piece_t few[FEW], *pieces = few;
    const size_t count = cut(ops, tasks, n, stride, NULL);
    if (!count) return FD_OK;
    if (count > FEW && !(pieces = malloc(count * sizeof *pieces))) return FD_INTERNAL;
    cut(ops, tasks, n, stride, pieces);
    batch_t batch = {.ops = ops, .tiles = fd_linear_tiles(pieces->l)};
    uint8_t *memory = NULL;
    size_t room = 0;
    fd_status_t status = FD_OK;
    for (size_t first = 0; first < count && status == FD_OK; first += batch.n) {
        const size_t bytes = fill(&batch, pieces + first, count - first);
        if (bytes > room) {
            free(memory);
            memory = aligned_alloc(LINE, room = bytes);
        }
        if (memory) run_batch(&batch, memory, threads);
        else status = FD_INTERNAL;
    }
    free(memory);
    if (pieces != few) free(pieces);
    return status;
}
