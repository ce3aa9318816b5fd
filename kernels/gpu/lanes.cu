/* What the lanes of a warp do together, and copies to shared memory, as PTX.
 *
 * A device before compute capability 8.0 has neither cp.async nor products of 16 elements: there a copy is a load and a
 * store, and a product is two of 8 elements. */
#ifndef FD_ON_HOST
/* Copies 16 bytes to shared memory some time before `fd_wait`; writes zeros if not `keep`. */
__device__ __forceinline__ void fd_copy16(unsigned char *to, const unsigned char *from, bool keep) {
#if __CUDA_ARCH__ >= 800
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to), bytes = keep ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
                 : "memory");
#else
    *(uint4 *)to = keep ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void fd_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits until at most N committed groups of copies are open. */
template <int N> __device__ __forceinline__ void fd_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
__device__ __forceinline__ uint4 fd_read16(const unsigned char *shared) { return *(const uint4 *)shared; }

__device__ __forceinline__ unsigned fd_permute(unsigned a, unsigned b, unsigned bytes) {
    return __byte_perm(a, b, bytes);
}
/* Two numbers in fp16, the first in the low half. */
__device__ __forceinline__ unsigned fd_half_pair(float low, float high) {
    unsigned to;
    asm("{ .reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b}; }"
        : "=r"(to)
        : "f"(low), "f"(high));
    return to;
}
__device__ __forceinline__ unsigned fd_minus_1152(unsigned pair) {
    unsigned to;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(to) : "r"(pair), "r"(0x64806480u));
    return to;
}
__device__ __forceinline__ float fd_exp2(float x) {
    float to;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(x));
    return to;
}
__device__ __forceinline__ float fd_log2(float x) { return log2f(x); }

__device__ __forceinline__ float fd_shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
/* The transpose of an 8x8 matrix, of which lane i has row i / 4, columns 2 * (i % 4) and the next. */
__device__ __forceinline__ unsigned fd_transposed(unsigned tile) {
    unsigned to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(tile));
    return to;
}
/* d += a * b, matrices of 16 x 16 and 16 x 8 (mma.m16n8k16 of the PTX manual). */
__device__ __forceinline__ void fd_multiply_fp16(float *d, const unsigned *a, const unsigned *b) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int k = 0; k < 2; k++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
                     " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}
__device__ __forceinline__ void fd_multiply_bf16(float *d, const unsigned *a, const unsigned *b) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __trap(); /* unsupported() refuses bf16 there */
#endif
}
#endif
