/* What CUDA C needs to be compiled for the host: the threads of a block are fibers (cuda_on_host.cpp).
 *
 * tests/helpers/sources/compiled.py writes a file that includes this, the kernels' source and a table of its kernels.
 * GCC instruments that file as for ThreadSanitizer, so that every access of a kernel calls a function of
 * cuda_on_host.cpp, and that calls `kernel_access`. The simulated driver (tests/gpu/driver) checks there that the
 * device may make the access.
 *
 * A fiber runs until it waits for its block (__syncthreads) or for its warp (everything that the lanes of a warp do
 * together). So the threads between two barriers run one after the other, in order or, if `model.backwards` is set,
 * in the reverse order. What the lanes of a warp give each other is that of the PTX manual. Copies to shared memory
 * (cp.async) happen at once or, if `model.lazy` is set, only when they are waited for. A kernel whose barriers and
 * waits are right gives the same bits every time. Blocks run one after the other, the last one first.
 *
 * A deadlock, or lanes of a warp that do different things, end the run with a sentence in `model.fault`.
 */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define FD_ON_HOST
#define NOT_CHECKED __attribute__((no_sanitize("thread")))
#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static thread_local
#define FD_DYNAMIC_SHARED(name) unsigned char *const name = dynamic_shared()

struct dim3 {
    unsigned x, y, z;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern "C" {
#include "host_kernel.h"

/* For tests. */
typedef struct {
    int lazy, backwards;
    uint64_t shared_reads, conflicts; /* of 16 bytes by 8 neighbouring lanes, and the turns that they took beyond one */
    uint64_t copied;                  /* bytes of memory that cp.async has read */
    char fault[128];
} model_t;
extern model_t model;
/* Set by who runs the kernels; NULL: nothing is checked. */
extern void (*kernel_access)(const void *pointer, size_t bytes, bool write, size_t alignment);
}

void run_grid(void (*body)(void **), const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
              void **arguments);

dim3 block_index_now();
dim3 thread_index_now();
dim3 grid_size_now();
dim3 block_size_now();
unsigned char *dynamic_shared();
#define blockIdx block_index_now()
#define threadIdx thread_index_now()
#define gridDim grid_size_now()
#define blockDim block_size_now()

/* ---- what CUDA C has beyond C++ ---- */

void __syncthreads();
void __syncwarp();
static inline void __threadfence() {}
template <class T> static inline T __ldcv(const T *at) { return *at; }
template <class T> static inline T __ldcg(const T *at) { return *at; }
static inline unsigned atomicInc(unsigned *at, unsigned limit) {
    const unsigned before = *at;
    *at = before >= limit ? 0 : before + 1;
    return before;
}
static inline unsigned atomicMax(unsigned *at, unsigned x) {
    const unsigned before = *at;
    *at = before > x ? before : x;
    return before;
}
template <class To, class From> static inline To bits_as(From from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }

/* ---- what base.cu and lanes.cu have in PTX ---- */

float fd_from_half(unsigned short half);
unsigned short fd_to_half(float x);
void fd_copy16(unsigned char *to, const unsigned char *from, bool keep);
void fd_commit();
void wait_for_groups(size_t but);
template <int N> static inline void fd_wait() { wait_for_groups(N); }
uint4 fd_read16(const unsigned char *shared);
unsigned fd_permute(unsigned a, unsigned b, unsigned bytes);
unsigned fd_half_pair(float low, float high);
unsigned fd_minus_1152(unsigned pair);
static inline float fd_exp2(float x) { return exp2f(x); }
static inline float fd_log2(float x) { return log2f(x); }
float fd_shuffle_xor(float x, int mask);
unsigned fd_transposed(unsigned tile);
void fd_multiply_fp16(float *d, const unsigned *a, const unsigned *b);
void fd_multiply_bf16(float *d, const unsigned *a, const unsigned *b);
