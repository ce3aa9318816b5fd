/* Advanced SIMD of Armv8.0-A, 4 lanes. */
#include "cpu/isa.h"

#if FD_ARM64
#include "cpu/vec_neon.h"

#include "quantise_simd.h"

FD_QUANTISE(neon)
#endif
