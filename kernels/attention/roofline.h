/* The two rooflines of Williams, Waterman & Patterson, "Roofline" (CACM 52(4), 2009): how fast pinned threads can read
 * memory, which bounds a kernel that must read every byte once, and how fast a core can multiply.
 */
#ifndef FD_ROOFLINE_H
#define FD_ROOFLINE_H

#include <stddef.h>
#include <stdint.h>

/* Thread i, pinned to cpus[i], reads the i-th of n_threads parts of `buffer` (64-byte aligned) `passes` times. Returns
 * the seconds from the first thread's start to the last thread's end, or -1 with errno set if a thread cannot be
 * started. */
double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes);

/* The rate, in instructions a second, at which the calling thread's core executes independent instructions of one kind
 * on 64-byte vectors, measured over 16 * `rounds` of them. `instruction` is "vfmadd231ps", "vdpbf16ps" or "vpdpbusd".
 * Returns -1 if the core does not have the instruction. */
double fd_multiply_rate(const char *instruction, uint64_t rounds);

#endif
