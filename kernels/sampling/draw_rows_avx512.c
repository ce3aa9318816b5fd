/* AVX-512. */
#include "cpu/isa.h"

#if FD_X86
FD_BEGIN_TARGET(FD_AVX512)

#include "draw_rows_loops.h"

FD_DRAW_ROWS(avx512)

FD_END_TARGET
#endif
