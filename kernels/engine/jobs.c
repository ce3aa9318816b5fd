#include "jobs.h"

#include <sched.h>
#include <stdlib.h>

enum {
    SPINS_PER_YIELD = 256 /* thread 0 yields its core this often while it waits for helpers */
};

static bool claim_item(fd_queue_t *q, uint32_t *item) {
    uint64_t word = __atomic_load_n(&q->claim, __ATOMIC_ACQUIRE);
    while ((word >> 16 & 0xffff) < (word & 0xffff)) {
        if (__atomic_compare_exchange_n(&q->claim, &word, word + 0x10000, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            *item = word >> 16 & 0xffff;
            return true;
        }
    }
    return false;
}

/* Does an item of a layer. Returns the bytes of KV-cache that it reads. */
static uint64_t do_work(const fd_engine_t *e, uint32_t item, uint32_t thread) {
    static const fd_stop_t never = {NULL, 0, 0};
    uint64_t bytes = 0;
    fd_work_begin(e->job.step, item);
    fd_work_advance(e->job.work, e->job.step, e->job.slot, e->job.layer, item, thread, &never, &bytes);
    return bytes;
}

static void do_item(fd_engine_t *e, uint32_t item, uint32_t thread) {
    if (e->job.step) {
        __atomic_fetch_add(&e->job_bytes, do_work(e, item, thread), __ATOMIC_RELAXED);
    } else {
        int error = fd_kvcache_fault_in(e->job.work->kv, e->job.first_part + item);
        if (error) __atomic_store_n(&e->job_error, error, __ATOMIC_RELAXED);
    }
}

/* A job lasts until its last item is counted off in items_left, so a thread reads e->job only while it has a claimed
 * item that it has not counted off. */
static void do_items(fd_engine_t *e, uint32_t thread) {
    for (uint32_t k = 0, item; k < e->n_threads; k++) {
        fd_queue_t *q = &e->queues[(thread + k) % e->n_threads];
        while (claim_item(q, &item)) {
            do_item(e, item, thread);
            __atomic_sub_fetch(&e->items_left, 1, __ATOMIC_ACQ_REL);
        }
    }
}

void fd_wake_helpers(fd_engine_t *e, uint32_t epoch) {
    __atomic_store_n(&e->epoch, epoch, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&e->sleepers, __ATOMIC_RELAXED)) fd_futex_wake(&e->epoch, false);
}

void fd_run_job(fd_engine_t *e, uint32_t n_items) {
    __atomic_store_n(&e->items_left, n_items, __ATOMIC_RELAXED);
    uint32_t epoch = e->epoch + 1;
    for (uint32_t t = 0; t < e->n_threads; t++) {
        uint64_t next = (uint64_t)n_items * t / e->n_threads, end = (uint64_t)n_items * (t + 1) / e->n_threads;
        __atomic_store_n(&e->queues[t].claim, (uint64_t)epoch << 32 | next << 16 | end, __ATOMIC_RELEASE);
    }
    fd_wake_helpers(e, epoch);
    do_items(e, 0);
    for (uint32_t i = 1; __atomic_load_n(&e->items_left, __ATOMIC_ACQUIRE); i++) {
        if (i % SPINS_PER_YIELD) fd_cpu_relax();
        else sched_yield(); /* a helper that still works may need this core */
    }
}

uint64_t fd_run_layer(fd_engine_t *e, fd_link_t *link, uint32_t index) {
    fd_step_t *step = &link->slots[index].step;
    uint8_t *slot = (uint8_t *)fd_slot_at(link->region, &link->work.layout, index);
    const uint32_t layer = link->slots[index].layer;
    e->job.work = &link->work;
    e->job.step = step;
    e->job.slot = slot;
    e->job.layer = layer;
    if (step->n_items == 1) return do_work(e, 0, 0);
    __atomic_store_n(&e->job_bytes, 0, __ATOMIC_RELAXED);
    fd_run_job(e, step->n_items);
    return __atomic_load_n(&e->job_bytes, __ATOMIC_RELAXED);
}

bool fd_keep_spinning(const fd_engine_t *e, uint64_t idle_since) {
    uint64_t idle = fd_now_ns() - idle_since;
    if (idle >= e->spin_ns) return false;
    if (idle >= FD_YIELD_AFTER_NS) sched_yield();
    return true;
}

void *fd_helper_main(void *arg) {
    fd_helper_t self = *(fd_helper_t *)arg;
    free(arg);
    fd_engine_t *e = self.engine;
    uint32_t seen = 0;
    uint64_t idle_since = fd_now_ns();
    for (uint32_t i = 1; !__atomic_load_n(&e->stop, __ATOMIC_ACQUIRE); i++) {
        uint32_t epoch = __atomic_load_n(&e->epoch, __ATOMIC_ACQUIRE);
        if (epoch != seen) {
            seen = epoch;
            do_items(e, self.thread);
            idle_since = fd_now_ns();
        } else if (i % FD_POLLS_PER_CLOCK) {
            fd_cpu_relax();
        } else if (!fd_keep_spinning(e, idle_since)) {
            __atomic_fetch_add(&e->sleepers, 1, __ATOMIC_SEQ_CST);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            fd_futex_wait(&e->epoch, seen, 1000000000u, false);
            __atomic_fetch_sub(&e->sleepers, 1, __ATOMIC_SEQ_CST);
        }
    }
    return NULL;
}
