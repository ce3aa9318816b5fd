/* Picks the functions of an ISA, and shares heads among threads. */
#include "delta.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

FD_VECTOR_OPS(fd_delta_ops_t, fd_delta_ops);

const fd_delta_ops_t *fd_delta_ops(fd_isa_t isa, uint32_t act_dtype) {
    if (isa == FD_ISA_SCALAR || act_dtype >= FD_ACT_DTYPES) return NULL;
    return FD_VECTOR_OPS_OF(fd_delta_ops, isa, act_dtype);
}

typedef struct {
    const fd_delta_ops_t *ops;
    const fd_delta_t *d;
    const fd_delta_rows_t *r;
    int failed;
} run_t;

static void run_convolve(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->convolve(run->d, run->r, first, n);
}
static void run_advance(void *data, size_t first, size_t n) {
    const run_t *run = data;
    run->ops->advance(run->d, run->r, first, n);
}

static void run_spans(void *data, size_t first, size_t n) {
    run_t *run = data;
    if (run->ops->spans(run->d, run->r, first, n) != FD_OK) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

/* Every thread takes its heads at once: memory is slower where a thread goes on at another head than the next one. */
static void share_heads(void (*body)(void *, size_t, size_t), run_t *run, size_t heads, size_t numbers,
                        unsigned threads) {
    const unsigned worth = fd_worth_threads(run->r->n * numbers, threads);
    fd_parallel(body, run, heads, worth ? (heads + worth - 1) / worth : heads, worth);
}

fd_status_t fd_delta_rows(const fd_delta_ops_t *ops, const fd_delta_t *d, const fd_delta_rows_t *r, unsigned threads) {
    const size_t state = d->v_heads * d->k_size * d->v_size;
    run_t run = {ops, d, r, 0};
    if (r->n) {
        share_heads(run_convolve, &run, d->k_heads, fd_delta_channels(d) * d->kernel, threads);
        share_heads(run_advance, &run, d->v_heads, state, threads);
    }
    size_t rows = 0;
    for (size_t i = 0; i < r->n_spans; i++) rows += (size_t)r->spans[i].n;
    if (r->n_spans) fd_parallel(run_spans, &run, d->k_heads, 1, fd_worth_threads((rows + 1) * state, threads));
    return run.failed ? FD_INTERNAL : FD_OK;
}
