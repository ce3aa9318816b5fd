/* AVX2 with FMA. */
#include "cpu/isa.h"

#if FD_X86
FD_BEGIN_TARGET(FD_AVX2)

#include "draw_rows_loops.h"

FD_DRAW_ROWS(avx2)

FD_END_TARGET
#endif
