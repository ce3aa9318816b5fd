/* The choice of kernels for programs that link only the scalar ones, because the vector kernels take long to compile.
 * Include this in one file of a program, instead of linking kernels/attention/dispatch.c. */
#pragma once

#include "attention/chunk.h"
#include "attention/dispatch.h"

size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t v_size, bool v_in_k) {
    return fd_chunk_end(dtype, head_size, v_size, v_in_k);
}
void fd_kv_prefetch_append(fd_kv_dtype_t dtype, const uint8_t *chunk, uint32_t head_size, uint32_t v_size, bool v_in_k,
                           uint32_t t) {
    (void)dtype, (void)chunk, (void)head_size, (void)v_size, (void)v_in_k, (void)t;
}
const fd_kv_ops_t *fd_kv_ops(fd_kv_dtype_t dtype, fd_isa_t isa) { return (void)isa, &fd_kv_ops_scalar[dtype]; }
const fd_vec_ops_t *fd_vec_ops(fd_isa_t isa) { return (void)isa, &fd_vec_ops_scalar; }
