/* fd_sum_parts_t of an ISA, written with its vec_* primitives. The including file names the ISA: FD_SUM_PARTS(isa). */
#pragma once

#include "cpu/act_simd.h"
#include "reduction.h"

FD_INLINE void sum_parts(const uint32_t dtype, const void *const *parts, uint32_t n_parts, size_t first, size_t n,
                         void *out) {
    enum { VECTORS = 4 };
    const size_t end = first + n;
    size_t i = first;
    for (; i + VECTORS * LANES <= end; i += VECTORS * LANES) {
        vec_t sums[VECTORS];
        FD_UNROLL
        for (size_t j = 0; j < VECTORS; j++) sums[j] = load(dtype, parts[0], i + j * LANES);
        for (uint32_t k = 1; k < n_parts; k++) {
            FD_UNROLL
            for (size_t j = 0; j < VECTORS; j++) sums[j] = vec_add(sums[j], load(dtype, parts[k], i + j * LANES));
        }
        FD_UNROLL
        for (size_t j = 0; j < VECTORS; j++) store(dtype, out, i + j * LANES, sums[j]);
    }
    for (; i < end; i++) {
        float sum = load_one(dtype, parts[0], i);
        for (uint32_t k = 1; k < n_parts; k++) sum += load_one(dtype, parts[k], i);
        store_one(dtype, out, i, sum);
    }
}

#define FD_SUM_PARTS_OF(name, dtype, text)                                                                             \
    static void sum_##name(const void *const *parts, uint32_t n_parts, size_t first, size_t n, void *out) {            \
        sum_parts(dtype, parts, n_parts, first, n, out);                                                               \
    }
#define FD_SUM_PARTS_ENTRY(name, dtype, text) [dtype] = sum_##name,
#define FD_SUM_PARTS(isa)                                                                                              \
    FD_ACT_FORMATS(FD_SUM_PARTS_OF)                                                                                    \
    const fd_sum_parts_t fd_sum_parts_##isa[FD_ACT_DTYPES] = {FD_ACT_FORMATS(FD_SUM_PARTS_ENTRY)};
