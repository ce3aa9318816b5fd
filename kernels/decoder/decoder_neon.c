/* Advanced SIMD of Armv8.0-A, 4 lanes. */
#include "cpu/isa.h"

#if FD_ARM64
#include "cpu/vec_neon.h"

#define TILE_VECTORS 4
#include "delta_simd.h"
#include "prompt_simd.h"
#include "reduction_simd.h"
#include "row_ops_simd.h"

FD_PROMPT(neon)
FD_ROW_OPS(neon)
FD_DELTA(neon)
FD_SUM_PARTS(neon)
#endif
