/* The hardware queues: a thread each, which runs the operations that the queue's streams have submitted, in order. */
#define _GNU_SOURCE
#include "sim.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LOOKS = 2000 }; /* a waiter yields so often before it naps */

static queue_t queues[MAX_QUEUES];
static unsigned n_queues, given, delay_limit_us;

static void nap(unsigned us) { nanosleep(&(struct timespec){.tv_nsec = us * 1000L}, NULL); }

void sim_nap(void) { nap(20); }

static uint64_t draw(queue_t *q) { /* xorshift64 */
    q->random ^= q->random << 13;
    q->random ^= q->random >> 7;
    return q->random ^= q->random << 17;
}

/* ---- operations ---- */

static bool is_open(const op_t *op) {
    if (op->kind == OP_AWAIT) return atomic_load(&op->event->done) >= op->value;
    const uint64_t v = op->bytes == 8 ? __atomic_load_n((uint64_t *)op->to, __ATOMIC_ACQUIRE)
                                      : __atomic_load_n((uint32_t *)op->to, __ATOMIC_ACQUIRE);
    const uint64_t mask = op->bytes == 8 ? UINT64_MAX : UINT32_MAX;
    switch (op->how) {
    case 0: return op->bytes == 8 ? (int64_t)(v - op->value) >= 0 : (int32_t)(uint32_t)(v - op->value) >= 0;
    case 1: return v == op->value;
    case 2: return (v & op->value) != 0;
    default: return (~(v | op->value) & mask) != 0;
    }
}

static void wait_until_open(const op_t *op) {
    for (unsigned i = 0; !sim_ended() && !is_open(op); i++) {
        if (i < LOOKS) sched_yield();
        else sim_nap();
    }
}

static bool reaches(const void *pointer, size_t bytes, bool write, const char *what) {
    const bool good = sim_is_device(pointer, bytes, write) || sim_is_pinned(pointer, bytes);
    if (!good) sim_fault(ILLEGAL_ADDRESS, "%s: the device no longer has %p", what, pointer);
    return good;
}

static void run(const op_t *op) {
    switch (op->kind) {
    case OP_COPY:
        if (reaches(op->to, op->bytes, true, "a copy") && reaches(op->from, op->bytes, false, "a copy"))
            memcpy(op->to, op->from, op->bytes);
        break;
    case OP_FILL:
        if (reaches(op->to, op->bytes, true, "a fill")) memset(op->to, (int)op->value, op->bytes);
        break;
    case OP_WRITE:
        if (!reaches(op->to, op->bytes, true, "cuStreamWriteValue")) break;
        if (op->bytes == 8) __atomic_store_n((uint64_t *)op->to, op->value, __ATOMIC_RELEASE);
        else __atomic_store_n((uint32_t *)op->to, (uint32_t)op->value, __ATOMIC_RELEASE);
        break;
    case OP_WAIT:
        if (reaches(op->to, op->bytes, false, "cuStreamWaitValue")) wait_until_open(op);
        break;
    case OP_AWAIT: wait_until_open(op); break;
    case OP_RECORD: atomic_store(&op->event->done, op->value); break;
    case OP_HOST: op->call(op->data); break;
    case OP_KERNEL: sim_run_kernel(op); break;
    }
}

/* ---- the threads ---- */

static void *queue_main(void *arg) {
    queue_t *q = arg;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (!q->first && !q->stop) pthread_cond_wait(&q->work, &q->lock);
        op_t *op = q->first;
        if (!op) break;
        pthread_mutex_unlock(&q->lock);
        if (delay_limit_us && draw(q) % 8 == 0) nap(1 + (unsigned)(draw(q) % delay_limit_us));
        if (!sim_ended() || op->kind == OP_RECORD) run(op); /* the rest of a context that has ended is given up */
        pthread_mutex_lock(&q->lock);
        q->first = op->next;
        if (!q->first) q->last = &q->first;
        op->stream->done++;
        pthread_cond_broadcast(&q->moved);
        free(op);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

void sim_start_queues(unsigned n, unsigned delay_us, uint64_t seed) {
    delay_limit_us = delay_us;
    given = 0;
    sigset_t all, before; /* Python's main thread handles signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (n_queues = 0; n_queues < n; n_queues++) {
        queue_t *q = &queues[n_queues];
        *q = (queue_t){.random = (seed + 1) * 0x9E3779B97F4A7C15u + n_queues, .last = &q->first};
        pthread_mutex_init(&q->lock, NULL);
        pthread_cond_init(&q->work, NULL);
        pthread_cond_init(&q->moved, NULL);
        if (pthread_create(&q->thread, NULL, queue_main, q)) abort();
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void sim_stop_queues(void) {
    for (unsigned i = 0; i < n_queues; i++) {
        pthread_mutex_lock(&queues[i].lock);
        queues[i].stop = true;
        pthread_cond_signal(&queues[i].work);
        pthread_mutex_unlock(&queues[i].lock);
        pthread_join(queues[i].thread, NULL);
    }
    n_queues = 0;
}

queue_t *sim_next_queue(void) { return &queues[given++ % n_queues]; }

void sim_push(stream_t *stream, const op_t *op) {
    op_t *copy = malloc(sizeof *copy);
    if (!copy) abort();
    *copy = *op;
    copy->next = NULL;
    copy->stream = stream;
    queue_t *q = stream->queue;
    pthread_mutex_lock(&q->lock);
    *q->last = copy;
    q->last = &copy->next;
    stream->queued++;
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->lock);
}

uint64_t sim_stream_mark(stream_t *stream) {
    pthread_mutex_lock(&stream->queue->lock);
    const uint64_t mark = stream->queued;
    pthread_mutex_unlock(&stream->queue->lock);
    return mark;
}

bool sim_stream_reached(stream_t *stream, uint64_t mark, bool wait) {
    queue_t *q = stream->queue;
    pthread_mutex_lock(&q->lock);
    while (wait && stream->done < mark) pthread_cond_wait(&q->moved, &q->lock);
    const bool reached = stream->done >= mark;
    pthread_mutex_unlock(&q->lock);
    return reached;
}

void sim_wait_for_all(void) {
    for (unsigned i = 0; i < n_queues; i++) {
        queue_t *q = &queues[i];
        pthread_mutex_lock(&q->lock);
        while (q->first) pthread_cond_wait(&q->moved, &q->lock);
        pthread_mutex_unlock(&q->lock);
    }
}
