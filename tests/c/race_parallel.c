/* Several threads share loops at once (kernels/cpu/parallel.h), for ThreadSanitizer to watch (test_races.py).
 *
 * Each part of a loop adds to a number of its own, without atomics, so that a part that runs twice or beside its caller
 * is seen. Loops follow each other at once, or after the workers have gone to sleep, and some of them are timed.
 *
 * Usage: race_parallel THREADS SECONDS. Goes on for these seconds, and until the workers have taken enough parts.
 * Prints the number of loops and of parts that a worker took.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cpu/parallel.h"
#include "require.h"

enum { CALLERS = 2, MOST_PARTS = 64 };

static time_t end;
static unsigned threads;
static size_t n_loops, n_taken; /* atomic */

typedef struct {
    pthread_t caller;
    size_t parts[MOST_PARTS];
} loop_t;

static void count(void *data, size_t first, size_t n) {
    loop_t *loop = data;
    for (size_t i = first; i < first + n; i++) loop->parts[i]++;
    if (!pthread_equal(loop->caller, pthread_self())) __atomic_fetch_add(&n_taken, n, __ATOMIC_RELAXED);
}

static void *call(void *seed) {
    unsigned state = (unsigned)(size_t)seed;
    while (time(NULL) < end || __atomic_load_n(&n_loops, __ATOMIC_RELAXED) <= 1000 ||
           __atomic_load_n(&n_taken, __ATOMIC_RELAXED) <= 100) {
        loop_t loop = {.caller = pthread_self()};
        const size_t parts = (size_t)rand_r(&state) % (MOST_PARTS + 1);
        fd_parallel(count, &loop, parts, (size_t)rand_r(&state) % 4, threads);
        for (size_t i = 0; i < MOST_PARTS; i++) REQUIRE(loop.parts[i] == (i < parts));
        if (rand_r(&state) % 64 == 0) usleep(1000);
        if (rand_r(&state) % 256 == 0) fd_time_loops(rand_r(&state) % 4);
        __atomic_fetch_add(&n_loops, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void call_once(void) {
    loop_t loop = {.caller = pthread_self()};
    fd_parallel(count, &loop, MOST_PARTS, 1, threads);
}

int main(int argc, char **argv) {
    REQUIRE(argc == 3);
    threads = (unsigned)atoi(argv[1]);
    end = time(NULL) + atoi(argv[2]);
    pthread_t callers[CALLERS];
    for (size_t i = 0; i < CALLERS; i++) REQUIRE(!pthread_create(&callers[i], NULL, call, (void *)(i + 1)));
    for (size_t i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    fd_time_loops(true);
    call_once();
    fd_loop_times_t times[FD_LOOP_KINDS];
    fd_read_loop_times(times);
    const fd_loop_times_t *t = &times[FD_LOOP_OTHER];
    REQUIRE(t->loops == 1 && t->late_ns + t->done_ns + t->busy_ns == threads * t->ns && t->busy_ns <= threads * t->ns);
    printf("%zu loops, %zu parts\n", n_loops, n_taken);
    return 0;
}
