/* AVX-512 with VNNI (linear_vnni512.h). */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512 ",avx512vnni")

#include "linear_vnni512.h"

const fd_linear_ops_t fd_linear_ops_avx512vnni = {"avx512vnni", 0, FEWEST_WIDE, round_row, tile_rows, NULL};

FD_END_TARGET
#endif
