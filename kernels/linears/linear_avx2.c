/* AVX2: a vector has 8 of a tile's 16 outputs. vpmaddubsw adds pairs of products in 16 bits, which hold them: with 4
 * bits, 16 products of at most 15 * 127, or 8 of a table's numbers; with 8 bits, 4 products if the matrix is
 * transformed (see linear.h), so that 7 bits of the activations are enough. Otherwise 2 of at most 128 * 127, because
 * the unsigned factor is |q - 128| and its sign moves to the activation, which takes one instruction more.
 *
 * Many rows of two passes are multiplied in one by vpmaddwd, whose factors have 16 bits and whose sums have 32. */
#include "cpu/isa.h"

#if FD_X86
#include <immintrin.h>

FD_BEGIN_TARGET(FD_AVX2)

#include "linear_ivec256.h"

enum { MAX_ROWS = 4, FEWEST_WIDE = 8, FEWEST_UNPACKED = 12 };

/* x + y, computed at this point: gcc reorders sums, and then has more of them at once than registers. */
FD_INLINE ivec_t ivec_sum(ivec_t x, ivec_t y) {
    x = _mm256_add_epi32(x, y);
    __asm__ volatile("" : "+x"(x));
    return x;
}

/* The same for sums of 16 bits. */
FD_INLINE ivec_t ivec_sum_pairs(ivec_t x, ivec_t y) {
    x = _mm256_add_epi16(x, y);
    __asm__ volatile("" : "+x"(x));
    return x;
}

/* Widens the 4 numbers of each output to 16 bits, the first two of all outputs before the others. */
FD_INLINE void widen_chunk(ivec_t q, uint32_t bits, uint8_t *to) {
    const ivec_t firsts = _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 0, -1, 1, -1, 4,
                                           -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
    const ivec_t less = _mm256_set1_epi16(bits == 8 ? 128 : 0);
    const ivec_t first = _mm256_sub_epi16(_mm256_shuffle_epi8(q, firsts), less);
    const ivec_t second = _mm256_sub_epi16(_mm256_shuffle_epi8(_mm256_srli_epi32(q, 16), firsts), less);
    memcpy(to, &first, sizeof first);
    memcpy(to + sizeof first, &second, sizeof second);
}

FD_INLINE int32_t dot_offset(const fd_linear_t *l) {
    return l->bits == 8 && !l->negated_sums ? 128 - l->zero : -l->zero;
}
FD_INLINE int32_t dot_steps(const fd_linear_t *l) { return l->negated_sums ? FD_LINEAR_SIGNED_STEPS : 127; }
FD_INLINE ivec_t dot_start(const fd_linear_t *l, int32_t start, size_t sums, const kind_t kind) {
    if (kind != HADAMARD) return ivec_set1(start);
    const ivec_t negated = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(l->negated_sums + sums)));
    return _mm256_slli_epi32(negated, FD_LINEAR_SIGNED_SHIFT);
}

FD_INLINE void dot_block(ivec_t *dot, const uint8_t *w, const uint8_t *table, const int8_t *x, size_t stride,
                         const uint32_t n, const kind_t kind) {
    const ivec_t ones = _mm256_set1_epi16(1);
    if (kind == WIDE) {
        FD_UNROLL
        for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
            const ivec_t first = ivec_load(w + c * 64), second = ivec_load(w + c * 64 + 32);
            for (uint32_t r = 0; r < n; r++) {
                const int8_t *inputs = x + r * stride + 8 * c;
                dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(first, ivec_set1(fd_linear_inputs(inputs))));
                dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(second, ivec_set1(fd_linear_inputs(inputs + 4))));
            }
        }
        return;
    }
    if (kind == HADAMARD) {
        FD_UNROLL
        for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
            const ivec_t even = ivec_load(w + c * 64);
            const ivec_t odd = ivec_load(w + c * 64 + 64);
            for (uint32_t r = 0; r < n; r++) {
                const int8_t *inputs = x + r * stride + 4 * c;
                const ivec_t pairs = _mm256_maddubs_epi16(ivec_set1(fd_linear_inputs(inputs)), even);
                const ivec_t more = _mm256_maddubs_epi16(ivec_set1(fd_linear_inputs(inputs + 4)), odd);
                dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(_mm256_add_epi16(pairs, more), ones));
            }
        }
        return;
    }
    if (kind == BYTES) {
        const ivec_t top = _mm256_set1_epi8((char)0x80);
        for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
            const ivec_t q = _mm256_xor_si256(ivec_load(w + c * 64), top);
            const ivec_t magnitude = _mm256_abs_epi8(q);
            for (uint32_t r = 0; r < n; r++) {
                const ivec_t signed_x = _mm256_sign_epi8(ivec_set1(fd_linear_inputs(x + r * stride + 4 * c)), q);
                const ivec_t pairs = _mm256_maddubs_epi16(magnitude, signed_x);
                dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(pairs, ones));
            }
        }
        return;
    }
    ivec_t sums[MAX_ROWS];
    for (uint32_t r = 0; r < n; r++) sums[r] = ivec_set1(0);
    FD_UNROLL
    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
        ivec_t even, odd;
        if (kind == UNPACKED) even = ivec_load(w + c * 32), odd = ivec_load(w + c * 32 + 32);
        else unpack_chunks(w + c * 32, table, kind, &even, &odd);
        for (uint32_t r = 0; r < n; r++) {
            const int8_t *inputs = x + r * stride + 4 * c;
            const ivec_t pairs = _mm256_maddubs_epi16(even, ivec_set1(fd_linear_inputs(inputs)));
            const ivec_t more = _mm256_maddubs_epi16(odd, ivec_set1(fd_linear_inputs(inputs + 4)));
            sums[r] = ivec_sum_pairs(_mm256_add_epi16(sums[r], pairs), more);
        }
        if (kind != NIBBLES && c == FD_LINEAR_CHUNKS / 2 - 2)
            for (uint32_t r = 0; r < n; r++) {
                dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(sums[r], ones));
                sums[r] = ivec_set1(0);
            }
    }
    for (uint32_t r = 0; r < n; r++) dot[r] = ivec_sum(dot[r], _mm256_madd_epi16(sums[r], ones));
}

#include "linear_simd.h"

const fd_linear_ops_t fd_linear_ops_avx2 = {"avx2", 1, FEWEST_WIDE, round_row, tile_rows, NULL};

FD_END_TARGET
#endif
