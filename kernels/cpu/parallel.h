/* Shares a loop among threads: the caller and the workers of a pool, which starts them when they are first needed.
 *
 * OpenMP's loops end when all threads have arrived, so they wait for a thread that the OS has not given a core yet.
 * Here the caller takes parts until none is left and then waits only for workers that hold a part. A worker that waits
 * for the next loop yields its core to whoever needs it, such as an R-node's threads, and soon sleeps.
 */
#pragma once

#include <stddef.h>

/* Calls body(data, first, n) for ranges that together are 0 to parts - 1, in up to `threads` threads; in this one if
 * another thread has the pool at work. A thread takes ever fewer parts at a time, but at least `least`, so that threads
 * end together. `least` 0 means a quarter of a thread's share: for parts that are computed sooner than a cache line
 * moves from core to core. */
void fd_parallel(void (*body)(void *data, size_t first, size_t n), void *data, size_t parts, size_t least,
                 unsigned threads);

/* How many of `threads` threads a loop over `numbers` numbers is worth: a thread wakes up later than it would have
 * computed 2^15 of them. */
static inline unsigned fd_worth_threads(size_t numbers, unsigned threads) {
    const size_t most = numbers / (1 << 15) + 1;
    return most < threads ? (unsigned)most : threads;
}
