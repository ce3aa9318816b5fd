/* AVX-512 with VNNI: a vector has a tile's 16 outputs, and vpdpbusd adds 4 inputs of each. */
#include "dispatch.h"

#if FD_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni"))),   \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")
#endif

#include "round_row.h"

static inline __attribute__((always_inline)) __m512i four(const int8_t *x) {
    int32_t inputs;
    memcpy(&inputs, x, sizeof inputs);
    return _mm512_set1_epi32(inputs);
}

/* The tile's outputs of `n` rows from `row` on, n <= 8; `n` and `bits` are constants where this is inlined. */
static inline __attribute__((always_inline)) void some_rows(const fd_linear_t *l, uint32_t tile,
                                                            const fd_linear_rows_t *rows, uint32_t row, float *y,
                                                            const uint32_t n, const uint32_t bits) {
    const uint32_t blocks = fd_linear_blocks(l), first = tile * FD_LINEAR_LANES;
    const uint8_t *w = l->weights + tile * fd_linear_tile_bytes(l);
    const uint16_t *scales = l->scales + (size_t)tile * l->groups * FD_LINEAR_LANES;
    const uint16_t *mins = l->mins ? l->mins + (size_t)tile * l->groups * FD_LINEAR_LANES : NULL;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[8];
    for (uint32_t r = 0; r < n; r++) acc[r] = _mm512_setzero_ps();
    size_t at = (size_t)row * blocks; /* of the first row; the others' are multiples of `blocks` behind */
    for (uint32_t g = 0; g < l->groups; g++) {
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + g * FD_LINEAR_LANES)));
        const __m512 min = mins ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(mins + g * FD_LINEAR_LANES)))
                                : _mm512_setzero_ps();
        for (uint32_t b = 0; b < l->group_blocks; b++, at++) {
            __m512i dot[8];
            for (uint32_t r = 0; r < n; r++) dot[r] = _mm512_setzero_si512();
            const size_t stride = (size_t)blocks * l->passes * FD_LINEAR_BLOCK;
            for (uint32_t pass = 0; pass < l->passes; pass++) {
                const int8_t *x = rows->x + (at * l->passes + pass) * FD_LINEAR_BLOCK;
                if (pass)
                    for (uint32_t r = 0; r < n; r++) dot[r] = _mm512_slli_epi32(dot[r], FD_LINEAR_LOW_BITS);
                if (bits == 8) {
                    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c++) {
                        const __m512i q = _mm512_loadu_si512(w + c * 64);
                        for (uint32_t r = 0; r < n; r++)
                            dot[r] = _mm512_dpbusd_epi32(dot[r], q, four(x + r * stride + 4 * c));
                    }
                } else {
                    for (uint32_t c = 0; c < FD_LINEAR_CHUNKS; c += 2) {
                        const __m512i both = _mm512_loadu_si512(w + c * 32);
                        const __m512i even = _mm512_and_si512(both, low);
                        const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                        for (uint32_t r = 0; r < n; r++) {
                            dot[r] = _mm512_dpbusd_epi32(dot[r], even, four(x + r * stride + 4 * c));
                            dot[r] = _mm512_dpbusd_epi32(dot[r], odd, four(x + r * stride + 4 * c + 4));
                        }
                    }
                }
            }
            w += bits == 8 ? 512 : 256;
            for (uint32_t r = 0; r < n; r++) {
                const size_t i = at + (size_t)r * blocks;
                const __m512 unit = _mm512_set1_ps(rows->scales[i]);
                const __m512i exact = _mm512_sub_epi32(dot[r], _mm512_set1_epi32(l->zero * rows->sums[i]));
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_mul_ps(scale, unit), acc[r]);
                if (mins) acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(rows->scales[i] * (float)rows->sums[i]), acc[r]);
            }
        }
    }
    const __mmask16 mask = l->outs - first < FD_LINEAR_LANES ? (__mmask16)((1u << (l->outs - first)) - 1) : 0xffff;
    const __m512 unit = _mm512_loadu_ps(l->units + first);
    const __m512 bias = l->bias ? _mm512_loadu_ps(l->bias + first) : _mm512_setzero_ps();
    for (uint32_t r = 0; r < n; r++)
        _mm512_mask_storeu_ps(y + (size_t)(row + r) * l->outs + first, mask, _mm512_fmadd_ps(acc[r], unit, bias));
}

#define FD_SOME_ROWS(n)                                                                                                \
    for (; row + n <= rows_n; row += n) {                                                                              \
        if (l->bits == 8) some_rows(l, tile, rows, row, y, n, 8);                                                      \
        else some_rows(l, tile, rows, row, y, n, 4);                                                                   \
    }

static void tile_rows(const fd_linear_t *l, uint32_t tile, const fd_linear_rows_t *rows, uint32_t rows_n, float *y) {
    uint32_t row = 0;
    FD_SOME_ROWS(8)
    FD_SOME_ROWS(4)
    FD_SOME_ROWS(2)
    FD_SOME_ROWS(1)
}

const fd_linear_ops_t fd_linear_ops_avx512vnni = {"avx512vnni", round_row, tile_rows};

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
