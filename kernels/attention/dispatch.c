/* Selects the kernels for a KV format and an ISA. */
#include "chunk.h"
#include "dispatch.h"

size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t v_size, bool v_in_k) {
    return fd_chunk_end(dtype, head_size, v_size, v_in_k);
}

void fd_kv_prefetch_append(fd_kv_dtype_t dtype, const uint8_t *chunk, uint32_t head_size, uint32_t v_size, bool v_in_k,
                           uint32_t t) {
    const fd_kv_dtype_t k_format = fd_k_format(dtype), v_format = fd_v_format(dtype);
    const uint32_t k_depth = fd_k_depth(k_format, head_size), v_depth = fd_v_depth(v_format),
                   row = t / fd_word_elems(v_format);
    const uint8_t *k = chunk + fd_lane_offset(k_format, k_depth, t), *v = chunk + fd_chunk_v(dtype, head_size);
    for (uint32_t i = 0; i < k_depth; i++) __builtin_prefetch(k + i * FD_COLUMN_LANES * fd_word_bytes(k_format), 1);
    for (uint32_t d = 0; !v_in_k && d < v_size; d += FD_COLUMN_LANES / 2)
        __builtin_prefetch(v + fd_lane_offset(v_format, v_depth, d) + row * fd_lane_stride(v_format, v_size, d), 1);
}

const fd_kv_ops_t *fd_kv_ops(fd_kv_dtype_t dtype, fd_isa_t isa) {
    if ((unsigned)dtype >= FD_KV_DTYPES || !fd_isa_supported(isa)) return NULL;
#if FD_X86
    if (isa == FD_ISA_AMX) return &fd_kv_ops_amx[dtype];
    if (isa == FD_ISA_AVX512BF16) return &fd_kv_ops_avx512bf16[dtype];
    if (isa == FD_ISA_AVX512VNNI) return &fd_kv_ops_avx512vnni[dtype];
    if (isa == FD_ISA_AVX512) return &fd_kv_ops_avx512[dtype];
    if (isa == FD_ISA_AVXVNNI) return &fd_kv_ops_avxvnni[dtype];
    if (isa == FD_ISA_AVX2) return &fd_kv_ops_avx2[dtype];
#endif
#if FD_ARM64
    if (isa == FD_ISA_NEON) return &fd_kv_ops_neon[dtype];
#endif
    return &fd_kv_ops_scalar[dtype];
}

const fd_vec_ops_t *fd_vec_ops(fd_isa_t isa) {
    if (!fd_isa_supported(isa)) return NULL;
#if FD_X86
    if (isa >= FD_ISA_AVX512) return &fd_vec_ops_avx512;
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI) return &fd_vec_ops_avx2;
#endif
#if FD_ARM64
    if (isa == FD_ISA_NEON) return &fd_vec_ops_neon;
#endif
    return &fd_vec_ops_scalar;
}
