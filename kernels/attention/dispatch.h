/* The tables each ISA's file fills; dispatch.c hands them out. */
#ifndef FD_DISPATCH_H
#define FD_DISPATCH_H

#include "attention.h"

#if defined(__x86_64__)
#define FD_X86 1
#else
#define FD_X86 0
#endif
#if defined(__aarch64__)
#define FD_ARM64 1
#else
#define FD_ARM64 0
#endif

extern const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_scalar;
#if FD_X86
extern const fd_kv_ops_t fd_kv_ops_avx2[FD_KV_DTYPES], fd_kv_ops_avx512[FD_KV_DTYPES],
    fd_kv_ops_avx512vnni[FD_KV_DTYPES], fd_kv_ops_avx512bf16[FD_KV_DTYPES], fd_kv_ops_amx[FD_KV_DTYPES];
/* What the ISAs above AVX-512 have no better ones for. */
#define FD_DECLARE(name)                                                                                               \
    void fd_append_##name##_avx512(uint8_t *chunk, uint32_t head_size, uint32_t t, const float *k, const float *v);    \
    void fd_attend_##name##_avx512(const fd_attend_t *a);
FD_DECLARE(fp32)
FD_DECLARE(fp16)
FD_DECLARE(bf16)
FD_DECLARE(int8)
FD_DECLARE(int4)
FD_DECLARE(int8_int4)
#undef FD_DECLARE
void fd_attend_int8_avx512vnni(const fd_attend_t *a);
void fd_attend_int4_avx512vnni(const fd_attend_t *a);
void fd_attend_int8_int4_avx512vnni(const fd_attend_t *a);
extern const fd_vec_ops_t fd_vec_ops_avx2, fd_vec_ops_avx512;
#endif
#if FD_ARM64
extern const fd_kv_ops_t fd_kv_ops_neon[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_neon;
#endif

#endif
