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

FD_INLINE int32_t dot_offset(const fd_linear_t *l) { return -l->zero; }
FD_INLINE int32_t dot_steps(const fd_linear_t *l) { return 127; }
FD_INLINE ivec_t dot_start(const fd_linear_t *l, int32_t start, size_t sums, const kind_t kind) {
    return ivec_set1(start);
}

FD_INLINE void dot_block(ivec_t *dot, const uint8_t *w, const uint8_t *table, const int8_t *x, size_t stride,
                         const uint32_t n, const kind_t kind) {
    if (kind == BYTES || kind == HADAMARD) {
        FD_UNROLL
        for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
            const ivec_t q = _mm256_loadu_si256((const __m256i *)(w + c * 64));
            for (uint32_t r = 0; r < n; r++)
                dot[r] = dot_fours(dot[r], q, ivec_set1(fd_linear_inputs(x + r * stride + 4 * c)));
        }
        return;
    }
    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
        ivec_t even, odd;
        unpack_chunks(w + c * 32, table, kind, &even, &odd);
        for (uint32_t r = 0; r < n; r++) {
            const int8_t *inputs = x + r * stride + 4 * c;
            dot[r] = dot_fours(dot[r], even, ivec_set1(fd_linear_inputs(inputs)));
            dot[r] = dot_fours(dot[r], odd, ivec_set1(fd_linear_inputs(inputs + 4)));
        }
    }
}

#include "linear_simd.h"

const fd_linear_ops_t fd_linear_ops_avxvnni = {"avxvnni", 0, round_row, tile_rows, NULL};

FD_END_TARGET
#endif
