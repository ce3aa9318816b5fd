/* What our CUDA sources share. load_kernels (cupy_kernels.py) puts it before each of them.
 *
 * Rows are in fp32, fp16 or bf16. FD_ON_HOST: a source is compiled for the host, and tests/c/cuda_on_host.h has defined
 * what is PTX here. */
#define FD_KERNEL extern "C" __global__ void
#define FD_KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads) /* of a block */

#define FD_INFINITY __uint_as_float(0x7F800000u)

typedef unsigned long long fd_index_t;
enum { FD_FP32, FD_FP16, FD_BF16 };

#ifndef FD_ON_HOST
#define FD_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ float fd_from_half(unsigned short half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

__device__ __forceinline__ unsigned short fd_to_half(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
#endif

/* Rounds to the nearest, ties to even. */
__device__ __forceinline__ unsigned short fd_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (unsigned short)(bits >> 16 | 0x40u); /* a NaN stays one */
    return (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ float fd_load(const void *rows, fd_index_t i, unsigned dtype) {
    if (dtype == FD_FP32) return ((const float *)rows)[i];
    const unsigned short bits = ((const unsigned short *)rows)[i];
    return dtype == FD_FP16 ? fd_from_half(bits) : __uint_as_float((unsigned)bits << 16);
}

__device__ __forceinline__ void fd_store(void *rows, fd_index_t i, unsigned dtype, float x) {
    if (dtype == FD_FP32) ((float *)rows)[i] = x;
    else ((unsigned short *)rows)[i] = dtype == FD_FP16 ? fd_to_half(x) : fd_to_bf16(x);
}
