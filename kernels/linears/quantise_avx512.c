/* AVX-512, 16 lanes. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX512)

#include "cpu/vec_avx512.h"

#include "quantise_simd.h"

FD_QUANTISE(avx512)

FD_END_TARGET
#endif
