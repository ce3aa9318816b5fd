/* The tables that the ISA files define and dispatch.c returns; a table has one entry for each KV format
 * (region/formats.h). */
#pragma once

#include "attention.h"

extern const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_scalar;

#if FD_X86
extern const fd_kv_ops_t fd_kv_ops_avx2[FD_KV_DTYPES], fd_kv_ops_avxvnni[FD_KV_DTYPES], fd_kv_ops_avx512[FD_KV_DTYPES],
    fd_kv_ops_avx512vnni[FD_KV_DTYPES], fd_kv_ops_avx512bf16[FD_KV_DTYPES], fd_kv_ops_amx[FD_KV_DTYPES];
/* AVX-512 with VNNI has its own kernels for the integer formats only. */
#define fd_attend_fp32_avx512vnni fd_attend_fp32_avx512
#define fd_attend_fp16_avx512vnni fd_attend_fp16_avx512
#define fd_attend_bf16_avx512vnni fd_attend_bf16_avx512
/* Kernels that the tables of other ISAs use where those ISAs have no faster ones: AVX2's for AVX-VNNI, AVX-512's for
 * the ISAs above it. */
#define FD_DECLARE(name, dtype, text)                                                                                  \
    void fd_append_##name##_avx2(uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t, const float *k,      \
                                 const float *v, uint32_t hadamard);                                                   \
    void fd_attend_##name##_avx2(const fd_attend_t *a);                                                                \
    void fd_append_##name##_avx512(uint8_t *chunk, uint32_t head_size, uint32_t v_size, uint32_t t, const float *k,    \
                                   const float *v, uint32_t hadamard);                                                 \
    void fd_attend_##name##_avx512(const fd_attend_t *a);                                                              \
    void fd_attend_##name##_avx512vnni(const fd_attend_t *a);
FD_KV_FORMATS(FD_DECLARE)
#undef FD_DECLARE
extern const fd_vec_ops_t fd_vec_ops_avx2, fd_vec_ops_avx512;
#endif
#if FD_ARM64
extern const fd_kv_ops_t fd_kv_ops_neon[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_neon;
#endif
