#include "experts.h"

#include <string.h>

enum { LINE = 64 };

/* A step. Each row makes a pair with each of its experts, and the pairs are sorted by expert. */
typedef struct {
    const fd_experts_t *e;
    const uint8_t *x;
    size_t rows, pairs, row_bytes; /* pairs: rows * used; the bytes of a row of x */
    uint32_t *chosen;              /* [rows][used]: the experts of a row */
    float *shares;                 /* [rows][used] */
    size_t *starts;                /* [n + 1]: the first pair of each expert */
    uint32_t *at;                  /* [rows][used]: the pair of each of a row's experts */
    uint32_t *row_of;              /* [pairs]: the row of each pair */
    fd_linear_task_t *tasks;       /* [n] */
    float *numbers;                /* the router's scratch */
    uint8_t *a, *b;                /* areas, from which the operations read and into which they write in turns */
} run_t;

static void sort_pairs(run_t *run) {
    const size_t n = run->e->router.n, used = run->e->router.used;
    memset(run->starts, 0, (n + 1) * sizeof *run->starts);
    for (size_t i = 0; i < run->pairs; i++) run->starts[run->chosen[i] + 1]++;
    for (size_t expert = 0; expert < n; expert++) {
        run->e->load[expert] += (int64_t)run->starts[expert + 1];
        run->starts[expert + 1] += run->starts[expert];
    }
    /* Each expert's start moves to its end, and so becomes the next one's. */
    for (size_t i = 0; i < run->pairs; i++) {
        const uint32_t pair = run->at[i] = (uint32_t)run->starts[run->chosen[i]]++;
        run->row_of[pair] = (uint32_t)(i / used);
    }
    memmove(run->starts + 1, run->starts, n * sizeof *run->starts);
    run->starts[0] = 0;
}

static void copy_rows(void *data, size_t first, size_t n) {
    const run_t *run = data;
    for (size_t pair = first; pair < first + n; pair++)
        memcpy(run->a + pair * run->row_bytes, run->x + run->row_of[pair] * run->row_bytes, run->row_bytes);
}

static const fd_products_t *products_of(const fd_expert_t *expert, bool up) { return up ? &expert->up : &expert->down; }

/* The products of all pairs with the `up` of their experts, or with their `down`: x [pairs][ins] -> y [pairs][outs].
 * Neighbours whose weights are stored alike are one loop of the threads. */
static fd_status_t multiply(const run_t *run, bool up, const uint8_t *x, uint8_t *y, unsigned threads) {
    const fd_expert_t *experts = run->e->experts;
    const fd_products_t *first = products_of(experts, up);
    const size_t outs = fd_products_outs(first), bytes = fd_act_bytes(run->e->act_dtype);
    size_t column = 0;
    fd_status_t status = FD_OK;
    const fd_loop_kind_t before = fd_loops_compute(up ? FD_LOOP_UP : FD_LOOP_DOWN);
    for (uint32_t part = 0; part < first->n; column += first->parts[part++].outs) {
        const fd_product_t *last = NULL;
        size_t n = 0;
        for (size_t expert = 0; expert < run->e->router.n && status == FD_OK; expert++) {
            const size_t pair = run->starts[expert], rows = run->starts[expert + 1] - pair;
            const fd_product_t *p = &products_of(&experts[expert], up)->parts[part];
            if (!rows) continue;
            if (n && p->ops != last->ops) {
                status = last->multiply(last->ops, run->tasks, n, outs, threads);
                n = 0;
            }
            run->tasks[n++] =
                (fd_linear_task_t){p->linear, x + pair * p->ins * bytes, y + (pair * outs + column) * bytes, rows};
            last = p;
        }
        if (n && status == FD_OK) status = last->multiply(last->ops, run->tasks, n, outs, threads);
    }
    fd_loops_compute(before);
    return status;
}

/* Takes `bytes` bytes of the scratch at `memory`, and moves `memory` on to the next whole line. */
static void *take(uintptr_t *memory, size_t bytes) {
    void *part = (void *)*memory;
    *memory += fd_round_up(bytes, LINE);
    return part;
}

/* Lays out a step of `rows` rows. Its scratch begins at `memory`, which is a whole line, and ends at `end`. */
static run_t lay_out(const fd_experts_t *e, size_t rows, uintptr_t memory, uintptr_t *end) {
    const size_t bytes = fd_act_bytes(e->act_dtype), pairs = rows * e->router.used;
    run_t run = {.e = e, .rows = rows, .pairs = pairs, .row_bytes = e->hidden * bytes};
    run.a = take(&memory, pairs * fd_max(e->hidden, e->inner) * bytes);
    run.b = take(&memory, pairs * fd_max(e->hidden, 2 * e->inner) * bytes);
    run.starts = take(&memory, (e->router.n + 1) * sizeof *run.starts);
    run.tasks = take(&memory, e->router.n * sizeof *run.tasks);
    run.at = take(&memory, pairs * sizeof *run.at);
    run.row_of = take(&memory, pairs * sizeof *run.row_of);
    run.chosen = take(&memory, pairs * sizeof *run.chosen);
    run.shares = take(&memory, pairs * sizeof *run.shares);
    run.numbers = take(&memory, fd_router_scratch(&e->router, rows) * sizeof *run.numbers);
    *end = memory;
    return run;
}

size_t fd_experts_scratch(const fd_experts_t *e, size_t rows) {
    uintptr_t end;
    lay_out(e, rows, 0, &end);
    return end + LINE - 1;
}

fd_status_t fd_experts_run(const fd_experts_t *e, const fd_expert_rows_t *r, void *scratch, unsigned threads) {
    uintptr_t end;
    run_t run = lay_out(e, r->rows, fd_round_up((uintptr_t)scratch, LINE), &end);
    run.x = r->x;
    fd_router_run(&e->router, r->router_x, run.rows, run.numbers, run.chosen, run.shares, threads);
    sort_pairs(&run);
    fd_parallel(copy_rows, &run, run.pairs, 0, fd_worth_threads(run.pairs * e->hidden, threads));
    fd_status_t status = multiply(&run, true, run.a, run.b, threads);
    if (status != FD_OK) return status;
    const fd_gate_rows_t gate = {run.b, run.a, e->inner, e->gelu, e->alpha, e->limit};
    fd_gate_rows(e->ops, &gate, run.pairs, threads);
    status = multiply(&run, false, run.a, run.b, threads);
    if (status != FD_OK) return status;
    const fd_mix_rows_t mix = {run.b, run.at, run.shares, r->out, e->router.used, e->hidden};
    fd_mix_rows(e->ops, &mix, run.rows, threads);
    return FD_OK;
}
