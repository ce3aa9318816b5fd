/* Picks the functions of an ISA, packs a matrix, and shares its panels among threads. */
#include "dense16.h"

#include "dispatch.h"
#include "parallel.h"

#if FD_X86
extern const fd_dense16_ops_t fd_dense16_avx2[FD_ACT_DTYPES], fd_dense16_avx512[FD_ACT_DTYPES];
#elif FD_ARM64
extern const fd_dense16_ops_t fd_dense16_neon[FD_ACT_DTYPES];
#endif

const fd_dense16_ops_t *fd_dense16_ops(fd_isa_t isa, uint32_t dtype, const char **name) {
    if (isa == FD_ISA_SCALAR || dtype == FD_ACT_FP32) return NULL;
#if FD_X86
    const int wide = isa != FD_ISA_AVX2 && isa != FD_ISA_AVXVNNI;
    *name = wide ? "avx512" : "avx2";
    return wide ? &fd_dense16_avx512[dtype] : &fd_dense16_avx2[dtype];
#elif FD_ARM64
    *name = "neon";
    return &fd_dense16_neon[dtype];
#else
    return NULL;
#endif
}

void fd_dense16_pack(const fd_dense16_ops_t *ops, size_t outs, size_t ins, const uint16_t *from, uint16_t *to) {
    enum { TOGETHER = 64 }; /* inputs: lines of the rows that stay in a cache */
    for (size_t first = 0; first < outs; first += ops->panel, to += ins * ops->panel)
        for (size_t begin = 0; begin < ins; begin += TOGETHER) {
            const size_t end = begin + TOGETHER < ins ? begin + TOGETHER : ins;
            for (size_t j = 0; j < ops->panel; j++)
                for (size_t i = begin; i < end; i++)
                    to[i * ops->panel + j] = first + j < outs ? from[(first + j) * ins + i] : 0;
        }
}

typedef struct {
    const fd_dense16_ops_t *ops;
    const fd_dense16_t *l;
    const float *x;
    size_t rows;
    float *y;
    int failed;
} run_t;

static void run_panels(void *data, size_t first, size_t n) {
    run_t *run = data;
    for (size_t panel = first; panel < first + n; panel++)
        if (run->ops->multiply(run->l, run->x, run->rows, run->y, panel) < 0)
            __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

int fd_dense16_multiply(const fd_dense16_ops_t *ops, const fd_dense16_t *l, const float *x, size_t rows, float *y,
                        unsigned threads) {
    enum { WORTH_A_THREAD = 1 << 16 }; /* weights that are read sooner than a thread wakes up */
    const size_t most = l->outs * l->ins / WORTH_A_THREAD + 1;
    run_t run = {ops, l, x, rows, y, 0};
    fd_parallel(run_panels, &run, (l->outs + ops->panel - 1) / ops->panel, most < threads ? (unsigned)most : threads);
    return run.failed ? -1 : 0;
}
