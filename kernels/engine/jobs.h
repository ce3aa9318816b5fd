/* Jobs: the items of one call, which all threads of the engine share. Thread 0 deals the items of a job to the threads'
 * queues and works too; the other threads are its helpers. */
#ifndef FD_JOBS_H
#define FD_JOBS_H

#include "engine_state.h"

enum { FD_POLLS_PER_CLOCK = 16 }; /* an idle thread reads the clock once in this many polls */

/* The argument of fd_helper_main, which frees it. */
typedef struct {
    fd_engine_t *engine;
    uint32_t thread;
} fd_helper_t;

void *fd_helper_main(void *helper);

/* Thread 0 calls this after it has filled in e->job. Returns when all items are done. */
void fd_run_job(fd_engine_t *e, uint32_t n_items);
/* Thread 0 calls this after fd_slot_begin_layer. Returns the bytes of KV-cache that the layer read. */
uint64_t fd_run_layer(fd_engine_t *e, fd_link_t *link, uint32_t slot);

void fd_wake_helpers(fd_engine_t *e, uint32_t epoch);

/* False if a thread that has been idle since `idle_since` should sleep. */
bool fd_keep_spinning(const fd_engine_t *e, uint64_t idle_since);

#endif
