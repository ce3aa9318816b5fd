/* The R-engine's own types, which its files share: engine.c (thread 0 and life), jobs.c (the work of a call), calls.c
 * (the words of a slot), maintain.c (the arenas between calls) and link.c (leases and control operations). */
#ifndef FD_ENGINE_STATE_H
#define FD_ENGINE_STATE_H

#include <pthread.h>

#include "engine.h"
#include "work.h"

#define FD_MAX_LINKS 256u

typedef struct {
    uint64_t served; /* the last request bell that the engine has answered */
    uint64_t asked;  /* the last request bell that it has read */
    uint32_t layer;  /* of the call in progress */
    fd_step_t step;
} fd_slot_state_t;

struct fd_link {
    fd_engine_t *engine;
    uint8_t *region;
    bool no_wakeup; /* this link's request bells wake no thread */
    fd_work_t work;
    int eventfd;
    uint64_t lease_bytes;
    fd_notify_t notify;    /* `fn` and `poll` may be NULL */
    pthread_mutex_t mutex; /* guards `kv`, which planning a step and control operations use */
    fd_kvcache_t kv;
    fd_slot_state_t *slots; /* [n_slots], thread 0 only */
    uint64_t last_call_ns;  /* thread 0 only */
    struct {                /* atomics; thread 0 writes the others, any thread reads */
        uint64_t parts;     /* fd_kvcache_parts, or 0 without prefaulting; fd_link_grow writes it */
        uint64_t done;      /* parts that have been faulted in */
        uint64_t redo;      /* thread 0 is to begin again with this part; fd_link_grow writes it */
        int error;
    } prefault;
    struct { /* thread 0 writes, any thread reads: relaxed atomics */
        uint64_t calls, refused, rows, kv_bytes, busy_ns;
    } stats;
};

/* The items of a job that are dealt to one thread and not yet claimed: [next, end). A thread whose own queue is empty
 * claims items from the others' queues. The word contains the job's epoch, so that the compare-and-swap of a late
 * thread fails once the job is over. */
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

    pthread_mutex_t mutex;   /* guards all down to adopted_changes */
    pthread_cond_t adoption; /* signalled when thread 0 has adopted a change of `links` */
    fd_link_t *links[FD_MAX_LINKS];
    uint32_t n_links;
    uint32_t n_reserved; /* n_links and the links that are being built or removed */
    uint64_t kv_used;
    uint32_t adopted_changes; /* value of `link_changes` that thread 0 has adopted */
    uint32_t link_changes;    /* atomic; counts changes of `links` */
    uint32_t stop;            /* atomic */

    fd_link_t *adopted[FD_MAX_LINKS]; /* thread 0's own copy of `links` */
    uint32_t n_adopted, n_no_wakeup;
    bool polling; /* thread 0 polls the carriers of the adopted links (fd_poll_fn) */
    uint64_t last_busy_ns, maintained_ns;

    struct {
        const fd_work_t *work;
        fd_step_t *step; /* NULL: item i faults in part `first_part` + i of the link's arena */
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

/* Thread 0 polls the carriers of all adopted links (fd_poll_fn). Does nothing if polling is to end and has already
 * ended. */
void fd_poll_carriers(fd_engine_t *e, bool go_on);
/* Thread 0 does one slice of the maintenance that is due. False if none is. */
bool fd_maintain(fd_engine_t *e);

#endif
