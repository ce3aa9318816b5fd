/* AVX2 with FMA. */
#include "dispatch.h"

#if FD_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "draw_rows_loops.h"

FD_DRAW_ROWS(avx2)

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
