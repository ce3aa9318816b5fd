/* Jobs: work that the threads of the engine share.
 *
 * The items of a job are dealt to lanes, one for each thread that takes part. A thread empties its own lane first and
 * then helps the others, so a thread that is late or descheduled delays the job by one item at most. Thread 0 starts
 * jobs in bays, and several jobs may be under way at once. It can withdraw a job before its end: each thread then
 * stops at its item's next unit (work.h) and parks the item, and the job can be started again later with what is left.
 *
 * Nothing that one thread writes for each item is read by another: a thread counts what it has done and publishes it
 * when it finds no more to claim. Starting a job writes two cache lines, whatever the number of threads.
 */
#pragma once

#include "engine_state.h"

enum { FD_POLLS_PER_CLOCK = 16 }; /* an idle thread reads the clock once in this many polls */

/* The number of threads that take part in a job of `n_items` items. */
static inline uint32_t fd_job_threads(const fd_engine_t *e, uint32_t n_items) { return fd_min(n_items, e->n_threads); }

/* The argument of fd_helper_main, which frees it. */
typedef struct {
    fd_engine_t *engine;
    uint32_t thread;
} fd_helper_t;

void *fd_helper_main(void *helper);

/* Goes on with an item (fd_job_t.items) on a thread, and adds the bytes of KV-cache that it reads to *kv_bytes. Returns
 * false if `stop` has ended it before its end. */
bool fd_job_do_item(fd_job_t *job, uint32_t item, uint32_t thread, const fd_stop_t *stop, uint64_t *kv_bytes);

/* Makes the bays. False if out of memory. */
bool fd_bays_init(fd_engine_t *e);
void fd_bays_destroy(fd_engine_t *e);

/* ---- thread 0 only ---- */

/* A bay that no job has, or NULL. */
fd_bay_t *fd_bay_free(fd_engine_t *e);

/* Starts a job, or what is left of it, in a free bay. */
void fd_job_start(fd_engine_t *e, fd_bay_t *bay, fd_job_t *job);
/* Works on the job until `until_ns`. Returns false if there was nothing that could be claimed. */
bool fd_job_help(fd_engine_t *e, fd_bay_t *bay, uint64_t until_ns);
/* Asks the threads to stop. */
void fd_job_withdraw(fd_engine_t *e, fd_bay_t *bay);
/* True if no thread works on the job any more: all of it is done, or it was withdrawn, and job->n_items items are left.
 * Then the bay is free again. */
bool fd_job_over(fd_engine_t *e, fd_bay_t *bay);

/* Does a whole job. */
void fd_job_run(fd_engine_t *e, fd_bay_t *bay, fd_job_t *job);

void fd_wake_all(fd_engine_t *e);

/* False if a thread that has been idle since `idle_since` should sleep. Between the layers of a step it may spin longer
 * than between steps. */
bool fd_keep_spinning(const fd_engine_t *e, uint64_t idle_since);
