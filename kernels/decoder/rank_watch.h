/* Whether the thread that computes in another rank goes on, from what Linux counts for it.
 *
 * A thread goes on if it runs, if it waits for a processor or a disk, if it wakes up now and then (all waits for
 * R-nodes, for sums and for the next step have time limits), or if helpers compute for it. No limit is set to the time
 * that work takes: the attention of a long prompt takes many seconds between two sums. A thread that runs in a loop
 * without end is told by other ranks: they do the same work.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What Linux has counted for a thread and for its process. */
typedef struct {
    uint64_t run_ns, slices; /* time on a processor, and how often the thread got one */
    uint64_t helpers_ns;     /* time of all threads but the process's first, which runs the event loop */
} fd_life_t;

typedef struct {
    fd_life_t first, last; /* at the first look, and when the thread last went on */
    uint64_t looked_ns;    /* the time of the last look; 0: none yet */
    uint64_t still_ns;     /* for how long the thread has not gone on */
} fd_rank_watch_t;

typedef enum { FD_RANK_GOES_ON, FD_RANK_STALLS, FD_RANK_LOOPS } fd_rank_sight_t;

/* Looks at a thread, at most every LOOK_MAX_NS. It stalls if it has not gone on for `limit_ns`. It loops if it has run
 * since the first look for `limit_ns` and several times `own_ns` besides, the time in which the caller has done the
 * same work. A thread that Linux tells nothing about goes on. Time in which the caller itself did not run, because the
 * machine was suspended or too busy, does not count. */
fd_rank_sight_t fd_rank_look(fd_rank_watch_t *watch, uint32_t pid, uint32_t tid, uint64_t limit_ns, uint64_t own_ns);

/* The number of the calling thread, as Linux and other processes know it. */
uint32_t fd_thread_number(void);
