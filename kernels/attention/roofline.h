/* The read-only roofline: how fast pinned threads can stream through memory when they do nothing with it.
 *
 * Williams, Waterman & Patterson, "Roofline" (CACM 52(4), 2009): a kernel that must read every byte once is bounded by
 * this.
 */
#ifndef FD_ROOFLINE_H
#define FD_ROOFLINE_H

#include <stddef.h>
#include <stdint.h>

/* Every thread reads its n-th part of `buffer` (64-byte aligned) `passes` times, on its cpu. Seconds from the first
 * thread's start to the last one's end, or -1 with errno if threads cannot be started so. */
double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes);

/* The other roofline, arithmetic: instructions a second that the calling thread's core does of one that a kernel
 * multiplies 64 bytes with, "vfmadd231ps", "vdpbf16ps" or "vpdpbusd", over `rounds` x 16 of them that wait for nothing
 * but each other's units. -1 where it has none such. */
double fd_multiply_rate(const char *instruction, uint64_t rounds);

#endif
