/* Memory of the KV-cache: how it is mapped, faulted in and given back to the OS, and on which NUMA node it lies. */
#ifndef FD_MEMORY_H
#define FD_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    FD_HUGE_MADVISE, /* transparent ones, where the OS has them to give */
    FD_HUGE_HUGETLB, /* of the pool that vm.nr_hugepages sets aside */
    FD_HUGE_OFF,
    FD_HUGE_MODES
} fd_huge_t;

#define FD_TRANSPARENT_BYTES ((size_t)2 << 20) /* arenas begin on such a boundary: the first huge page is whole */

/* The unit in which memory of that kind is best faulted in and given back. Never 0. */
size_t fd_memory_granule(fd_huge_t huge);

/* Maps zeros, none of them committed yet; hugetlb pages are reserved, so that no later touch can fail. `bytes` is a
 * multiple of the granule for hugetlb. Returns NULL with a sentence in err. */
void *fd_memory_map(size_t bytes, fd_huge_t huge, char *err, size_t err_len);
void fd_memory_unmap(void *memory, size_t bytes);

/* Faults in the OS pages that [from, from + bytes) touches, on the calling thread's NUMA node, whatever others do with
 * them at the same time. Returns 0 or errno. */
int fd_memory_fault_in(uint8_t *from, size_t bytes);

/* [from, from + bytes), in whole OS pages, reads as zeros from now on and costs nothing until it is written again. */
void fd_memory_give_back(uint8_t *from, size_t bytes);

/* This thread and those it starts take memory of that NUMA node and no other. Returns 0 or errno. */
int fd_memory_bind(uint32_t node);

#endif
