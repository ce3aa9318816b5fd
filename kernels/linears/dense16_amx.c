/* AMX (Intel SDM vol. 1, ch. 18): products of bf16 rows and bf16 weights. tdpbf16ps multiplies 16 rows of 32 inputs
 * with 16 outputs. The sums of 32 rows and a panel's 32 outputs are four tiles, which add up all inputs in their order,
 * so a row's result does not depend on the other rows.
 *
 * Up to 32 rows are read where they lie, while weights stream from memory. The sums of a panel are stored by tiles, and
 * loaded, rounded and stored as outputs while the next panel is multiplied, because they cannot be loaded before they
 * have reached the L1 cache. Reading the lines of outputs in order to overwrite them would hold the weights up, so they
 * are stored past the caches. More rows are copied into tiles first: rows that stand a power of two apart share a set
 * of the L1 cache, which has fewer ways than a tile has rows.
 */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>
#include <stdbool.h>
#include <stdlib.h>

#include "cpu/parallel.h"

FD_BEGIN_TARGET(FD_AVX512 ",avx512bf16,amx-tile,amx-bf16")

#include "cpu/amx_tiles.h"
#include "cpu/vec_avx512bf16.h"
#include "dense16.h"

enum {
    LINE = 64,                 /* bytes */
    PANEL = 2 * LANES,         /* outputs */
    STEP = 32,                 /* inputs of a tile */
    TILE = FD_AMX_ROWS * STEP, /* numbers of a tile */
    TILE_LINES = TILE * 2 / LINE,
    MOST_ROWS = 2 * FD_AMX_ROWS, /* rows whose sums are in the registers at the same time */
    TILES_AHEAD = 4              /* of weights from memory */
};
/* How many rows and panels are multiplied together, in blocks of inputs. An L2 cache of 2 MB holds, of up to FEW_ROWS
 * rows, all rows and the weights of two panels in blocks of FEW_ROWS_STEPS steps; a step prefetches SOME_LINES, because
 * more keep its rows waiting. Of more rows it holds the weights of a group of panels and the sums of MANY_ROWS rows;
 * then MANY_ROWS_STEPS steps of a pair of tiles of rows stay in L1. L2 also holds MANY_ROWS rows of up to KEPT_STEPS
 * steps; longer ones are prefetched. */
enum { FEW_ROWS = 256, FEW_ROWS_STEPS = 64, SOME_LINES = 2 };
enum { MANY_ROWS = 512, MANY_ROWS_STEPS = 18, KEPT_STEPS = 48, GROUP = 8 };
enum { LEAST_PAIRS = 8, PARTS = 4 }; /* pairs of tiles of rows in a part of the work; parts of a thread */
/* Tile registers, as macros because gcc's intrinsics paste the number into an instruction: sums of two tiles of rows by
 * two tiles of weights. */
#define SUMS00 0
#define SUMS01 1
#define SUMS10 2
#define SUMS11 3
#define ROWS0 4
#define ROWS1 5
#define WEIGHTS 6

typedef float sums_t[MOST_ROWS][PANEL] __attribute__((aligned(LINE)));

/* A product. Its rows are `tile` numbers apart from one tile of rows to the next, `row` from row to row, and `step`
 * from the inputs of one tile to the next. Copied rows are [pair of tiles][step][tile][row][STEP]. */
typedef struct {
    const fd_dense16_t *l;
    const uint16_t *x; /* the rows as they came */
    uint16_t *tiles;   /* the rows' copies */
    const uint16_t *rows;
    size_t tile, row, step;
    uint16_t *y;
    size_t n, steps, panels; /* rows; steps of a row; panels */
    size_t pairs, group;     /* pairs of tiles of rows, and panels, of a part of the work */
    bool past_caches;        /* outputs are stored past the caches: a panel's outputs of a row are a whole line */
} run_t;

/* Configures the tiles for n rows, at most MOST_ROWS. */
static void configure(size_t n) {
    fd_amx_config_t config = {.palette = 1};
    for (int i = 0; i <= WEIGHTS; i++) config.row_bytes[i] = FD_AMX_ROW_BYTES, config.rows[i] = FD_AMX_ROWS;
    if (n < FD_AMX_ROWS) config.rows[SUMS00] = config.rows[SUMS01] = config.rows[ROWS0] = (uint8_t)n;
    else if (n > FD_AMX_ROWS)
        config.rows[SUMS10] = config.rows[SUMS11] = config.rows[ROWS1] = (uint8_t)(n - FD_AMX_ROWS);
    fd_amx_configure(&config);
}

FD_INLINE void prefetch(const uint8_t *lines, size_t n) {
    for (size_t i = 0; i < n; i++) __builtin_prefetch(lines + i * LINE, 0, 2);
}

/* Outputs of a panel that are not stored yet: of `left` rows, whose sums begin at `sums`. */
typedef struct {
    const float *sums;
    uint16_t *y;
    size_t left;
    vec_t bias[2];
    __mmask32 mask;   /* of the panel's outputs that there are */
    bool past_caches; /* as in run_t */
} outputs_t;

static outputs_t outputs_of(const run_t *run, sums_t sums, size_t n, size_t panel, uint16_t *y) {
    const fd_dense16_t *l = run->l;
    const size_t column = panel * PANEL, outs = l->outs - column < PANEL ? l->outs - column : PANEL;
    const __mmask32 mask = outs < PANEL ? (1u << outs) - 1 : 0xffffffffu;
    outputs_t outputs = {sums[0], y + column, n, {vec_zero(), vec_zero()}, mask, run->past_caches};
    if (l->bias) {
        outputs.bias[0] = _mm512_maskz_loadu_ps((__mmask16)mask, l->bias + column);
        outputs.bias[1] = _mm512_maskz_loadu_ps((__mmask16)(mask >> LANES), l->bias + column + LANES);
    }
    return outputs;
}

/* Stores the outputs of up to n rows. */
FD_INLINE void store_outputs(const run_t *run, outputs_t *o, size_t n) {
    for (; n && o->left; n--, o->left--, o->sums += PANEL, o->y += run->l->outs) {
        const vec_t low = vec_add(vec_load(o->sums), o->bias[0]), high = vec_add(vec_load(o->sums + LANES), o->bias[1]);
        const vec_t rounded = vec_round_pairs(low, high);
        if (o->past_caches) _mm512_stream_si512((__m512i *)o->y, vec_ints(rounded));
        else _mm512_mask_storeu_epi16(o->y, o->mask, vec_ints(rounded));
    }
}

/* How weights are read: from memory, each tile prefetched TILES_AHEAD tiles early; from L2 into L1; or from L2 past L1
 * (TILELOADDT1), which keeps the rows that it has. */
typedef enum { FROM_MEMORY, INTO_L1, PAST_L1 } reading_t;

/* Half of the lines are prefetched before the tile is loaded, and half after it. If all were prefetched at once, the
 * core would run out of buffers for them, and its loads and products would wait behind them. */
FD_INLINE void load_weights(const uint16_t *tile, const reading_t reading) {
    const uint8_t *ahead = (const uint8_t *)(tile + TILES_AHEAD * TILE);
    if (reading == FROM_MEMORY) prefetch(ahead, TILE_LINES / 2);
    if (reading == PAST_L1) _tile_stream_loadd(WEIGHTS, tile, LINE);
    else _tile_loadd(WEIGHTS, tile, LINE);
    if (reading == FROM_MEMORY) prefetch(ahead + TILE_LINES / 2 * LINE, TILE_LINES / 2);
}

/* Adds the products of `steps` tiles of inputs to the sums. `two`, whether there are two tiles of rows, and `reading`
 * are constants. A step also stores a row of `outputs` for each tile of rows, and prefetches `ahead` lines from `next`.
 */
FD_INLINE void add_steps(const run_t *run, const uint16_t *x, const uint16_t *weights, size_t steps, const int two,
                         const reading_t reading, outputs_t *outputs, const uint8_t *next, size_t ahead) {
    for (size_t s = 0; s < steps; s++, x += run->step, weights += 2 * TILE, next += ahead * LINE) {
        prefetch(next, ahead);
        load_weights(weights, reading);
        _tile_loadd(ROWS0, x, run->row * 2);
        _tile_dpbf16ps(SUMS00, ROWS0, WEIGHTS);
        if (two) {
            _tile_loadd(ROWS1, x + run->tile, run->row * 2);
            _tile_dpbf16ps(SUMS10, ROWS1, WEIGHTS);
        }
        load_weights(weights + TILE, reading);
        _tile_dpbf16ps(SUMS01, ROWS0, WEIGHTS);
        if (two) _tile_dpbf16ps(SUMS11, ROWS1, WEIGHTS);
        store_outputs(run, outputs, two ? 2 : 1);
    }
}

FD_INLINE void zero_sums(void) {
    _tile_zero(SUMS00);
    _tile_zero(SUMS01);
    _tile_zero(SUMS10);
    _tile_zero(SUMS11);
}
FD_INLINE void load_sums(sums_t sums, const int two) {
    _tile_loadd(SUMS00, sums[0], sizeof sums[0]);
    _tile_loadd(SUMS01, sums[0] + LANES, sizeof sums[0]);
    if (!two) return;
    _tile_loadd(SUMS10, sums[FD_AMX_ROWS], sizeof sums[0]);
    _tile_loadd(SUMS11, sums[FD_AMX_ROWS] + LANES, sizeof sums[0]);
}
FD_INLINE void store_sums(sums_t sums, const int two) {
    _tile_stored(SUMS00, sums[0], sizeof sums[0]);
    _tile_stored(SUMS01, sums[0] + LANES, sizeof sums[0]);
    if (!two) return;
    _tile_stored(SUMS10, sums[FD_AMX_ROWS], sizeof sums[0]);
    _tile_stored(SUMS11, sums[FD_AMX_ROWS] + LANES, sizeof sums[0]);
}

/* Ends a part of the work. Without the fence, other threads could see outputs that were stored past the caches only
 * after the end of the loop. */
FD_INLINE void end_stores(const run_t *run) {
    if (run->past_caches) _mm_sfence();
}

/* Panels of up to MOST_ROWS rows. */
static void few_rows(void *data, size_t first, size_t n) {
    const run_t *run = data;
    sums_t room;
    float (*sums)[PANEL] = room;
    /* gcc would address the sums by four registers, and a step has none to spare. */
    __asm__("" : "+r"(sums));
    outputs_t outputs = {.left = 0};
    configure(run->n);
    for (size_t panel = first; panel < first + n; panel++) {
        const uint16_t *weights = run->l->weights + panel * run->steps * 2 * TILE;
        zero_sums();
        if (run->n > FD_AMX_ROWS) add_steps(run, run->rows, weights, run->steps, 1, FROM_MEMORY, &outputs, NULL, 0);
        else add_steps(run, run->rows, weights, run->steps, 0, FROM_MEMORY, &outputs, NULL, 0);
        store_outputs(run, &outputs, MOST_ROWS);
        store_sums(sums, run->n > FD_AMX_ROWS);
        outputs = outputs_of(run, sums, run->n, panel, run->y);
    }
    outputs.past_caches = false; /* the fence would wait until memory has them */
    store_outputs(run, &outputs, MOST_ROWS);
    end_stores(run);
    _tile_release();
}

/* Copies tiles of rows. Rows and inputs that a tile lacks are zeros. */
static void copy_rows(void *data, size_t first, size_t n) {
    const run_t *run = data;
    const size_t ins = run->l->ins;
    for (size_t tile = first; tile < first + n; tile++) {
        uint16_t *to = run->tiles + tile / 2 * run->steps * run->step + tile % 2 * run->tile;
        const uint16_t *x = run->x + tile * FD_AMX_ROWS * ins;
        for (size_t s = 0; s < run->steps; s++, to += run->step, x += STEP)
            for (size_t r = 0; r < FD_AMX_ROWS; r++) {
                const size_t left = tile * FD_AMX_ROWS + r < run->n ? ins - s * STEP : 0;
                const __mmask32 mask = left < STEP ? (1u << left) - 1 : 0xffffffffu;
                _mm512_store_si512(to + r * run->row, _mm512_maskz_loadu_epi16(mask, x + r * ins));
            }
    }
}

FD_INLINE void add_block(const run_t *run, const uint16_t *x, const uint16_t *weights, size_t steps, const int two,
                         const reading_t reading, sums_t sums, int first, outputs_t *outputs, const uint8_t *next,
                         size_t ahead) {
    if (first) zero_sums();
    else load_sums(sums, two);
    add_steps(run, x, weights, steps, two, reading, outputs, next, ahead);
    store_outputs(run, outputs, MOST_ROWS);
    store_sums(sums, two);
}

/* Where sums of a pair of tiles of rows and a panel wait for the next block of inputs, or until they are outputs. */
typedef sums_t group_sums_t[GROUP];

/* A block of `steps` steps from `step` on of one pair of tiles of rows and one panel. Stores the `outputs` of another
 * pair or panel, and sets them to its own after the last step. */
static void multiply_block(const run_t *run, size_t pair, size_t panel, size_t step, size_t steps, sums_t sums,
                           outputs_t *outputs, const uint8_t *next, size_t ahead) {
    const uint16_t *weights = run->l->weights + (panel * run->steps + step) * 2 * TILE;
    const uint16_t *x = run->rows + (pair * run->steps + step) * run->step;
    const size_t rows = run->n - pair * MOST_ROWS;
    const int first = !step;
    if (rows <= FD_AMX_ROWS) add_block(run, x, weights, steps, 0, INTO_L1, sums, first, outputs, next, ahead);
    else if (run->n > FEW_ROWS) add_block(run, x, weights, steps, 1, PAST_L1, sums, first, outputs, next, ahead);
    else if (!pair) add_block(run, x, weights, steps, 1, FROM_MEMORY, sums, first, outputs, next, 0);
    else add_block(run, x, weights, steps, 1, INTO_L1, sums, first, outputs, next, ahead);
    if (step + steps < run->steps) return;
    uint16_t *y = run->y + pair * MOST_ROWS * run->l->outs;
    *outputs = outputs_of(run, sums, rows < MOST_ROWS ? rows : MOST_ROWS, panel, y);
}

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/* Multiplies a group of panels with rows that have been copied. Where rows are few, all of them pass a panel: the first
 * ones stream its weights, and the others prefetch some of the next panel's. Where they are many, a pair of tiles of
 * rows passes all panels of the group and prefetches the next pair, unless L2 has it. */
static void multiply_group(const run_t *run, size_t part, group_sums_t *sums, outputs_t *outputs) {
    const size_t groups = ceil_div(run->panels, run->group), pair0 = part / groups * run->pairs;
    const size_t panel0 = part % groups * run->group, all_pairs = ceil_div(run->n, MOST_ROWS);
    const size_t pairs = all_pairs - pair0 < run->pairs ? all_pairs - pair0 : run->pairs;
    const size_t group = run->panels - panel0 < run->group ? run->panels - panel0 : run->group;
    const bool by_rows = run->n > FEW_ROWS;
    const size_t block = ceil_div(run->steps, ceil_div(run->steps, by_rows ? MANY_ROWS_STEPS : FEW_ROWS_STEPS));
    const size_t row_lines = run->steps > KEPT_STEPS ? ceil_div(2 * TILE_LINES, group) : 0;
    const size_t ahead = by_rows ? row_lines : SOME_LINES;
    for (size_t step = 0, steps; step < run->steps; step += steps) {
        steps = run->steps - step < block ? run->steps - step : block;
        const bool kept = steps < run->steps, last = step + steps == run->steps;
        for (size_t i = 0; i < pairs * group; i++) {
            const size_t pair = by_rows ? i / group : i % pairs, panel = by_rows ? i % group : i / pairs;
            const size_t following = panel + 1 < group || last ? (panel0 + panel + 1) * run->steps + step
                                                               : panel0 * run->steps + step + steps;
            const uint16_t *next = by_rows ? run->rows + ((pair0 + pair + 1) * run->steps + step) * run->step
                                           : run->l->weights + following * 2 * TILE;
            const size_t turn = by_rows ? panel : pair ? pair - 1 : 0;
            multiply_block(run, pair0 + pair, panel0 + panel, step, steps, sums[kept ? pair : 0][kept ? panel : 0],
                           outputs, (const uint8_t *)next + turn * ahead * steps * LINE, pair0 + pair ? ahead : 0);
        }
    }
}

static void many_rows(void *data, size_t first, size_t n) {
    const run_t *run = data;
    group_sums_t sums[MANY_ROWS / MOST_ROWS];
    outputs_t outputs = {.left = 0};
    configure(MOST_ROWS);
    for (size_t part = first; part < first + n; part++) multiply_group(run, part, sums, &outputs);
    store_outputs(run, &outputs, MOST_ROWS);
    end_stores(run);
    _tile_release();
}

static size_t parts_of(const run_t *run) {
    return ceil_div(ceil_div(run->n, MOST_ROWS), run->pairs) * ceil_div(run->panels, run->group);
}

/* Cuts the work on the copied rows into parts, and returns their number. Parts get fewer rows first, then fewer
 * panels. */
static size_t cut(run_t *run, unsigned threads) {
    const size_t wanted = (size_t)PARTS * threads;
    run->pairs = ceil_div(run->n, MOST_ROWS);
    run->group = ceil_div(run->panels, ceil_div(run->panels, GROUP));
    while (run->n > FEW_ROWS && run->pairs > LEAST_PAIRS && parts_of(run) < wanted)
        run->pairs = ceil_div(run->pairs, 2);
    while (run->group > 1 && parts_of(run) < wanted) run->group = ceil_div(run->group, 2);
    return parts_of(run);
}

static fd_status_t multiply_all(const fd_dense16_t *l, const void *x, size_t rows, void *y, unsigned threads) {
    enum { WORTH_A_TURN = 1 << 16 }; /* weights whose products take longer than the threads' hand-over of parts */
    const size_t steps = ceil_div(l->ins, STEP), panels = ceil_div(l->outs, PANEL);
    run_t run = {.l = l, .x = x, .y = y, .n = rows, .steps = steps, .panels = panels};
    run.past_caches = l->outs % PANEL == 0 && (uintptr_t)y % LINE == 0;
    if (rows <= MOST_ROWS && l->ins % STEP == 0) {
        run.rows = x, run.tile = FD_AMX_ROWS * l->ins, run.row = l->ins, run.step = STEP;
        fd_parallel(few_rows, &run, panels, ceil_div(WORTH_A_TURN, PANEL * l->ins), threads);
        return FD_OK;
    }
    const size_t pairs = ceil_div(rows < MANY_ROWS ? rows : MANY_ROWS, MOST_ROWS);
    run.tiles = aligned_alloc(LINE, pairs * steps * 2 * TILE * sizeof *run.tiles);
    if (!run.tiles) return FD_INTERNAL;
    run.rows = run.tiles, run.tile = TILE, run.row = STEP, run.step = 2 * TILE;
    for (size_t row = 0; row < rows; row += run.n, run.x += run.n * l->ins, run.y += run.n * l->outs) {
        run.n = rows - row < MANY_ROWS ? rows - row : MANY_ROWS;
        fd_parallel(copy_rows, &run, ceil_div(run.n, FD_AMX_ROWS), 0, fd_worth_threads(run.n * l->ins, threads));
        fd_parallel(many_rows, &run, cut(&run, threads), 1, threads);
    }
    free(run.tiles);
    return FD_OK;
}

extern const fd_dense16_ops_t fd_dense16_amx;
const fd_dense16_ops_t fd_dense16_amx = {"amx", PANEL, LANES, 2, STEP, sizeof(uint16_t), NULL, multiply_all};

FD_END_TARGET
#endif
