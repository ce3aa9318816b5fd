/* The tables each ISA's file fills; dispatch.c hands them out. */
#ifndef FD_DISPATCH_H
#define FD_DISPATCH_H

#include "attention.h"

#if defined(__x86_64__)
#define FD_X86 1
#else
#define FD_X86 0
#endif

extern const fd_kv_ops_t fd_kv_ops_scalar[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_scalar;
#if FD_X86
extern const fd_kv_ops_t fd_kv_ops_avx2[FD_KV_DTYPES], fd_kv_ops_avx512[FD_KV_DTYPES];
extern const fd_vec_ops_t fd_vec_ops_avx2, fd_vec_ops_avx512;
#endif

#endif
