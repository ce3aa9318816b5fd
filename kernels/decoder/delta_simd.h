/* fd_delta_ops_t of an ISA. The including file names the ISA, FD_DELTA(isa), and defines TILE_VECTORS (tile_simd.h). */
#pragma once

#include "delta_rows_simd.h"
#include "delta_spans_simd.h"

#define FD_DELTA_OF(name, dtype, text)                                                                                 \
    static void convolve_##name(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n) {                \
        delta_convolve(dtype, d, r, head, n);                                                                          \
    }                                                                                                                  \
    static void advance_##name(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n) {                 \
        delta_advance(dtype, d, r, head, n);                                                                           \
    }                                                                                                                  \
    static fd_status_t spans_##name(const fd_delta_t *d, const fd_delta_rows_t *r, size_t head, size_t n) {            \
        return delta_spans(dtype, d, r, head, n);                                                                      \
    }
#define FD_DELTA_ENTRY(name, dtype, text, isa) [dtype] = {isa, convolve_##name, advance_##name, spans_##name},
#define FD_DELTA(isa)                                                                                                  \
    FD_ACT_FORMATS(FD_DELTA_OF)                                                                                        \
    const fd_delta_ops_t fd_delta_ops_##isa[FD_ACT_DTYPES] = {FD_ACT_FORMATS(FD_DELTA_ENTRY, #isa)};
