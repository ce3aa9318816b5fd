/* Picks the functions of an ISA, and shares rows among threads. */
#include "row_ops.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

FD_VECTOR_OPS(fd_row_ops_t, fd_row_ops);

const fd_row_ops_t *fd_row_ops(fd_isa_t isa, uint32_t act_dtype) {
    if (isa == FD_ISA_SCALAR || act_dtype >= FD_ACT_DTYPES) return NULL;
    return FD_VECTOR_OPS_OF(fd_row_ops, isa, act_dtype);
}

typedef struct {
    const fd_row_ops_t *ops;
    const void *o;
} run_t;

static void run_norm(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->norm(run->o, first, n);
}
static void run_gate(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->gate(run->o, first, n);
}
static void run_sigmoid(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->sigmoid(run->o, first, n);
}
static void run_rope(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->rope(run->o, first, n);
}
static void run_turn(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->turn(run->o, first, n);
}
static void run_mix(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->mix(run->o, first, n);
}
static void run_router(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->router(run->o, first, n);
}

static void share(void (*body)(void *, size_t, size_t), run_t *run, size_t parts, unsigned threads) {
    const fd_loop_kind_t before = fd_loops_compute(FD_LOOP_ROWS);
    fd_parallel(body, run, parts, 0, threads);
    fd_loops_compute(before);
}

void fd_norm_rows(const fd_row_ops_t *ops, const fd_norm_rows_t *o, size_t rows, unsigned threads) {
    share(run_norm, &(run_t){ops, o}, rows, fd_worth_threads(rows * o->width, threads));
}
void fd_gate_rows(const fd_row_ops_t *ops, const fd_gate_rows_t *o, size_t rows, unsigned threads) {
    share(run_gate, &(run_t){ops, o}, rows, fd_worth_threads(rows * o->width * 4, threads));
}
void fd_sigmoid_rows(const fd_row_ops_t *ops, const fd_sigmoid_rows_t *o, size_t rows, unsigned threads) {
    share(run_sigmoid, &(run_t){ops, o}, rows, fd_worth_threads(rows * o->width * 4, threads));
}
void fd_rope_rows(const fd_row_ops_t *ops, const fd_rope_rows_t *o, size_t rows, unsigned threads) {
    const size_t width = (o->q_heads + 2 * o->kv_heads) * o->head_size;
    share(run_rope, &(run_t){ops, o}, rows, fd_worth_threads(rows * width, threads));
}
void fd_turn_rows(const fd_row_ops_t *ops, const fd_turn_rows_t *o, size_t rows, unsigned threads) {
    share(run_turn, &(run_t){ops, o}, rows, fd_worth_threads(rows * o->heads * o->pairs * 2, threads));
}
void fd_mix_rows(const fd_row_ops_t *ops, const fd_mix_rows_t *o, size_t rows, unsigned threads) {
    share(run_mix, &(run_t){ops, o}, rows, fd_worth_threads(rows * o->width * o->n, threads));
}
void fd_router_rows(const fd_row_ops_t *ops, const fd_router_rows_t *o, unsigned threads) {
    const size_t blocks = (o->rows + FD_ROUTER_BLOCK - 1) / FD_ROUTER_BLOCK;
    share(run_router, &(run_t){ops, o}, blocks * o->n, fd_worth_threads(o->rows * o->n * o->width, threads));
}
