#include "rank_watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "region/doorbell.h"

#define LOOK_MAX_NS 200000000u /* between two looks; more means that the caller did not run */
#define OWN_TIMES 8u           /* a rank loops if it takes this many times what another rank took for the same work */
/* Helpers compute if they run for more than this and a 64th of the time: much less than they get on a busy machine, and
 * much more than threads that only wait for requests and doorbells. */
#define HELPERS_LEAST_NS 20000000u
#define HELPERS_SHARE 64u

uint32_t fd_thread_number(void) {
    static _Thread_local uint32_t number;
    if (!number) number = (uint32_t)syscall(SYS_gettid);
    return number;
}

/* Run time and slices of a thread: proc_pid_schedstat(5). */
static bool read_schedstat(uint32_t pid, uint32_t tid, uint64_t *run_ns, uint64_t *slices) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/task/%" PRIu32 "/schedstat", pid, tid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    const int found = fscanf(file, "%" SCNu64 " %*u %" SCNu64, run_ns, slices);
    fclose(file);
    return found == 2;
}

static bool read_life(uint32_t pid, uint32_t tid, fd_life_t *life) {
    uint64_t first_ns, unused;
    clockid_t clock;
    struct timespec t;
    if (!read_schedstat(pid, tid, &life->run_ns, &life->slices) || !read_schedstat(pid, pid, &first_ns, &unused) ||
        clock_getcpuclockid((pid_t)pid, &clock) || clock_gettime(clock, &t))
        return false;
    const uint64_t all_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    life->helpers_ns = all_ns > first_ns ? all_ns - first_ns : 0;
    return true;
}

/* True if the thread waits for a processor that others have, or for a page from a disk: proc_pid_stat(5). */
static bool waits_for_machine(uint32_t pid, uint32_t tid) {
    char path[64], state;
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/task/%" PRIu32 "/stat", pid, tid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    const int found = fscanf(file, "%*u (%*[^)]) %c", &state);
    fclose(file);
    return found == 1 && (state == 'R' || state == 'D');
}

fd_rank_sight_t fd_rank_look(fd_rank_watch_t *watch, uint32_t pid, uint32_t tid, uint64_t limit_ns, uint64_t own_ns) {
    fd_life_t life;
    const uint64_t now = fd_now_ns(), passed = now - watch->looked_ns;
    const bool first = !watch->looked_ns;
    if (!read_life(pid, tid, &life)) return FD_RANK_GOES_ON;
    watch->looked_ns = now;
    if (first) watch->first = watch->last = life;
    if (first || passed > LOOK_MAX_NS) return FD_RANK_GOES_ON;
    watch->still_ns += passed;
    const uint64_t helpers_ns = watch->last.helpers_ns + HELPERS_LEAST_NS + watch->still_ns / HELPERS_SHARE;
    const bool ran = life.run_ns != watch->last.run_ns || life.slices != watch->last.slices;
    if (ran || life.helpers_ns > helpers_ns) {
        watch->last = life;
        watch->still_ns = 0;
    }
    if (watch->still_ns >= limit_ns && !waits_for_machine(pid, tid)) return FD_RANK_STALLS;
    return life.run_ns - watch->first.run_ns > limit_ns + OWN_TIMES * own_ns ? FD_RANK_LOOPS : FD_RANK_GOES_ON;
}
