/* AVX-512 with VNNI (linear_vnni512.h). */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni")

#include "linear_vnni512.h"

static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y) {
    tile_rows_from(l, tile, rows, 0, n, y);
}

const fd_linear_ops_t fd_linear_ops_avx512vnni = {"avx512vnni", 0, round_row, tile_rows, NULL};

FD_END_TARGET
#endif
