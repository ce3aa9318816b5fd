/* The memory of the KV-cache: how it is mapped, faulted in and given back to the OS, and on which NUMA node it lies. */
#ifndef FD_MEMORY_H
#define FD_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    FD_HUGE_MADVISE, /* transparent huge pages, where the OS has some */
    FD_HUGE_HUGETLB, /* huge pages from the pool that vm.nr_hugepages reserves */
    FD_HUGE_OFF,     /* small pages */
    FD_HUGE_MODES
} fd_huge_t;

/* Size of a transparent huge page. An arena begins on a multiple of it, so the first huge page is whole. */
#define FD_TRANSPARENT_BYTES ((size_t)2 << 20)

/* Bytes of the unit in which memory of this kind is best faulted in and given back. Never 0. */
size_t fd_memory_granule(fd_huge_t huge);

/* Maps `bytes` zeros, which the OS commits on first touch. Hugetlb pages are reserved at once, so that no later touch
 * can fail; for them `bytes` must be a multiple of the granule. Returns NULL on failure, with a sentence in err. */
void *fd_memory_map(size_t bytes, fd_huge_t huge, char *err, size_t err_len);
void fd_memory_unmap(void *memory, size_t bytes);

/* Faults in the OS pages that [from, from + bytes) touches, on the calling thread's NUMA node. Other threads may read
 * and write these pages at the same time. Returns 0 or errno. */
int fd_memory_fault_in(uint8_t *from, size_t bytes);

/* Gives the pages in [from, from + bytes) back to the OS. They read as zeros and use no memory until they are written
 * again. */
void fd_memory_give_back(uint8_t *from, size_t bytes);

/* Makes the calling thread, and the threads that it starts, allocate memory of NUMA node `node` only. Returns 0 or
 * errno. */
int fd_memory_bind(uint32_t node);

#endif
