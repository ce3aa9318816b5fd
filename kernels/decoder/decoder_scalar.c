/* Portable C: what no torch operation does in its place. */
#include "cpu/vec_scalar.h"

#include "reduction_simd.h"

FD_SUM_PARTS(scalar)
