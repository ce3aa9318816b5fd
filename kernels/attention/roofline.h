/* The two rooflines of Williams, Waterman & Patterson, "Roofline" (CACM 52(4), 2009): how fast pinned threads can read
 * memory, which bounds a kernel that must read every byte once, and how fast a core can execute the instructions that
 * no kernel of an ISA can do without.
 */
#ifndef FD_ROOFLINE_H
#define FD_ROOFLINE_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"

/* Thread i, pinned to cpus[i], reads the i-th of n_threads parts of `buffer` (64-byte aligned) `passes` times, in one
 * of several ways: `variant` is a number below that of the variants (fd_read_variant). Returns the seconds from the
 * first thread's start to the last thread's end, or -1 with errno set if a thread cannot be started. */
double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes,
                       uint32_t variant);

/* Says how a variant reads; NULL if there are not so many variants. */
const char *fd_read_variant(uint32_t variant);

/* The nanoseconds in which the calling thread's core unpacks 64 bytes of K or V of a format and multiplies them by 1, 4
 * or 8 query rows with the instructions of an ISA's kernels, from registers, and does nothing else: no broadcasts of
 * multipliers, no prefetches, no softmax. The best of 16 bursts, each of `rounds` times 40
 * products of vectors. Returns -1 if
 * this is not known, or the core does not have the ISA. */
double fd_multiply_ns(fd_isa_t isa, fd_kv_dtype_t dtype, uint32_t rows, uint64_t rounds);

#endif
