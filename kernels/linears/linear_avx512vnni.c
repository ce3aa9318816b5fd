/* AVX-512 with VNNI (linear_vnni512.h). */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni"))),   \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")
#endif

#include "linear_vnni512.h"

static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t n, float *y) {
    tile_rows_from(l, tile, rows, 0, n, y);
}

const fd_linear_ops_t fd_linear_ops_avx512vnni = {"avx512vnni", 0, round_row, tile_rows};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
