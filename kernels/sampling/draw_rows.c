/* Picks the function of an ISA, and shares rows among threads. */
#include "draw_rows.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

extern const fd_draw_ops_t fd_draw_ops_base;
#if FD_X86
extern const fd_draw_ops_t fd_draw_ops_avx2, fd_draw_ops_avx512;
#endif

const fd_draw_ops_t *fd_draw_ops(fd_isa_t isa) {
#if FD_X86
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI) return &fd_draw_ops_avx2;
    if (isa != FD_ISA_SCALAR) return &fd_draw_ops_avx512;
#endif
    return &fd_draw_ops_base;
}

/* Fewer logits are drawn from sooner than a thread wakes up. */
enum { LOGITS_OF_A_THREAD = 1 << 17 };

typedef struct {
    const fd_draw_ops_t *ops;
    const fd_draw_t *o;
    int failed;
} draw_run_t;

static void run_draw(void *data, size_t first, size_t n) {
    draw_run_t *run = data;
    if (run->ops->draw(run->o, first, n) != FD_OK) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

fd_status_t fd_draw_rows(const fd_draw_ops_t *ops, const fd_draw_t *o, size_t rows, unsigned threads) {
    draw_run_t run = {ops, o, 0};
    const size_t most = rows * o->vocab / LOGITS_OF_A_THREAD + 1;
    const fd_loop_kind_t before = fd_loops_compute(FD_LOOP_DRAWS);
    fd_parallel(run_draw, &run, rows, 1, most < threads ? (unsigned)most : threads);
    fd_loops_compute(before);
    return run.failed ? FD_INTERNAL : FD_OK;
}
