/* Shares a loop among threads: the caller and the workers of a pool, which starts them when they are first needed.
 *
 * OpenMP's loops end when all threads have arrived, so they wait for a thread that the OS has not given a core yet.
 * Here the caller takes parts until none is left and then waits only for workers that hold a part. A worker that waits
 * for the next loop yields its core to whoever needs it, such as an R-node's threads, and soon sleeps.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Calls body(data, first, n) for ranges that together are 0 to parts - 1, in up to `threads` threads; in this one if
 * another thread has the pool at work. `parts` is below 2^32. Every thread has a slice of successive parts, the same in
 * all loops of as many parts and threads, so it finds in its caches what it had before. It takes ever fewer parts at a
 * time, but at least `least`; threads that are done take what others have left, so that all end together. `least` 0
 * means a quarter of a slice: for parts that are computed sooner than a cache line moves from core to core. */
void fd_parallel(void (*body)(void *data, size_t first, size_t n), void *data, size_t parts, size_t least,
                 unsigned threads);

/* How many of `threads` threads a loop over `numbers` numbers is worth: a thread wakes up later than it would have
 * computed 2^15 of them. */
static inline unsigned fd_worth_threads(size_t numbers, unsigned threads) {
    const size_t most = numbers / (1 << 15) + 1;
    return most < threads ? (unsigned)most : threads;
}

/* What loops compute, by which their times are added up. */
typedef enum {
    FD_LOOP_OTHER, /* the LM head, prompts, and products of models without joints (joint.h), but not those of experts */
    FD_LOOP_QKV,
    FD_LOOP_O,
    FD_LOOP_UP,
    FD_LOOP_DOWN,
    FD_LOOP_ROWS, /* norms, gates, RoPE */
    FD_LOOP_DRAWS,
    FD_LOOP_KINDS,
} fd_loop_kind_t;

/* Times of loops that threads share. A loop begins when its caller offers it, and ends with its last part. */
typedef struct {
    uint64_t loops, ns;
    uint64_t late_ns; /* of each thread that the loop may have, until it came */
    uint64_t done_ns; /* of each thread that came, after its last part */
    uint64_t busy_ns; /* of each thread, in between */
} fd_loop_times_t;

/* Loops that this thread begins compute `kind` from now on. Returns what they computed before. */
fd_loop_kind_t fd_loops_compute(fd_loop_kind_t kind);

/* Adds up the times of loops from now on, from zero, or stops. */
void fd_time_loops(bool on);

void fd_read_loop_times(fd_loop_times_t times[FD_LOOP_KINDS]);
