/* Maintaining the arenas between calls: faulting them in ahead of use. */
#include "jobs.h"
#include "cache/arena.h"

/* Faults in the next parts of a link's arena: one per thread, or one if the threads work on calls. False if no part is
 * left, or if one has failed before. */
static bool fault_in(fd_engine_t *e, fd_link_t *link) {
    uint64_t redo = __atomic_load_n(&link->prefault.redo, __ATOMIC_RELAXED);
    if (redo != UINT64_MAX) redo = __atomic_exchange_n(&link->prefault.redo, UINT64_MAX, __ATOMIC_ACQ_REL);
    if (redo < link->prefault.done) __atomic_store_n(&link->prefault.done, redo, __ATOMIC_RELAXED);
    uint64_t done = link->prefault.done, left = __atomic_load_n(&link->prefault.parts, __ATOMIC_RELAXED) - done;
    if (!left || link->prefault.error) return false;
    const uint32_t n = e->n_jobs ? 1 : fd_min(left, e->n_threads);
    fd_poll_carriers(e, false); /* faulting in may take as long as a long call */
    fd_job_t job = {.kind = FD_JOB_FAULT_IN, .work = &link->work, .first_part = done, .n_items = n};
    if (n == 1) job.error = fd_kvcache_fault_in(&link->kv, done);
    else fd_job_run(e, e->bays, &job);
    __atomic_store_n(&link->prefault.error, __atomic_load_n(&job.error, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    if (!link->prefault.error) __atomic_store_n(&link->prefault.done, done + n, __ATOMIC_RELAXED);
    return true;
}

bool fd_maintain(fd_engine_t *e) {
    e->maintained_ns = fd_now_ns();
    for (uint32_t i = 0; i < e->n_adopted; i++)
        if (fault_in(e, e->adopted[i])) return true;
    return false;
}
