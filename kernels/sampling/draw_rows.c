/* Picks the function of an ISA, and shares rows among threads. */
#include "draw_rows.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

extern fd_draw_rows_fn fd_draw_rows_base;
#if FD_X86
extern fd_draw_rows_fn fd_draw_rows_avx2, fd_draw_rows_avx512;
#endif

fd_draw_rows_fn *fd_draw_rows_of(fd_isa_t isa, const char **name) {
#if FD_X86
    if (isa != FD_ISA_SCALAR) {
        const int wide = isa != FD_ISA_AVX2 && isa != FD_ISA_AVXVNNI;
        *name = wide ? "avx512" : "avx2";
        return wide ? fd_draw_rows_avx512 : fd_draw_rows_avx2;
    }
#endif
    *name = "base";
    return fd_draw_rows_base;
}

/* Fewer logits are drawn from sooner than a thread wakes up. */
enum { LOGITS_OF_A_THREAD = 1 << 17 };

typedef struct {
    fd_draw_rows_fn *draw;
    const fd_draw_t *o;
    int failed;
} draw_run_t;

static void run_draw(void *data, size_t first, size_t n) {
    draw_run_t *run = data;
    if (run->draw(run->o, first, n) != FD_OK) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

fd_status_t fd_draw_rows(fd_draw_rows_fn *draw, const fd_draw_t *o, size_t rows, unsigned threads) {
    draw_run_t run = {draw, o, 0};
    const size_t most = rows * o->vocab / LOGITS_OF_A_THREAD + 1;
    fd_parallel(run_draw, &run, rows, 1, most < threads ? (unsigned)most : threads);
    return run.failed ? FD_INTERNAL : FD_OK;
}
