/* Inside of the R-engine, shared by engine.c (threads and calls) and link.c (leases and control). */
#ifndef FD_ENGINE_STATE_H
#define FD_ENGINE_STATE_H

#include <pthread.h>

#include "engine.h"
#include "work.h"

#define FD_MAX_THREADS 512u
#define FD_MAX_LINKS 256u

typedef struct {
    uint64_t served; /* last request bell answered */
    fd_step_t step;
} fd_slot_state_t;

struct fd_link {
    fd_engine_t *engine;
    uint8_t *region;
    bool no_wakeup; /* nobody wakes the engine for this link's bells */
    fd_work_t work;
    int eventfd;
    uint64_t lease_bytes;
    fd_notify_t notify;    /* fn may be NULL, as may look */
    pthread_mutex_t mutex; /* of `kv`: planning against control operations */
    fd_kvcache_t kv;
    fd_slot_state_t *slots; /* [n_slots], thread 0 only */
    uint64_t last_call_ns;  /* thread 0 only, and so what is written of the next; `parts` never changes */
    struct {
        uint64_t parts, done; /* of fd_kvcache_parts, `parts` 0 without prefaulting; done: relaxed atomic */
        int error;            /* relaxed atomic */
    } prefault;
    struct {
        uint64_t calls, refused, rows, kv_bytes, busy_ns; /* written by thread 0, read by anyone: relaxed atomics */
    } stats;
};

/* A thread's share of a job: items [next, end) not yet taken, by it or by one that has run out. The job's epoch is part
 * of the word, so that a latecomer's compare-and-swap can only succeed while the job is still going on. */
typedef struct {
    uint64_t claim __attribute__((aligned(64))); /* epoch << 32 | next << 16 | end */
} fd_queue_t;

struct fd_engine {
    uint32_t n_threads;
    fd_isa_t isa;
    uint64_t spin_ns, kv_bytes, trim_idle_ns;
    fd_huge_t huge;
    bool prefault;
    int eventfd, epoll;

    pthread_mutex_t mutex;   /* links, kv_used, adopted_changes */
    pthread_cond_t adoption; /* thread 0 has taken up a change of `links` */
    fd_link_t *links[FD_MAX_LINKS];
    uint32_t n_links, n_reserved; /* served; and those that are being built or taken down as well */
    uint64_t kv_used;
    uint32_t adopted_changes; /* value of `link_changes` that thread 0 acts on */
    uint32_t link_changes;    /* atomic; counts changes of `links` */
    uint32_t stop;            /* atomic */

    fd_link_t *adopted[FD_MAX_LINKS]; /* thread 0's own copy of `links` */
    uint32_t n_adopted, n_no_wakeup;
    bool polling; /* thread 0 takes in what comes over the live links' carriers (fd_poll_fn) */
    uint64_t last_busy_ns, maintained_ns;

    struct {
        const fd_work_t *work;
        const fd_step_t *step; /* NULL: item i faults in part `first_part` + i of the link's arena */
        uint8_t *slot;
        uint32_t layer;
        uint64_t first_part;
    } job;                                            /* constant while items_left > 0 */
    fd_queue_t *queues;                               /* [n_threads] */
    uint64_t job_bytes;                               /* atomic */
    int job_error;                                    /* atomic: errno of a part that could not be faulted in */
    uint32_t items_left __attribute__((aligned(64))); /* atomic */
    uint32_t epoch __attribute__((aligned(64)));      /* atomic and futex: counts jobs */
    uint32_t sleepers;                                /* atomic: helpers asleep on `epoch` */

    pthread_t *threads;
    uint32_t n_started;
};

#endif
