/* A simulated CUDA driver: libcuda.so.1 without a GPU, for tests. Unmodified cuda-bindings load and drive it.
 *
 * It is strict where a GPU is lenient, so that a mistake shows every time:
 *   - a device pointer is never the host pointer of the same memory, and only device pointers are taken where the
 *     driver wants them; every access of a kernel is checked (cuda_on_host.h);
 *   - streams share `queues` hardware queues, each in order: a wait that is open holds up everything behind it;
 *   - calls that synchronise (unregistering, freeing, the first launch of a lazily loaded kernel) wait for all queues,
 *     so they deadlock behind an open wait as on a GPU;
 *   - a host buffer holds poison from the moment a copy to it is queued until the copy has run;
 *   - an illegal access ends the context: every later call returns its error.
 * Its refusals have a sentence (sim_why). It has no clock: nothing here says how long anything takes on a GPU.
 *
 * It does not have: several devices, the default stream, forks within a capture, a GPU's memory model (every access
 * here is seen in the order of the host's).
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../c/host_kernel.h"

#define API __attribute__((visibility("default")))

typedef unsigned long long device_ptr_t;

/* CUresult */
enum {
    DONE = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

enum { MAX_QUEUES = 32, MAX_ARGUMENTS = 20, POISON_BYTE = 0xFF };

typedef struct event {
    atomic_ullong recorded, done; /* number of the last record that was queued, and of the last one that has run */
    bool captured;                /* its last record is part of a capture */
} event_t;

typedef enum { OP_COPY, OP_FILL, OP_WRITE, OP_WAIT, OP_KERNEL, OP_RECORD, OP_AWAIT, OP_HOST } op_kind_t;

typedef struct op {
    struct op *next;
    struct stream *stream;
    op_kind_t kind;
    void *to;         /* COPY, FILL; WRITE, WAIT: the word */
    const void *from; /* COPY */
    size_t bytes;     /* COPY, FILL; WRITE, WAIT: 4 or 8 */
    bool to_host;     /* COPY: the destination is the host's, so it holds poison until then */
    uint64_t value;   /* FILL, WRITE, WAIT; RECORD, AWAIT: the record's number */
    unsigned how;     /* WAIT: how to compare */
    event_t *event;   /* RECORD, AWAIT */
    void (*call)(void *);
    void *data; /* HOST */
    const kernel_t *kernel;
    unsigned grid[3], block[3], shared_bytes;
    uint64_t arguments[MAX_ARGUMENTS];
} op_t;

typedef struct graph {
    op_t *first, **last;
} graph_t;

typedef struct queue {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, moved;
    op_t *first, **last;
    uint64_t random;
    bool stop;
} queue_t;

typedef struct stream {
    queue_t *queue;
    uint64_t queued, done; /* operations; guarded by the queue's lock */
    bool capturing, invalid, destroyed;
    int mode; /* CUstreamCaptureMode */
    pthread_t capturer;
    graph_t *graph; /* of the capture */
} stream_t;

/* ---- calls.c: the checks that every call begins with ---- */

int sim_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The sticky error of an operation that ran. Ends the context. */
void sim_fault(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool sim_ended(void);
/* Refuses a call without cuInit or a current context, or after a fault. With `unsafe` also one that no capture allows,
 * which invalidates the captures that forbid it. */
int sim_enter(const char *call, bool unsafe);

#define ENTER(unsafe)                                                                                                  \
    do {                                                                                                               \
        const int entered = sim_enter(__func__, unsafe);                                                               \
        if (entered) return entered;                                                                                   \
    } while (0)

/* ---- memory.c ---- */

/* True if the device may access these bytes through this device pointer. */
bool sim_is_device(const void *pointer, size_t bytes, bool write);
/* True if the bytes are host memory that was registered or allocated by the driver. */
bool sim_is_pinned(const void *pointer, size_t bytes);
void sim_release_memory(void);
/* What nobody has given back. */
typedef struct {
    unsigned registered, pinned, allocated, streams, graphs, modules;
} sim_counts_t;
void sim_count_memory(sim_counts_t *counts);
extern size_t sim_memory_limit; /* bytes of the device's own memory */

/* ---- queues.c ---- */

void sim_start_queues(unsigned n, unsigned delay_us, uint64_t seed);
void sim_stop_queues(void); /* gives up what is queued */
queue_t *sim_next_queue(void);
void sim_push(stream_t *stream, const op_t *op); /* copies `op` */
uint64_t sim_stream_mark(stream_t *stream);      /* the end of what is queued now */
bool sim_stream_reached(stream_t *stream, uint64_t mark, bool wait);
void sim_wait_for_all(void); /* until every queue is empty */
void sim_nap(void);

/* ---- streams.c ---- */

/* Marks the captures that forbid an unsafe call of this thread as invalid. Returns whether there are any. */
bool sim_invalidate_captures(void);
void sim_release_streams(void);
void sim_count_streams(sim_counts_t *counts); /* and graphs */
/* Adds an operation to the stream, or to the capture that it is in. */
int sim_submit(stream_t *stream, op_t op);

/* ---- modules.c ---- */

void sim_release_modules(void);
void sim_count_modules(sim_counts_t *counts);
/* Runs on a queue's thread. */
void sim_run_kernel(const op_t *op);
