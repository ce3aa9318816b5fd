/* Kernels in portable C: the reference for the vector kernels, and the only kernels on an architecture without those.
 * They multiply in fp32, integer formats too. */
#include "chunk.h"
#include "dispatch.h"
#include "cpu/vec_scalar.h"

enum { MAX_BLOCK = 4 };

/* x86-64 has 16 registers of 4 lanes. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) { return rows > 1 ? 2 : 4; }
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }

/* Multipliers are fp32, and kv_unpack subtracts the zero point. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 32; }
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return 1.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return (int)fd_word_elems(format); }

FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    if (format == FD_KV_FP32 || format == FD_KV_FP16) return words;
    const words_t element = vec_ints(words) >> fd_elem_shift(format, (uint32_t)part);
    if (format == FD_KV_BF16) return vec_bits(element << 16);
    const words_t stored = element & ((1u << fd_elem_bits(format)) - 1);
    return vec_from_int(vec_bits(stored - (uint32_t)fd_zero_point(format)));
}
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    return vec_fma(x, y, sum);
}
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    vec_store((float *)to + i * LANES, x);
}

#include "tiles_simd.h"
#include "attend_simd.h"
#include "rows_simd.h"
#include "append.h"

#define FD_KERNELS(name, dtype, text) FD_ATTEND(name, dtype, scalar, 4) FD_APPEND(name, dtype, scalar)
FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"scalar", fd_append_##name##_scalar, fd_attend_##name##_scalar},
const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

const fd_vec_ops_t fd_vec_ops_scalar = {load_act, merge, finish};
