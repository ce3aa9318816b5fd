#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "engine_state.h"
#include "fail.h"

enum {
    SAFETY_NET_MS = 100,  /* a sleeping engine reads its bells this often even if no thread wakes it */
    POLLS_PER_CLOCK = 16, /* an idle thread reads the clock once in this many polls */
    SPINS_PER_POLL = 4,  /* thread 0 polls its bells this often per poll of its carriers, which is a system call each */
    SETTLE_POLLS = 1000, /* see settled_bell */
    SPINS_PER_YIELD = 256, /* thread 0 yields its core this often while it waits for helpers */
    LONG_CALL_NS = 50000,  /* if the last call took longer, the carriers' own threads receive during the next call */
    MAINTAIN_NS = 10000000 /* under load, thread 0 maintains the arenas this often; else whenever there is no call */
};

/* Longest nap (fd_nap_ns) of an engine that has a link whose bells wake no thread (RDMA). An idle engine then uses well
 * under 1 % of a core. */
#define NAP_MAX_NS 5000000u

/* ---- a job: the items of one call, which all threads share ---- */

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

static void do_item(fd_engine_t *e, uint32_t item, uint32_t thread) {
    if (e->job.step) {
        uint64_t bytes = fd_work_item(e->job.work, e->job.step, e->job.slot, e->job.layer, item, thread);
        __atomic_fetch_add(&e->job_bytes, bytes, __ATOMIC_RELAXED);
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

static void wake_helpers(fd_engine_t *e, uint32_t epoch) {
    __atomic_store_n(&e->epoch, epoch, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&e->sleepers, __ATOMIC_RELAXED)) fd_futex_wake(&e->epoch, false);
}

/* Thread 0 calls this after it has filled in e->job. Returns when all items are done. */
static void run_job(fd_engine_t *e, uint32_t n_items) {
    __atomic_store_n(&e->items_left, n_items, __ATOMIC_RELAXED);
    uint32_t epoch = e->epoch + 1;
    for (uint32_t t = 0; t < e->n_threads; t++) {
        uint64_t next = (uint64_t)n_items * t / e->n_threads, end = (uint64_t)n_items * (t + 1) / e->n_threads;
        __atomic_store_n(&e->queues[t].claim, (uint64_t)epoch << 32 | next << 16 | end, __ATOMIC_RELEASE);
    }
    wake_helpers(e, epoch);
    do_items(e, 0);
    for (uint32_t i = 1; __atomic_load_n(&e->items_left, __ATOMIC_ACQUIRE); i++) {
        if (i % SPINS_PER_YIELD) fd_cpu_relax();
        else sched_yield(); /* a helper that still works may need this core */
    }
}

/* Thread 0 calls this. Returns the bytes of KV-cache that the layer read. */
static uint64_t run_layer(fd_engine_t *e, fd_link_t *link, const fd_step_t *step, uint8_t *slot, uint32_t layer) {
    fd_work_begin(&link->work, step);
    if (step->n_items == 1) return fd_work_item(&link->work, step, slot, layer, 0, 0);
    e->job.work = &link->work;
    e->job.step = step;
    e->job.slot = slot;
    e->job.layer = layer;
    __atomic_store_n(&e->job_bytes, 0, __ATOMIC_RELAXED);
    run_job(e, step->n_items);
    return __atomic_load_n(&e->job_bytes, __ATOMIC_RELAXED);
}

/* False if a thread that has been idle since `idle_since` should sleep. */
static bool keep_spinning(const fd_engine_t *e, uint64_t idle_since) {
    uint64_t idle = fd_now_ns() - idle_since;
    if (idle >= e->spin_ns) return false;
    if (idle >= FD_YIELD_AFTER_NS) sched_yield();
    return true;
}

static void *helper_main(void *arg) {
    struct {
        fd_engine_t *engine;
        uint32_t thread;
    } self;
    memcpy(&self, arg, sizeof self);
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
        } else if (i % POLLS_PER_CLOCK) {
            fd_cpu_relax();
        } else if (!keep_spinning(e, idle_since)) {
            __atomic_fetch_add(&e->sleepers, 1, __ATOMIC_SEQ_CST);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            fd_futex_wait(&e->epoch, seen, 1000000000u, false);
            __atomic_fetch_sub(&e->sleepers, 1, __ATOMIC_SEQ_CST);
        }
    }
    return NULL;
}

/* ---- calls ---- */

static fd_status_t begin_step(fd_link_t *link, fd_step_t *step, const uint8_t *slot, const fd_call_t *call, char *err,
                              size_t err_len) {
    pthread_mutex_lock(&link->mutex);
    fd_step_end_copies(step, &link->kv); /* of the slot's last step, by that step's table */
    step->n_entries = call->n_entries;
    step->n_rows = call->n_rows;
    step->n_attend_rows = call->n_attend_rows;
    fd_copy_out(step->table, slot + link->work.layout.table, call->n_entries * sizeof(fd_row_t));
    fd_status_t status = fd_step_plan(step, &link->kv, &link->work.shape, false, err, err_len);
    if (status == FD_OUT_OF_PAGES) { /* copies take more pages while they are under way than at once */
        for (uint32_t i = 0; i < link->work.g.n_slots; i++) fd_step_end_copies(&link->slots[i].step, &link->kv);
        status = fd_step_plan(step, &link->kv, &link->work.shape, true, err, err_len);
        if (status == FD_OK) err[0] = 0;
    }
    pthread_mutex_unlock(&link->mutex);
    step->valid = status == FD_OK;
    return status;
}

/* Checks the whole call and plans its step if it is the first of one. Returns FD_OK, or why the call is refused. */
static fd_status_t take_call(fd_link_t *link, fd_slot_state_t *state, uint64_t bell, const uint8_t *slot,
                             const fd_call_t *call, char *err, size_t err_len) {
    fd_step_t *step = &state->step;
    uint64_t expected = state->served + 1;
    state->served = bell;
    if (call->flags & FD_CALL_NEW_STEP) step->valid = 0;
    if (bell != expected || call->number != bell)
        return FD_FAIL(FD_BAD_CALL,
                       "the bell shows call %llu and the header says call %llu, but call %llu was expected",
                       (unsigned long long)bell, (unsigned long long)call->number, (unsigned long long)expected);
    const char *reason = fd_call_error(&link->work.g, call);
    if (reason)
        return FD_FAIL(FD_BAD_CALL, "%s (flags 0x%x, layer %u, %u entries, %u rows, %u of them attending)", reason,
                       call->flags, call->layer, call->n_entries, call->n_rows, call->n_attend_rows);
    if (call->flags & FD_CALL_NEW_STEP) return begin_step(link, step, slot, call, err, err_len);
    if (!step->valid)
        return FD_FAIL(FD_BAD_CALL, "no step is in progress in this slot: none has begun, or the last one was refused");
    if (call->n_entries != step->n_entries || call->n_rows != step->n_rows ||
        call->n_attend_rows != step->n_attend_rows)
        return FD_FAIL(
            FD_BAD_CALL, "the call has %u entries, %u rows and %u attending rows; the step began with %u, %u and %u",
            call->n_entries, call->n_rows, call->n_attend_rows, step->n_entries, step->n_rows, step->n_attend_rows);
    return FD_OK;
}

static void count(uint64_t *counter, uint64_t n) { __atomic_store_n(counter, *counter + n, __ATOMIC_RELAXED); }

static void reply(fd_link_t *link, uint32_t slot, const fd_reply_t *r) {
    fd_slot_t *s = fd_slot_at(link->region, &link->work.layout, slot);
    s->reply = *r;
    fd_ring_reply(s, r->number);
    if (link->notify.fn) link->notify.fn(link->notify.ctx, slot);
}

/* Polls the carriers of all adopted links (fd_poll_fn). Does nothing if polling is to end and has already ended. */
static void poll_carriers(fd_engine_t *e, bool go_on) {
    if (!go_on && !e->polling) return;
    e->polling = go_on;
    for (uint32_t i = 0; i < e->n_adopted; i++)
        if (e->adopted[i]->notify.poll) e->adopted[i]->notify.poll(e->adopted[i]->notify.ctx, go_on);
}

/* A software RDMA device may write a bell byte by byte. So a bell that shows neither the last call nor the next one is
 * read again for a while before the engine believes it. */
static uint64_t settled_bell(const uint64_t *at, uint64_t bell, uint64_t served) {
    for (int i = 0; i < SETTLE_POLLS && bell != served && bell != served + 1; i++) {
        fd_cpu_relax();
        bell = fd_bell_read(at);
    }
    return bell;
}

/* Serves the slot's call if there is one. Returns whether there was one. */
static bool serve_slot(fd_engine_t *e, fd_link_t *link, uint32_t slot) {
    fd_slot_t *s = fd_slot_at(link->region, &link->work.layout, slot);
    fd_slot_state_t *state = &link->slots[slot];
    uint64_t bell = fd_bell_read(&s->request_bell);
    if (link->no_wakeup) bell = settled_bell(&s->request_bell, bell, state->served);
    if (bell == state->served) return false;
    if (e->last_busy_ns > LONG_CALL_NS) poll_carriers(e, false);
    uint64_t start = link->last_call_ns = fd_now_ns();
    fd_call_t call;
    fd_copy_out(&call, &s->call, sizeof call);
    fd_reply_t r = {.number = bell};
    r.status = take_call(link, state, bell, (const uint8_t *)s, &call, r.message, sizeof r.message);
    if (r.status == FD_OK) {
        r.n_attend_rows = call.n_attend_rows;
        r.kv_bytes = run_layer(e, link, &state->step, (uint8_t *)s, call.layer);
        if (fd_step_layer_done(&state->step, call.layer, link->work.g.n_layers)) {
            pthread_mutex_lock(&link->mutex);
            fd_step_end_copies(&state->step, &link->kv);
            pthread_mutex_unlock(&link->mutex);
        }
        count(&link->stats.rows, call.n_rows);
        count(&link->stats.kv_bytes, r.kv_bytes);
    } else {
        count(&link->stats.refused, 1);
    }
    r.busy_ns = e->last_busy_ns = fd_now_ns() - start;
    count(&link->stats.calls, 1);
    count(&link->stats.busy_ns, r.busy_ns);
    reply(link, slot, &r);
    return true;
}

/* ---- maintaining the arenas, between calls ---- */

/* Faults in the next parts of a link's arena, one per thread. False if no part is left, or if one has failed before. */
static bool fault_in(fd_engine_t *e, fd_link_t *link) {
    uint64_t done = link->prefault.done, left = link->prefault.parts - done;
    if (!left || link->prefault.error) return false;
    uint32_t n = left < e->n_threads ? (uint32_t)left : e->n_threads;
    poll_carriers(e, false); /* faulting in may take as long as a long call */
    e->job.work = &link->work;
    e->job.step = NULL;
    e->job.first_part = done;
    __atomic_store_n(&e->job_error, 0, __ATOMIC_RELAXED);
    run_job(e, n);
    __atomic_store_n(&link->prefault.error, __atomic_load_n(&e->job_error, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    if (!link->prefault.error) __atomic_store_n(&link->prefault.done, done + n, __ATOMIC_RELAXED);
    return true;
}

/* Only thread 0 starts calls, so no thread works on one now. False if no memory is left to give back. */
static bool give_back(fd_link_t *link) {
    pthread_mutex_lock(&link->mutex);
    bool more = fd_kvcache_give_back(&link->kv);
    pthread_mutex_unlock(&link->mutex);
    return more;
}

/* Does one slice of the maintenance that is due. False if none is. */
static bool maintain(fd_engine_t *e) {
    uint64_t now = e->maintained_ns = fd_now_ns();
    for (uint32_t i = 0; i < e->n_adopted; i++) {
        fd_link_t *link = e->adopted[i];
        if (fault_in(e, link)) return true;
        if (e->trim_idle_ns && now - link->last_call_ns >= e->trim_idle_ns && give_back(link)) return true;
    }
    return false;
}

/* ---- thread 0 ---- */

static bool links_changed(fd_engine_t *e) {
    return __atomic_load_n(&e->link_changes, __ATOMIC_ACQUIRE) != e->adopted_changes;
}

static void adopt_links(fd_engine_t *e) {
    poll_carriers(e, false);
    pthread_mutex_lock(&e->mutex);
    memcpy(e->adopted, e->links, e->n_links * sizeof *e->links);
    e->n_adopted = e->n_links;
    e->n_no_wakeup = 0;
    for (uint32_t i = 0; i < e->n_adopted; i++) e->n_no_wakeup += e->adopted[i]->no_wakeup;
    e->adopted_changes = e->link_changes;
    pthread_cond_broadcast(&e->adoption);
    pthread_mutex_unlock(&e->mutex);
}

/* Serves at most one call of each slot, so that no link can starve another. Returns whether there was a call. */
static bool poll_bells(fd_engine_t *e) {
    bool any = false;
    for (uint32_t i = 0; i < e->n_adopted; i++)
        for (uint32_t slot = 0; slot < e->adopted[i]->work.g.n_slots; slot++) {
            if (!serve_slot(e, e->adopted[i], slot)) continue;
            any = true;
            if (links_changed(e)) return true;
        }
    return any;
}

static bool any_bell(fd_engine_t *e) {
    for (uint32_t i = 0; i < e->n_adopted; i++)
        for (uint32_t slot = 0; slot < e->adopted[i]->work.g.n_slots; slot++) {
            fd_slot_t *s = fd_slot_at(e->adopted[i]->region, &e->adopted[i]->work.layout, slot);
            if (fd_bell_read(&s->request_bell) != e->adopted[i]->slots[slot].served) return true;
        }
    return false;
}

static void set_asleep(fd_engine_t *e, uint32_t asleep) {
    for (uint32_t i = 0; i < e->n_adopted; i++)
        __atomic_store_n(&((fd_region_header_t *)e->adopted[i]->region)->engine_asleep, asleep, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void sleep_until_rung(fd_engine_t *e, uint64_t idle_ns) {
    struct epoll_event events[16];
    poll_carriers(e, false);
    set_asleep(e, 1);
    if (!any_bell(e) && !links_changed(e)) {
        if (e->n_no_wakeup) {
            uint64_t nap_ns = fd_nap_ns(idle_ns, NAP_MAX_NS);
            struct pollfd bells = {.fd = e->epoll, .events = POLLIN};
            ppoll(&bells, 1, &(struct timespec){.tv_nsec = (long)nap_ns}, NULL);
        }
        epoll_wait(e->epoll, events, 16, e->n_no_wakeup ? 0 : SAFETY_NET_MS);
    }
    set_asleep(e, 0);
}

static void *polling_main(void *arg) {
    fd_engine_t *e = arg;
    uint64_t idle_since = fd_now_ns();
    for (uint32_t i = 1; !__atomic_load_n(&e->stop, __ATOMIC_ACQUIRE); i++) {
        if (links_changed(e)) adopt_links(e);
        if (poll_bells(e)) {
            idle_since = fd_now_ns();
            if (idle_since - e->maintained_ns >= MAINTAIN_NS) maintain(e);
        } else if (i % POLLS_PER_CLOCK) {
            if (i % SPINS_PER_POLL == 0) poll_carriers(e, true);
            fd_cpu_relax();
        } else if (!maintain(e) && !keep_spinning(e, idle_since)) {
            sleep_until_rung(e, fd_now_ns() - idle_since);
        }
    }
    poll_carriers(e, false);
    return NULL;
}

/* ---- life ---- */

static int start_thread(fd_engine_t *e, uint32_t i, const int *cpus) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    if (cpus) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i], &set);
        pthread_attr_setaffinity_np(&attr, sizeof set, &set);
    }
    int rc;
    if (i == 0) {
        rc = pthread_create(&e->threads[0], &attr, polling_main, e);
    } else {
        struct {
            fd_engine_t *engine;
            uint32_t thread;
        } *self = malloc(sizeof *self);
        if (self) {
            self->engine = e;
            self->thread = i;
        }
        rc = self ? pthread_create(&e->threads[i], &attr, helper_main, self) : ENOMEM;
        if (rc) free(self);
    }
    pthread_attr_destroy(&attr);
    if (!rc) {
        char name[16];
        snprintf(name, sizeof name, "fd-r%u", i);
        pthread_setname_np(e->threads[i], name);
        e->n_started++;
    }
    return rc;
}

static bool open_events(fd_engine_t *e) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    e->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    e->epoll = epoll_create1(EPOLL_CLOEXEC);
    return e->eventfd >= 0 && e->epoll >= 0 && epoll_ctl(e->epoll, EPOLL_CTL_ADD, e->eventfd, &event) == 0;
}

static const char *config_error(const fd_engine_config_t *c) {
    if (c->threads < 1 || c->threads > FD_MAX_THREADS)
        return "number of threads is not within 1.." FD_TEXT(FD_MAX_THREADS);
    if (!fd_isa_supported(c->isa)) return "this machine does not support the requested instruction set";
    for (uint32_t i = 0; c->cpus && i < c->threads; i++)
        if (c->cpus[i] < 0 || c->cpus[i] >= CPU_SETSIZE) return "a CPU number is out of range";
    if (c->huge >= FD_HUGE_MODES) return "unknown kind of huge pages";
    /* The kernel does not reserve a hugetlb page again after it was given back, so the next touch could be a SIGBUS. */
    if (c->trim_idle_ns && c->huge == FD_HUGE_HUGETLB)
        return "hugetlb pages stay reserved and cannot be given back to the OS";
    if (c->trim_idle_ns && c->prefault)
        return "prefaulted memory cannot be given back to the OS when idle: choose one of the two";
    return NULL;
}

/* Maps the budget once to see that there are enough huge pages, so that a lack of them is reported at start and not
 * when the first S-node asks for a lease. */
static bool hugetlb_available(uint64_t bytes, char *err, size_t err_len) {
    bytes -= bytes % fd_memory_granule(FD_HUGE_HUGETLB);
    void *memory = bytes ? fd_memory_map(bytes, FD_HUGE_HUGETLB, err, err_len) : NULL;
    if (!bytes) snprintf(err, err_len, "the KV-cache's budget is smaller than one huge page");
    if (memory) fd_memory_unmap(memory, bytes);
    return memory;
}

fd_engine_t *fd_engine_new(const fd_engine_config_t *config, char *err, size_t err_len) {
    const char *reason = config_error(config);
    errno = EINVAL;
    if (reason) return FD_FAIL(NULL, "%s", reason);
    errno = ENOMEM;
    if (config->huge == FD_HUGE_HUGETLB && !hugetlb_available(config->kv_bytes, err, err_len)) return NULL;
    fd_engine_t *e = aligned_alloc(64, fd_round_up(sizeof *e, 64));
    if (!e) return FD_FAIL(NULL, "no memory for the R-engine");
    memset(e, 0, sizeof *e);
    e->eventfd = e->epoll = -1;
    e->n_threads = config->threads;
    e->isa = config->isa;
    e->spin_ns = (uint64_t)config->spin_us * 1000;
    e->kv_bytes = config->kv_bytes;
    if (config->huge == FD_HUGE_HUGETLB) e->kv_bytes -= e->kv_bytes % fd_memory_granule(config->huge);
    e->huge = config->huge;
    e->prefault = config->prefault;
    e->trim_idle_ns = config->trim_idle_ns;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->adoption, NULL);
    e->threads = calloc(e->n_threads, sizeof *e->threads);
    e->queues = aligned_alloc(64, e->n_threads * sizeof *e->queues);
    if (!e->threads || !e->queues || !open_events(e)) {
        fd_engine_free(e);
        return FD_FAIL(NULL, "no memory or no file descriptors for the R-engine");
    }
    memset(e->queues, 0, e->n_threads * sizeof *e->queues);
    sigset_t all, before; /* the threads block all signals: the program's other threads handle them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (uint32_t i = 0; i < e->n_threads && !rc; i++) rc = start_thread(e, i, config->cpus);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        uint32_t i = e->n_started;
        fd_engine_free(e);
        errno = rc;
        if (config->cpus)
            return FD_FAIL(NULL, "cannot start R-engine thread %u on CPU %d: %s", i, config->cpus[i], strerror(rc));
        return FD_FAIL(NULL, "cannot start R-engine thread %u: %s", i, strerror(rc));
    }
    return e;
}

void fd_engine_free(fd_engine_t *e) {
    __atomic_store_n(&e->stop, 1, __ATOMIC_SEQ_CST);
    if (e->n_started) {
        fd_eventfd_wake(e->eventfd);
        wake_helpers(e, e->epoch + 1);
    }
    for (uint32_t i = 0; i < e->n_started; i++) pthread_join(e->threads[i], NULL);
    if (e->eventfd >= 0) close(e->eventfd);
    if (e->epoll >= 0) close(e->epoll);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->adoption);
    free(e->threads);
    free(e->queues);
    free(e);
}

int fd_engine_eventfd(const fd_engine_t *e) { return e->eventfd; }

uint64_t fd_engine_kv_free(fd_engine_t *e) {
    pthread_mutex_lock(&e->mutex);
    uint64_t bytes = e->kv_bytes - e->kv_used;
    pthread_mutex_unlock(&e->mutex);
    return bytes;
}
