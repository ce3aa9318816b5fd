/* AVX2: a vector has 8 of a tile's 16 outputs. vpmaddubsw adds pairs of products in 16 bits, which hold them: with 4
 * bits, 16 products of at most 15 * 127; with 8 bits, 2 products of at most 128 * 127, because the unsigned factor is
 * |q - 128| and its sign moves to the activation. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "round_row.h"

static inline __attribute__((always_inline)) __m256i four(const int8_t *x) {
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return _mm256_set1_epi32(inputs);
}

/* 8 of the tile's outputs (half 0 or 1) of `n` rows from `row` on; `n` and `bits` are constants where this is
 * inlined. */
static inline __attribute__((always_inline)) void some_rows(const fd_linear_t *l, uint32_t tile, uint32_t half,
                                                            const fd_linear_rows_t *rows, uint32_t row, float *y,
                                                            const uint32_t n, const uint32_t bits) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES + half * 8;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l) + half * 32;
    const size_t groups = (size_t)tile * l->groups * FD_LINEAR_LANES + half * 8;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), top = _mm256_set1_epi8((char)0x80);
    const int32_t offset = bits == 8 ? 128 - l->zero : -l->zero;
    __m256 acc[4];
    for (uint32_t r = 0; r < n; r++) acc[r] = _mm256_setzero_ps();
    size_t at = (size_t)row * blocks;
    for (uint32_t g = 0; g < l->groups; g++) {
        const size_t group = groups + (size_t)g * FD_LINEAR_LANES;
        const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(l->scales + group)));
        const __m256 min = l->mins ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(l->mins + group)))
                                   : _mm256_setzero_ps();
        for (uint32_t b = 0; b < l->group_blocks; b++, at++) {
            const size_t stride = (size_t)blocks * l->passes * FD_LINEAR_BLOCK;
            __m256i dot[4];
            for (uint32_t r = 0; r < n; r++) dot[r] = _mm256_setzero_si256();
            for (uint32_t pass = 0; pass < l->passes; pass++) {
                const int8_t *x = rows->x + (at * l->passes + pass) * FD_LINEAR_BLOCK;
                if (pass)
                    for (uint32_t r = 0; r < n; r++) dot[r] = _mm256_slli_epi32(dot[r], FD_LINEAR_LOW_BITS);
                if (bits == 8) {
                    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
                        const __m256i q = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(w + c * 64)), top);
                        const __m256i magnitude = _mm256_abs_epi8(q);
                        for (uint32_t r = 0; r < n; r++) {
                            const __m256i signed_x = _mm256_sign_epi8(four(x + r * stride + 4 * c), q);
                            const __m256i pairs = _mm256_maddubs_epi16(magnitude, signed_x);
                            dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(pairs, ones));
                        }
                    }
                } else {
                    __m256i sums[4];
                    for (uint32_t r = 0; r < n; r++) sums[r] = _mm256_setzero_si256();
                    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
                        const __m256i both = _mm256_loadu_si256((const __m256i *)(w + c * 32));
                        const __m256i even = _mm256_and_si256(both, low);
                        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                        for (uint32_t r = 0; r < n; r++) {
                            const int8_t *inputs = x + r * stride + 4 * c;
                            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(even, four(inputs)));
                            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(odd, four(inputs + 4)));
                        }
                    }
                    for (uint32_t r = 0; r < n; r++)
                        dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(sums[r], ones));
                }
            }
            w += bits == 8 ? 512 : 256;
            for (uint32_t r = 0; r < n; r++) {
                const size_t i = at + (size_t)r * blocks;
                const __m256i exact = _mm256_add_epi32(dot[r], _mm256_set1_epi32(offset * rows->sums[i]));
                const __m256 unit = _mm256_set1_ps(rows->scales[i]);
                acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), _mm256_mul_ps(scale, unit), acc[r]);
                if (l->mins)
                    acc[r] = _mm256_fmadd_ps(min, _mm256_set1_ps(rows->scales[i] * (float)rows->sums[i]), acc[r]);
            }
        }
    }
    const uint32_t lanes = l->outs <= first ? 0 : l->outs - first < 8 ? l->outs - first : 8;
    const __m256 unit = _mm256_loadu_ps(l->units + first);
    const __m256 bias = l->bias ? _mm256_loadu_ps(l->bias + first) : _mm256_setzero_ps();
    for (uint32_t r = 0; r < n; r++) {
        float out[8];
        _mm256_storeu_ps(out, _mm256_fmadd_ps(acc[r], unit, bias));
        memcpy(y + (size_t)(row + r) * l->outs + first, out, lanes * sizeof *out);
    }
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n)                                                                                \
        for (uint32_t half = 0; half < 2; half++) {                                                                    \
            if (l->bits == 8) some_rows(l, tile, half, rows, row, y, n, 8);                                            \
            else some_rows(l, tile, half, rows, row, y, n, 4);                                                         \
        }

static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t rows_n, float *y) {
    uint32_t row = 0;
    FD_SOME_ROWS(4)
    FD_SOME_ROWS(2)
    FD_SOME_ROWS(1)
}

const fd_linear_ops_t fd_linear_ops_avx2 = {"avx2", round_row, tile_rows};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
