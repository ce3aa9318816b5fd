/* Kernels for Advanced SIMD (NEON), which every 64-bit Arm CPU has, with 4 lanes. Tested under emulation only; their
 * speed has never been measured. */
#include "dispatch.h"

#if FD_ARM64
#include "chunk.h"
#include "cpu/vec_neon.h"

/* MAX_BLOCK may not exceed LANES, because online_softmax computes the rescale factors of a block in one vector. */
enum { MAX_BLOCK = 4 };

/* At most 16 of the 32 registers hold sums; the others hold 4 vectors of K or V, before and after unpacking, and a
 * broadcast multiplier. */
FD_INLINE int tile_vecs(fd_kv_dtype_t format, int rows) {
    return rows > 2 || (format != FD_KV_FP32 && format != FD_KV_FP16) ? 4 : 8;
}
FD_INLINE uint32_t block_rows(fd_kv_dtype_t dtype) { return MAX_BLOCK; }

/* Multipliers have 16 bits but are stored as 32-bit integers and multiplied one at a time (mla). Products of 16-bit
 * pairs (smull, smull2, addp, add) would occupy the multiplier as long and need three more instructions. */
FD_INLINE int kv_bits(fd_kv_dtype_t format) { return 16; }
FD_INLINE float kv_qmax(fd_kv_dtype_t format, int is_v) { return 32767.0f; }
FD_INLINE int kv_parts(fd_kv_dtype_t format) { return (int)fd_word_elems(format); }

/* The empty assembly here and the mla below keep gcc 12 from reordering integer sums and from unpacking all parts in
 * advance; there are not enough registers for either. */
FD_INLINE vec_t kv_unpack(fd_kv_dtype_t format, int is_v, vec_t words, int part) {
    if (format == FD_KV_FP32 || format == FD_KV_FP16) return words;
    const uint32x4_t x = vec_ints(words);
    if (format == FD_KV_BF16) return vec_bits(part == 0 ? vshlq_n_u32(x, 16) : vandq_u32(x, vdupq_n_u32(0xffff0000u)));
    vec_t element = vec_bits(
        vandq_u32(x >> (int)fd_elem_shift(format, (uint32_t)part), vdupq_n_u32((1u << fd_elem_bits(format)) - 1)));
    __asm__ volatile("" : "+w"(element));
    return element;
}
FD_INLINE vec_t kv_multiply_add(fd_kv_dtype_t format, int is_v, vec_t x, vec_t y, vec_t sum) {
    if (!fd_kv_is_int(format)) return vec_fma(x, y, sum);
    __asm__ volatile("mla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
}
FD_INLINE void kv_store_multipliers(fd_kv_dtype_t format, void *to, uint32_t i, vec_t x) {
    vst1q_s32((int32_t *)to + i * LANES, vcvtnq_s32_f32(x));
}

#include "tiles_simd.h"
#include "attend_simd.h"
#include "rows_simd.h"
#include "append.h"

#define FD_KERNELS(name, dtype, text) FD_ATTEND(name, dtype, neon, 4) FD_APPEND(name, dtype, neon)
FD_KV_FORMATS(FD_KERNELS)

#define FD_KV_OPS(name, dtype, text) [dtype] = {"neon", fd_append_##name##_neon, fd_attend_##name##_neon},
const fd_kv_ops_t fd_kv_ops_neon[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_KV_OPS)};

const fd_vec_ops_t fd_vec_ops_neon = {load_act, merge, finish};
#endif
