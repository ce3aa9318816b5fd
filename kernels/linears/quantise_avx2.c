/* AVX2 with FMA and F16C, 8 lanes. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#include "cpu/vec_avx2.h"

#include "quantise_simd.h"

FD_QUANTISE(avx2)

FD_END_TARGET
#endif
