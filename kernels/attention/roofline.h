/* The roofline of Williams, Waterman & Patterson, "Roofline" (CACM 52(4), 2009): how fast pinned threads can read
 * memory, which bounds a kernel that must read every byte once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Thread i, pinned to cpus[i], reads the i-th of n_threads parts of `buffer` (64-byte aligned) `passes` times, in one
 * of several ways: `variant` is a number below that of the variants (fd_read_variant). If `cold`, on x86 and 64-bit
 * Arm, no cache has the buffer when the threads begin. Returns the seconds from the first thread's start to the
 * last thread's end, or -1 with errno set if a thread cannot be started. */
double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes,
                       uint32_t variant, bool cold);

/* Says how a variant reads; NULL if there is no such variant. */
const char *fd_read_variant(uint32_t variant);
