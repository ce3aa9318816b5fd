/* Picks the functions of an ISA, and shares a matrix's rows among threads. */
#include "quantise.h"

#include "cpu/parallel.h"

enum { ROWS = 16 }; /* of a part: a multiple of all ISAs' lanes */

typedef void quantise_rows_t(const fd_quantise_t *o, size_t first, size_t n);
extern quantise_rows_t fd_quantise_rows_scalar, fd_quantise_rows_avx2, fd_quantise_rows_avx512, fd_quantise_rows_neon;

static quantise_rows_t *rows_of(fd_isa_t isa) {
#if FD_X86
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI) return fd_quantise_rows_avx2;
    if (isa != FD_ISA_SCALAR) return fd_quantise_rows_avx512;
#elif FD_ARM64
    if (isa == FD_ISA_NEON) return fd_quantise_rows_neon;
#endif
    return fd_quantise_rows_scalar;
}

typedef struct {
    const fd_quantise_t *o;
    quantise_rows_t *rows;
} work_t;

static void quantise_parts(void *data, size_t first, size_t n) {
    const work_t *work = data;
    const size_t begin = first * ROWS, end = begin + n * ROWS;
    work->rows(work->o, begin, (end < work->o->rows ? end : work->o->rows) - begin);
}

void fd_quantise(const fd_quantise_t *o, fd_isa_t isa, unsigned threads) {
    work_t work = {o, rows_of(isa)};
    fd_parallel(quantise_parts, &work, (o->rows + ROWS - 1) / ROWS, 1, fd_worth_threads(o->rows * o->columns, threads));
}
