/* What CUDA C needs to be compiled for the host: a grid and its blocks are loops over threads.
 *
 * tests/helpers/compiled.py writes a file that includes this, the kernels' source and a table of its kernels. GCC
 * instruments it as for ThreadSanitizer, so that every access of a kernel calls one of the functions below, and these
 * call `kernel_access`. The simulated driver (tests/gpu/driver) checks there that the device may make the access.
 *
 * Threads run one after the other. A kernel that needs shared memory or barriers computes in phases instead, which one
 * thread goes through for its whole block (fastdecode/spart/block_kernels/block.cu).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define NOT_CHECKED __attribute__((no_sanitize("thread")))
#define __global__ static
#define __device__ static
#define __forceinline__ inline
#define __restrict__ restrict

typedef struct {
    unsigned x, y, z;
} dim3;
typedef struct {
    unsigned x, y, z, w;
} __attribute__((aligned(16))) uint4;

static _Thread_local dim3 block_index, thread_index, grid_size, block_size;
NOT_CHECKED static dim3 block_index_now(void) { return block_index; }
NOT_CHECKED static dim3 thread_index_now(void) { return thread_index; }
NOT_CHECKED static dim3 grid_size_now(void) { return grid_size; }
NOT_CHECKED static dim3 block_size_now(void) { return block_size; }
#define blockIdx block_index_now()
#define threadIdx thread_index_now()
#define gridDim grid_size_now()
#define blockDim block_size_now()
#define __ldcv(pointer) (*(pointer))

/* Set by who runs the kernels; NULL: nothing is checked. */
void (*kernel_access)(const void *pointer, size_t bytes, bool write, size_t alignment);

typedef struct {
    const char *name;
    unsigned n_arguments;
    const unsigned *sizes, *pointers; /* of each argument: its bytes, and whether it is a pointer */
    void (*run)(const unsigned grid[3], const unsigned block[3], void **arguments);
} kernel_t;

/* Every thread of every block, the last block first: nothing may depend on their order. */
#define RUN(call)                                                                                                      \
    grid_size = (dim3){grid[0], grid[1], grid[2]};                                                                     \
    block_size = (dim3){block[0], block[1], block[2]};                                                                 \
    for (block_index.z = grid[2]; block_index.z--;)                                                                    \
        for (block_index.y = grid[1]; block_index.y--;)                                                                \
            for (block_index.x = grid[0]; block_index.x--;)                                                            \
                for (thread_index.z = 0; thread_index.z < block[2]; thread_index.z++)                                  \
                    for (thread_index.y = 0; thread_index.y < block[1]; thread_index.y++)                              \
                        for (thread_index.x = 0; thread_index.x < block[0]; thread_index.x++) call

NOT_CHECKED static void check_access(const void *pointer, size_t bytes, bool write, size_t alignment) {
    if (kernel_access) kernel_access(pointer, bytes, write, alignment);
}

#define ACCESSES(n)                                                                                                    \
    NOT_CHECKED void __tsan_read##n(void *p) { check_access(p, n, false, n); }                                         \
    NOT_CHECKED void __tsan_write##n(void *p) { check_access(p, n, true, n); }                                         \
    NOT_CHECKED void __tsan_unaligned_read##n(void *p) { check_access(p, n, false, 1); }                               \
    NOT_CHECKED void __tsan_unaligned_write##n(void *p) { check_access(p, n, true, 1); }                               \
    NOT_CHECKED void __tsan_volatile_read##n(void *p) { check_access(p, n, false, n); }                                \
    NOT_CHECKED void __tsan_volatile_write##n(void *p) { check_access(p, n, true, n); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
NOT_CHECKED void __tsan_read_range(void *p, size_t n) { check_access(p, n, false, 1); }
NOT_CHECKED void __tsan_write_range(void *p, size_t n) { check_access(p, n, true, 1); }
NOT_CHECKED void __tsan_func_entry(void *p) { (void)p; }
NOT_CHECKED void __tsan_func_exit(void *p) { (void)p; }
NOT_CHECKED void __tsan_init(void) {}
