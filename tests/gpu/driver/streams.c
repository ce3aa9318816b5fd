/* Streams, events, copies, stream memory operations, and the capture of all of these into graphs. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_STREAMS = 1024, EXTERNAL = 1 };
enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };             /* CUstreamCaptureMode */
enum { NO_MEMORY_BARRIER = 1, WAIT_FLUSH = 1 << 30 };              /* of write and wait */
enum { WAIT_32 = 1, WRITE_32, FLUSH, WAIT_64, WRITE_64, BARRIER }; /* CUstreamBatchMemOpType */

/* CUstreamBatchMemOpParams */
typedef union {
    unsigned operation;
    struct {
        unsigned operation;
        device_ptr_t address;
        uint64_t value;
        unsigned flags;
        device_ptr_t alias;
    } word;
    uint64_t size[6];
} memop_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream_t *streams[MAX_STREAMS]; /* they stay until sim_reset, so no operation in flight loses its own */
static unsigned n_streams;
static atomic_uint n_graphs; /* and executable ones */

static void free_graph(graph_t *graph) {
    while (graph && graph->first) {
        op_t *op = graph->first;
        graph->first = op->next;
        free(op);
    }
    free(graph);
}

void sim_release_streams(void) {
    for (unsigned i = 0; i < n_streams; i++) {
        free_graph(streams[i]->graph);
        free(streams[i]);
    }
    n_streams = 0;
    atomic_store(&n_graphs, 0);
}

void sim_count_streams(sim_counts_t *counts) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < n_streams; i++) counts->streams += !streams[i]->destroyed;
    pthread_mutex_unlock(&lock);
    counts->graphs = atomic_load(&n_graphs);
}

/* What the calls of this thread may do to captures. */
static _Thread_local int exchanged = MODE_GLOBAL;

API int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(false);
    if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED) return sim_fail(INVALID_VALUE, "mode %d", *mode);
    const int before = exchanged;
    exchanged = *mode;
    *mode = before;
    return DONE;
}

bool sim_invalidate_captures(void) {
    bool any = false;
    if (exchanged == MODE_RELAXED) return false;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < n_streams; i++) {
        stream_t *s = streams[i];
        const bool mine = s->capturing && pthread_equal(s->capturer, pthread_self());
        const bool anywhere = s->mode == MODE_GLOBAL && exchanged == MODE_GLOBAL;
        if (s->capturing && (anywhere || (s->mode != MODE_RELAXED && mine))) any = s->invalid = true;
    }
    pthread_mutex_unlock(&lock);
    return any;
}

/* ---- operations ---- */

static void append(graph_t *graph, const op_t *op) {
    op_t *copy = malloc(sizeof *copy);
    if (!copy) abort();
    *copy = *op;
    copy->next = NULL;
    *graph->last = copy;
    graph->last = &copy->next;
}

/* Queues an operation that is not captured. */
static void queue_up(stream_t *stream, op_t op) {
    if (op.kind == OP_RECORD && !op.value) op.value = atomic_fetch_add(&op.event->recorded, 1) + 1;
    if (op.kind == OP_AWAIT && !op.value) op.value = atomic_load(&op.event->recorded);
    if (op.kind == OP_COPY && op.to_host) memset(op.to, POISON_BYTE, op.bytes);
    sim_push(stream, &op);
}

static int spoilt(void) { return sim_fail(CAPTURE_INVALIDATED, "a call that no capture allows has ended it"); }

int sim_submit(stream_t *stream, op_t op) {
    if (!stream) return sim_fail(INVALID_HANDLE, "the simulation has no default stream");
    if (stream->capturing && stream->invalid) return spoilt();
    if (stream->capturing) append(stream->graph, &op);
    else queue_up(stream, op);
    return DONE;
}

/* A word that the stream writes or waits for. */
static int submit_word(stream_t *stream, op_kind_t kind, device_ptr_t address, uint64_t value, unsigned flags,
                       size_t bytes) {
    void *word = (void *)(uintptr_t)address;
    const unsigned known = kind == OP_WAIT ? 3 | WAIT_FLUSH : NO_MEMORY_BARRIER;
    if (flags & ~known) return sim_fail(INVALID_VALUE, "flags %u of a stream memory operation", flags);
    if (address % bytes) return sim_fail(INVALID_VALUE, "the word %p is not aligned", word);
    if (!sim_is_device(word, bytes, kind == OP_WRITE)) {
        const char *hint = sim_is_pinned(word, bytes) ? "; it is a host pointer" : "";
        return sim_fail(INVALID_VALUE, "the word %p is at no device pointer%s", word, hint);
    }
    return sim_submit(stream, (op_t){.kind = kind, .to = word, .value = value, .how = flags & 3, .bytes = bytes});
}

API int cuStreamWriteValue32_v2(stream_t *s, device_ptr_t address, uint32_t value, unsigned flags) {
    ENTER(false);
    return submit_word(s, OP_WRITE, address, value, flags, 4);
}

API int cuStreamWriteValue64_v2(stream_t *s, device_ptr_t address, uint64_t value, unsigned flags) {
    ENTER(false);
    return submit_word(s, OP_WRITE, address, value, flags, 8);
}

API int cuStreamWaitValue32_v2(stream_t *s, device_ptr_t address, uint32_t value, unsigned flags) {
    ENTER(false);
    return submit_word(s, OP_WAIT, address, value, flags, 4);
}

API int cuStreamWaitValue64_v2(stream_t *s, device_ptr_t address, uint64_t value, unsigned flags) {
    ENTER(false);
    return submit_word(s, OP_WAIT, address, value, flags, 8);
}

API int cuStreamBatchMemOp_v2(stream_t *s, unsigned count, const memop_t *operations, unsigned flags) {
    ENTER(false);
    if (!count || count > 256 || flags) return sim_fail(INVALID_VALUE, "a batch of %u, flags %u", count, flags);
    for (unsigned i = 0; i < count; i++) {
        const memop_t *o = &operations[i];
        const unsigned kind = o->operation;
        const bool waits = kind == WAIT_32 || kind == WAIT_64, writes = kind == WRITE_32 || kind == WRITE_64;
        if (kind == FLUSH || kind == BARRIER) continue; /* the host's order needs neither */
        if (!waits && !writes) return sim_fail(INVALID_VALUE, "stream memory operation %u", kind);
        const size_t bytes = kind == WAIT_64 || kind == WRITE_64 ? 8 : 4;
        const uint64_t value = bytes == 8 ? o->word.value : (uint32_t)o->word.value;
        const int rc = submit_word(s, waits ? OP_WAIT : OP_WRITE, o->word.address, value, o->word.flags, bytes);
        if (rc) return rc;
    }
    return DONE;
}

typedef enum { FROM_DEVICE = 1, TO_DEVICE = 2 } direction_t;

static int submit_copy(stream_t *s, const void *to, const void *from, size_t bytes, unsigned device_ends) {
    const bool to_device = sim_is_device(to, bytes, true), from_device = sim_is_device(from, bytes, false);
    if (device_ends & TO_DEVICE && !to_device)
        return sim_fail(INVALID_VALUE, "a copy to %p, which is no device pointer", to);
    if (device_ends & FROM_DEVICE && !from_device)
        return sim_fail(INVALID_VALUE, "a copy from %p, which is no device pointer", from);
    if (!to_device && !sim_is_pinned(to, bytes))
        return sim_fail(INVALID_VALUE, "an asynchronous copy to %p, which is not registered", to);
    if (!from_device && !sim_is_pinned(from, bytes))
        return sim_fail(INVALID_VALUE, "an asynchronous copy from %p, which is not registered", from);
    const op_t op = {.kind = OP_COPY, .to = (void *)to, .from = from, .bytes = bytes, .to_host = !to_device};
    return sim_submit(s, op);
}

static void *at(device_ptr_t pointer) { return (void *)(uintptr_t)pointer; }

API int cuMemcpyAsync(device_ptr_t to, device_ptr_t from, size_t bytes, stream_t *s) {
    ENTER(false);
    return submit_copy(s, at(to), at(from), bytes, 0);
}

API int cuMemcpyHtoDAsync_v2(device_ptr_t to, const void *from, size_t bytes, stream_t *s) {
    ENTER(false);
    return submit_copy(s, at(to), from, bytes, TO_DEVICE);
}

API int cuMemcpyDtoHAsync_v2(void *to, device_ptr_t from, size_t bytes, stream_t *s) {
    ENTER(false);
    return submit_copy(s, to, at(from), bytes, FROM_DEVICE);
}

API int cuMemcpyDtoDAsync_v2(device_ptr_t to, device_ptr_t from, size_t bytes, stream_t *s) {
    ENTER(false);
    return submit_copy(s, at(to), at(from), bytes, TO_DEVICE | FROM_DEVICE);
}

API int cuMemsetD8Async(device_ptr_t to, uint8_t value, size_t bytes, stream_t *s) {
    ENTER(false);
    if (!sim_is_device(at(to), bytes, true)) return sim_fail(INVALID_VALUE, "%p is no device pointer", at(to));
    return sim_submit(s, (op_t){.kind = OP_FILL, .to = at(to), .value = value, .bytes = bytes});
}

/* Copies that block belong to the default stream: they wait for all streams, and take any host memory. */
API int cuMemcpyHtoD_v2(device_ptr_t to, const void *from, size_t bytes) {
    ENTER(true);
    if (!sim_is_device(at(to), bytes, true)) return sim_fail(INVALID_VALUE, "%p is no device pointer", at(to));
    sim_wait_for_all();
    memcpy(at(to), from, bytes);
    return DONE;
}

API int cuMemcpyDtoH_v2(void *to, device_ptr_t from, size_t bytes) {
    ENTER(true);
    if (!sim_is_device(at(from), bytes, false)) return sim_fail(INVALID_VALUE, "%p is no device pointer", at(from));
    sim_wait_for_all();
    memcpy(to, at(from), bytes);
    return sim_enter(__func__, false);
}

API int cuLaunchHostFunc(stream_t *s, void (*call)(void *), void *data) {
    ENTER(false);
    return sim_submit(s, (op_t){.kind = OP_HOST, .call = call, .data = data});
}

/* ---- streams ---- */

API int cuStreamCreate(stream_t **stream, unsigned flags) {
    ENTER(true);
    if (flags > 1) return sim_fail(INVALID_VALUE, "flags %u of a stream", flags);
    pthread_mutex_lock(&lock);
    stream_t *s = n_streams < MAX_STREAMS ? calloc(1, sizeof *s) : NULL;
    if (s) {
        s->queue = sim_next_queue();
        streams[n_streams++] = s;
    }
    pthread_mutex_unlock(&lock);
    *stream = s;
    return s ? DONE : OUT_OF_MEMORY;
}

API int cuStreamCreateWithPriority(stream_t **stream, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}

API int cuStreamDestroy_v2(stream_t *s) {
    ENTER(false);
    if (!s || s->destroyed) return INVALID_HANDLE;
    s->destroyed = true; /* what is queued runs to its end */
    return DONE;
}

API int cuStreamQuery(stream_t *s) {
    ENTER(s && s->capturing);
    if (!s) return INVALID_HANDLE;
    if (!sim_stream_reached(s, sim_stream_mark(s), false)) return sim_fail(NOT_READY, "the stream is not done");
    return sim_enter(__func__, false);
}

API int cuStreamSynchronize(stream_t *s) {
    ENTER(true);
    if (!s) return INVALID_HANDLE;
    sim_stream_reached(s, sim_stream_mark(s), true);
    return sim_enter(__func__, false);
}

/* ---- events ---- */

API int cuEventCreate(event_t **event, unsigned flags) {
    ENTER(false);
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? DONE : OUT_OF_MEMORY;
}

API int cuEventDestroy_v2(event_t *event) {
    ENTER(false);
    (void)event; /* operations in flight may still name it */
    return DONE;
}

API int cuEventRecordWithFlags(event_t *event, stream_t *s, unsigned flags) {
    ENTER(false);
    if (!s || !event || flags > EXTERNAL) return sim_fail(INVALID_VALUE, "cuEventRecord");
    if (s->capturing && flags != EXTERNAL) {
        event->captured = true; /* one stream is captured, in order, so its own events order nothing more */
        return s->invalid ? spoilt() : DONE;
    }
    if (!s->capturing) event->captured = false;
    return sim_submit(s, (op_t){.kind = OP_RECORD, .event = event});
}

API int cuEventRecord(event_t *event, stream_t *s) { return cuEventRecordWithFlags(event, s, 0); }

API int cuStreamWaitEvent(stream_t *s, event_t *event, unsigned flags) {
    ENTER(false);
    if (!s || !event || flags > EXTERNAL) return sim_fail(INVALID_VALUE, "cuStreamWaitEvent");
    if (event->captured && s->capturing) return DONE;
    if (event->captured) return sim_fail(NOT_SUPPORTED, "the simulation captures one stream, and no fork of it");
    if (s->capturing && flags != EXTERNAL) {
        s->invalid = true;
        return sim_fail(CAPTURE_ISOLATION, "a stream that is captured waits for an event from outside of the capture");
    }
    if (!atomic_load(&event->recorded) && !s->capturing) return DONE;
    return sim_submit(s, (op_t){.kind = OP_AWAIT, .event = event});
}

API int cuEventQuery(event_t *event) {
    ENTER(true);
    if (event->captured) return sim_fail(CAPTURED_EVENT, "the event was recorded in a capture");
    if (atomic_load(&event->done) < atomic_load(&event->recorded))
        return sim_fail(NOT_READY, "the work before the event is not done");
    return sim_enter(__func__, false);
}

API int cuEventSynchronize(event_t *event) {
    ENTER(true);
    if (event->captured) return sim_fail(CAPTURED_EVENT, "the event was recorded in a capture");
    const uint64_t mark = atomic_load(&event->recorded);
    while (atomic_load(&event->done) < mark && !sim_ended()) sim_nap();
    return sim_enter(__func__, false);
}

/* ---- capture and graphs ---- */

API int cuStreamBeginCapture_v2(stream_t *s, int mode) {
    ENTER(false);
    if (!s) return sim_fail(CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
    if (s->capturing || mode < MODE_GLOBAL || mode > MODE_RELAXED)
        return sim_fail(INVALID_VALUE, "mode %d, or the stream is captured already", mode);
    graph_t *graph = calloc(1, sizeof *graph);
    if (!graph) return OUT_OF_MEMORY;
    graph->last = &graph->first;
    pthread_mutex_lock(&lock);
    s->graph = graph;
    s->mode = mode;
    s->capturer = pthread_self();
    s->invalid = false;
    s->capturing = true;
    pthread_mutex_unlock(&lock);
    return DONE;
}

API int cuStreamIsCapturing(stream_t *s, int *status) {
    ENTER(false);
    if (!s) return INVALID_HANDLE;
    *status = s->capturing + s->invalid;
    return DONE;
}

API int cuStreamEndCapture(stream_t *s, graph_t **graph) {
    ENTER(false);
    *graph = NULL;
    if (!s || !s->capturing) return sim_fail(INVALID_VALUE, "the stream is not captured");
    if (s->mode != MODE_RELAXED && !pthread_equal(s->capturer, pthread_self()))
        return sim_fail(CAPTURE_WRONG_THREAD, "another thread began the capture");
    pthread_mutex_lock(&lock);
    const bool invalid = s->invalid;
    graph_t *made = s->graph;
    s->graph = NULL;
    s->capturing = s->invalid = false;
    pthread_mutex_unlock(&lock);
    if (invalid) free_graph(made);
    else *graph = made, atomic_fetch_add(&n_graphs, 1);
    return invalid ? spoilt() : DONE;
}

API int cuGraphInstantiateWithFlags(graph_t **executable, graph_t *graph, unsigned long long flags) {
    ENTER(false);
    if (!graph || flags) return sim_fail(INVALID_VALUE, "cuGraphInstantiate, flags %llu", flags);
    graph_t *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    made->last = &made->first;
    for (const op_t *op = graph->first; op; op = op->next) append(made, op);
    *executable = made;
    atomic_fetch_add(&n_graphs, 1);
    return DONE;
}

API int cuGraphLaunch(const graph_t *executable, stream_t *s) {
    ENTER(false);
    if (!executable || !s) return sim_fail(INVALID_VALUE, "cuGraphLaunch");
    if (s->capturing) return sim_fail(NOT_SUPPORTED, "the simulation has no graphs within graphs");
    for (const op_t *op = executable->first; op; op = op->next) queue_up(s, *op);
    return DONE;
}

API int cuGraphDestroy(graph_t *graph) {
    ENTER(false);
    free_graph(graph);
    atomic_fetch_sub(&n_graphs, 1);
    return DONE;
}

API int cuGraphExecDestroy(graph_t *executable) { return cuGraphDestroy(executable); }
