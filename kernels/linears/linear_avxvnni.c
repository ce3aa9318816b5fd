/* AVX-VNNI: a vector has 8 of a tile's 16 outputs, and vpdpbusd adds 4 inputs of each. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#include "linear_ivec256.h"

enum { MAX_ROWS = 6 };

/* Written in assembly for the reasons in attention_avxvnni.c. */
FD_INLINE ivec_t dot_fours(ivec_t sum, ivec_t q, ivec_t x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(q), "x"(x));
    return sum;
}

#define UNROLL_CHUNKS FD_UNROLL
#include "linear_fours.h"
#include "linear_simd.h"

const fd_linear_ops_t fd_linear_ops_avxvnni = {"avxvnni", 0, FEWEST_WIDE, round_row, tile_rows, NULL};

FD_END_TARGET
#endif
