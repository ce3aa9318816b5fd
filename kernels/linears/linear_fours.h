/* What linear_simd.h needs of a kernel whose ISA has an instruction (vpdpbusd) that adds 4 products of unsigned numbers
 * and signed inputs in 32 bits. An ISA's file includes this header within its target, after it has defined ivec_t with
 * its functions, dot_fours, which is that instruction, and UNROLL_CHUNKS, which is FD_UNROLL or nothing. */
#pragma once

/* Numbers of 4 bits are unpacked for each pass of rows: to unpack a vector of outputs once for 16 to 64 rows took
 * longer on a Zen 4. Two passes over bytes take as many instructions here as one over 16 bits. */
enum { FEWEST_WIDE = 0, FEWEST_UNPACKED = 0 };
FD_INLINE void widen_chunk(ivec_t q, uint32_t bits, uint8_t *to) {}

FD_INLINE int32_t dot_offset(const fd_linear_t *l) { return -l->zero; }
FD_INLINE int32_t dot_steps(const fd_linear_t *l) { return 127; }
FD_INLINE ivec_t dot_start(const fd_linear_t *l, int32_t start, size_t sums, const kind_t kind) {
    return ivec_set1(start);
}

FD_INLINE void dot_block(ivec_t *dot, const uint8_t *w, const uint8_t *table, const int8_t *x, size_t stride,
                         const uint32_t n, const kind_t kind) {
    if (kind == BYTES || kind == HADAMARD) {
        UNROLL_CHUNKS
        for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
            const ivec_t q = ivec_load(w + c * 64);
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
