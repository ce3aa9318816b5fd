/* The memory of the KV-cache: how it is mapped, faulted in and given back to the OS, and on which NUMA node it lies. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

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

/* Multiple at which fd_memory_commit begins and ends: the granule of hugetlb pages, else an OS page. */
size_t fd_memory_unit(fd_huge_t huge);

/* Reserves address space, which uses no memory and must not be touched before it is committed. It begins at a multiple
 * of the granule and of FD_TRANSPARENT_BYTES. */
void *fd_memory_reserve(size_t bytes, fd_huge_t huge, fd_error_t *error);
/* Makes reserved address space usable: zeros, for which the OS finds memory on first touch. Hugetlb pages are set aside
 * at once, so that no later touch can fail. `from` and `bytes` are multiples of fd_memory_unit. After a
 * failure the range may be committed in part. */
fd_status_t fd_memory_commit(uint8_t *from, size_t bytes, fd_huge_t huge, fd_error_t *error);
/* Turns committed memory into reserved address space again. */
void fd_memory_decommit(uint8_t *from, size_t bytes);
/* Reserves and commits; `bytes` as for fd_memory_commit. */
void *fd_memory_map(size_t bytes, fd_huge_t huge, fd_error_t *error);
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
