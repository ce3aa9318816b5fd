/* The R-engine's own types, which its files share: engine.c (thread 0 and life), jobs.c (the work of a call), turns.c
 * (the order of the calls), slots.c (the words of a slot), maintain.c (the arenas between calls), link.c (leases and
 * control operations) and migration.c (pages to and from other R-nodes). */
#pragma once

#include <pthread.h>

#include "engine.h"
#include "work.h"

#define FD_MAX_LINKS 256u

typedef struct fd_bay fd_bay_t;

typedef enum {
    FD_JOB_LAYER,   /* a layer of a slot's step */
    FD_JOB_COPIES,  /* the copies of shared pages that a step appends to */
    FD_JOB_FAULT_IN /* parts of the arena, from `first_part` on */
} fd_job_kind_t;

/* Work for all threads. */
typedef struct {
    /* These do not change while the job has a bay. */
    fd_job_kind_t kind;
    const fd_work_t *work;
    fd_step_t *step;
    uint8_t *slot;
    uint32_t layer;
    uint64_t first_part;
    uint32_t n_cut;        /* number of items into which the whole job is cut */
    const uint32_t *items; /* which items: number << 1, and 1 if begun; NULL: all, and none is begun */
    bool cancelled;        /* atomic: do nothing any more */
    int error;             /* atomic: errno of a part that could not be faulted in */

    /* Thread 0 only. */
    uint32_t n_items __attribute__((aligned(64))); /* left to be done when the job was started last */
    uint32_t *left;                                /* [max_items] where a withdrawn job keeps `items` */
    fd_bay_t *bay;                                 /* NULL: no thread works on the job */
    fd_link_t *link;
    uint32_t index; /* of the slot */
    bool begun;     /* the engine has begun the slot's call and not answered it yet */
    uint64_t turn;  /* calls that began earlier have smaller numbers */
    uint64_t cost;  /* of the whole job, see plan.c */
    uint64_t kv_bytes, busy_ns, since_ns;
} fd_job_t;

typedef struct {
    uint64_t armed;             /* the last arm bell that the engine has answered */
    uint32_t served;            /* layers of the step that are done */
    uint64_t bell;              /* the arm bell that fd_slot_asks has read */
    uint32_t request;           /* the layer_request that fd_slot_asks has read */
    uint32_t layer;             /* the layer in progress */
    uint64_t busy_ns, kv_bytes; /* of the step so far */
    fd_step_t step;
    fd_job_t job; /* the call in progress */
} fd_slot_state_t;

struct fd_link {
    fd_engine_t *engine;
    uint8_t *region;
    fd_work_t work;
    int eventfd;
    uint64_t lease_bytes;
    fd_carrier_t carrier;
    fd_shm_r_t shm;        /* `self` of the carrier of a link over shared memory */
    pthread_mutex_t mutex; /* guards `kv`, which planning a step and control operations use */
    fd_kvcache_t kv;
    fd_gpu_work_t *gpu;     /* of an engine with a GPU; thread 0 only */
    fd_slot_state_t *slots; /* [n_slots], thread 0 only */
    struct {                /* thread 0 only, see turns.c */
        int64_t credit_ns;  /* engine time that the link may still take in this round */
        double ns_per_cost; /* of a thread, for a unit of fd_plan_t.cost */
        uint32_t n_jobs;    /* calls begun and not answered */
        bool copying;       /* a step's copies are under way */
        bool waits;         /* the link asks for a call and has no credit */
        bool leaving;       /* the link is being removed: it begins no more calls */
    } turn;
    struct {            /* atomics; thread 0 writes the others, any thread reads */
        uint64_t parts; /* fd_kvcache_parts, or 0 without prefaulting; fd_link_grow writes it */
        uint64_t done;  /* parts that have been faulted in */
        uint64_t redo;  /* thread 0 is to begin again with this part; fd_link_grow writes it */
        int error;
    } prefault;
    struct { /* thread 0 writes, any thread reads: relaxed atomics */
        uint64_t calls, refused, rows, kv_bytes, busy_ns;
    } stats;
};

/* The items of a job that are dealt to one thread. */
typedef struct {
    /* Atomic: the items that no thread has claimed, epoch << 32 | next << 16 | end. A word of an earlier job stands for
     * the whole lane. */
    uint64_t claim __attribute__((aligned(64)));
    uint64_t kept;   /* thread 0 only: `claim` when the job was withdrawn */
    uint32_t parked; /* atomic: number << 1 | 1 of an item in which this lane's thread has stopped; or 0 */
} fd_lane_t;

/* Counts of the work that a few threads have done in a bay since the engine began. Atomics. */
typedef struct {
    uint64_t items __attribute__((aligned(64)));
    uint64_t kv_bytes;
} fd_tally_t;

/* A bay in which the threads do one job after another. */
struct fd_bay {
    /* Read by all threads. */
    uint64_t *notice __attribute__((aligned(64))); /* the bay's word of the board */
    fd_lane_t *lanes;                              /* [n_threads] */
    fd_tally_t *tallies;                           /* [one for a few threads] */
    uint32_t first_thread;                         /* takes part in every job of this bay */
    fd_job_t *job;                                 /* NULL: the bay is free */

    /* Thread 0 only. */
    uint32_t epoch __attribute__((aligned(64))); /* counts jobs */
    uint32_t n_items;                            /* of the job */
    bool withdrawn;
    uint32_t *collected, n_collected;       /* [n_threads] parked items of a withdrawn job */
    uint64_t items_before, kv_bytes_before; /* what the tallies showed before the job */
};

/* A word of its own for each thread, on which it sleeps. */
typedef struct {
    uint32_t asleep __attribute__((aligned(64))); /* atomic and futex */
} fd_sleeper_t;

enum { FD_BAYS = 8 }; /* as many words make up a cache line */

struct fd_engine {
    uint32_t n_threads;
    fd_isa_t isa;
    uint64_t spin_ns, step_spin_ns, kv_bytes;
    fd_huge_t huge;
    bool prefault;
    fd_cuda_t *cuda; /* NULL: the engine has no GPU */
    int eventfd, epoll;
    uint32_t holders;     /* atomic: users of this memory: the engine until fd_engine_free, and each stand-in */
    pthread_mutex_t duty; /* held by thread 0 while it is awake, or by the thread that stands in for it */

    pthread_mutex_t mutex;   /* guards all down to adopted_changes */
    pthread_cond_t adoption; /* signalled when thread 0 has adopted a change of `links` */
    fd_link_t *links[FD_MAX_LINKS];
    uint32_t n_links;
    uint32_t n_reserved; /* n_links and the links that are being built or removed */
    uint64_t kv_used;
    uint32_t adopted_changes; /* value of `link_changes` that thread 0 has adopted */
    uint32_t link_changes;    /* atomic; counts changes of `links` */
    uint32_t stop;            /* atomic */
    bool under_way;           /* atomic, written by thread 0: a step has been accepted whose layers are not all done */

    fd_link_t *adopted[FD_MAX_LINKS]; /* thread 0's own copy of `links` */
    uint32_t n_adopted, n_no_wakeup;
    bool polling;          /* thread 0 polls the carriers of the adopted links (fd_poll_fn) */
    uint32_t next_carrier; /* index in `adopted` of the link whose carrier is polled next */
    uint64_t maintained_ns;

    /* Thread 0 only: the order of the calls (turns.c). */
    uint32_t n_jobs;        /* calls begun and not answered */
    uint64_t working_since; /* the time at which n_jobs was 0 last */
    uint64_t n_begun;       /* calls begun since the engine began */
    uint32_t next_link;     /* index in `adopted` of the link that is asked first */
    fd_link_t *main_link;   /* the link whose job all threads work on, or NULL */
    fd_job_t *main_job;
    uint64_t charged_ns; /* main_link has been charged up to this time */
    uint64_t poll_ns;    /* the time that reading all bells took last */

    /* Atomics: the job of each bay, epoch << 32 | number of items. Threads spin on this line. */
    uint64_t board[FD_BAYS] __attribute__((aligned(64)));
    fd_bay_t bays[FD_BAYS];
    fd_sleeper_t *sleepers; /* [n_threads] */

    pthread_t *threads;
    uint32_t n_started;
};

/* Thread 0 polls the carriers of some of the adopted links, which take turns (fd_poll_fn), or ends polling for all.
 * Does nothing if polling is to end and has already ended. */
void fd_poll_carriers(fd_engine_t *e, bool go_on);
/* Thread 0 does one slice of the maintenance that is due. False if none is. */
bool fd_maintain(fd_engine_t *e);
