/* Portable C, 4 lanes. */
#include "cpu/vec_scalar.h"

#include "quantise_simd.h"

FD_QUANTISE(scalar)
