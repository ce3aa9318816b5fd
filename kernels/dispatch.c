/* From a KV dtype and an ISA to the kernels for them. */
#include "chunk.h"
#include "dispatch.h"

size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size) {
    const size_t affine = fd_kv_is_int(dtype) ? 2 * FD_PAGE_TOKENS * sizeof(uint32_t) : 0;
    return fd_chunk_k_affine(dtype, head_size) + affine;
}

const fd_kv_ops_t *fd_kv_ops(fd_kv_dtype_t dtype, fd_isa_t isa) {
    if ((unsigned)dtype >= FD_KV_DTYPES || !fd_isa_supported(isa)) return NULL;
#if FD_X86
    if (isa == FD_ISA_AMX) return &fd_kv_ops_amx[dtype];
    if (isa == FD_ISA_AVX512VNNI) return &fd_kv_ops_avx512vnni[dtype];
    if (isa == FD_ISA_AVX512) return &fd_kv_ops_avx512[dtype];
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
    if (isa == FD_ISA_AVX2) return &fd_vec_ops_avx2;
#endif
#if FD_ARM64
    if (isa == FD_ISA_NEON) return &fd_vec_ops_neon;
#endif
    return &fd_vec_ops_scalar;
}
