#define _GNU_SOURCE
#include "memory.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* The value of a field of /proc/meminfo, or 0 if the file has no such field. Fields that count pages have no unit; the
 * others are in KiB. */
static size_t meminfo(const char *field) {
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    size_t value = 0, n = strlen(field);
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, field, n) && line[n] == ':') sscanf(line + n + 1, "%zu", &value);
    if (f) fclose(f);
    return value;
}

size_t fd_memory_granule(fd_huge_t huge) {
    if (huge == FD_HUGE_MADVISE) return FD_TRANSPARENT_BYTES;
    size_t hugetlb = huge == FD_HUGE_HUGETLB ? meminfo("Hugepagesize") * 1024 : 0;
    return hugetlb ? hugetlb : (size_t)sysconf(_SC_PAGESIZE);
}

size_t fd_memory_unit(fd_huge_t huge) {
    return huge == FD_HUGE_HUGETLB ? fd_memory_granule(huge) : (size_t)sysconf(_SC_PAGESIZE);
}

static fd_status_t commit_hugetlb(uint8_t *from, size_t bytes, fd_error_t *error) {
    /* Without MAP_NORESERVE, so that this call fails if pages are missing; a touch of a missing page would be a
     * SIGBUS. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_FIXED;
    if (mmap(from, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
        fd_memory_decommit(from, bytes); /* a failed MAP_FIXED may have unmapped the range */
        size_t page = fd_memory_granule(FD_HUGE_HUGETLB), total = meminfo("HugePages_Total");
        size_t reserved = meminfo("HugePages_Rsvd"), unused = meminfo("HugePages_Free");
        size_t left = unused > reserved ? unused - reserved : 0, needed = bytes / page;
        return FD_FAIL(FD_INTERNAL,
                       "%zu huge pages of %zu KiB are needed but %zu are available: set vm.nr_hugepages to %zu or more",
                       needed, page / 1024, left, needed > left ? total + needed - left : needed);
    }
    /* The pool reserves pages without regard to their NUMA node. Under fd_memory_bind, a touch could find no free huge
     * page on the bound node and raise SIGBUS, so this mapping prefers the local node but accepts any. */
    syscall(SYS_mbind, from, bytes, MPOL_LOCAL, NULL, 0ul, 0u);
    return FD_OK;
}

void *fd_memory_reserve(size_t bytes, fd_huge_t huge, fd_error_t *error) {
    const size_t granule = fd_memory_granule(huge), unit = fd_memory_unit(huge),
                 align = fd_max(granule, FD_TRANSPARENT_BYTES), whole = fd_round_up(bytes, unit), room = whole + align;
    uint8_t *start = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return FD_FAIL(FD_INTERNAL, "cannot reserve %zu bytes of address space for the KV-cache: %s", bytes,
                       strerror(errno)),
               NULL;
    size_t before = -(uintptr_t)start % align;
    uint8_t *memory = start + before;
    if (before) munmap(start, before);
    munmap(memory + whole, room - before - whole);
    return memory;
}

fd_status_t fd_memory_commit(uint8_t *from, size_t bytes, fd_huge_t huge, fd_error_t *error) {
    if (huge == FD_HUGE_HUGETLB) return commit_hugetlb(from, bytes, error);
    if (mprotect(from, bytes, PROT_READ | PROT_WRITE))
        return FD_FAIL(FD_INTERNAL, "cannot map %zu bytes for the KV-cache: %s", bytes, strerror(errno));
    madvise(from, bytes,
            huge == FD_HUGE_MADVISE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE); /* a kernel without huge pages refuses both */
    return FD_OK;
}

void fd_memory_decommit(uint8_t *from, size_t bytes) {
    mmap(from, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void *fd_memory_map(size_t bytes, fd_huge_t huge, fd_error_t *error) {
    const size_t whole = fd_round_up(bytes, fd_memory_unit(huge));
    uint8_t *memory = fd_memory_reserve(whole, huge, error);
    if (memory && fd_memory_commit(memory, whole, huge, error) != FD_OK) {
        munmap(memory, whole);
        return NULL;
    }
    return memory;
}

void fd_memory_unmap(void *memory, size_t bytes) { munmap(memory, bytes); }

int fd_memory_fault_in(uint8_t *from, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)from % page;
    from -= before;
    bytes += before;
    if (!madvise(from, bytes, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return errno;
    for (size_t at = 0; at < bytes; at += page) /* a kernel older than MADV_POPULATE_WRITE: write every page instead */
        __atomic_fetch_or(from + at, 0, __ATOMIC_RELAXED);
    return 0;
}

void fd_memory_give_back(uint8_t *from, size_t bytes) { madvise(from, bytes, MADV_DONTNEED); }

int fd_memory_bind(uint32_t node) {
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long nodes[1024 / BITS] = {0};
    if (node >= 1024) return EINVAL;
    nodes[node / BITS] = 1ul << node % BITS;
    return syscall(SYS_set_mempolicy, MPOL_BIND, nodes, 1024ul + 1) ? errno : 0;
}
