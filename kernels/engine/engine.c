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

#include "slots.h"
#include "cache/error.h"
#include "turns.h"

enum {
    SAFETY_NET_MS = 100,   /* a sleeping engine reads its bells this often even if no thread wakes it */
    CARRIERS_PER_POLL = 8, /* of many carriers, which take turns, so that the bells do not wait for all of them */
    SPINS_PER_POLL = 4, /* thread 0 polls its bells this often per poll of its carriers, which is a system call each */
    MAINTAIN_NS = 10000000 /* under load, thread 0 maintains the arenas this often; else whenever there is no call */
};

/* Longest nap (fd_nap_ns) of an engine that has a link whose bells wake no thread (RDMA). An idle engine then uses well
 * under 1 % of a core. */
#define NAP_MAX_NS 5000000u

/* ---- thread 0 ---- */

void fd_poll_carriers(fd_engine_t *e, bool go_on) {
    if (!go_on && !e->polling) return;
    e->polling = go_on;
    const uint32_t n = go_on && e->n_adopted > CARRIERS_PER_POLL ? CARRIERS_PER_POLL : e->n_adopted;
    for (uint32_t k = 0; k < n; k++) {
        if (e->next_carrier >= e->n_adopted) e->next_carrier = 0;
        const fd_carrier_t *carrier = &e->adopted[e->next_carrier++]->carrier;
        if (carrier->ops->poll) carrier->ops->poll(carrier->self, go_on);
    }
}

static bool links_changed(fd_engine_t *e) {
    return __atomic_load_n(&e->link_changes, __ATOMIC_ACQUIRE) != e->adopted_changes;
}

static bool listed(const fd_engine_t *e, const fd_link_t *link) {
    for (uint32_t i = 0; i < e->n_links; i++)
        if (e->links[i] == link) return true;
    return false;
}

/* Adopts the links that the engine has now, unless threads still work on a call of a link that is being removed. */
static void adopt_links(fd_engine_t *e) {
    fd_poll_carriers(e, false);
    pthread_mutex_lock(&e->mutex);
    bool gone = true;
    for (uint32_t i = 0; i < e->n_adopted; i++)
        if (!listed(e, e->adopted[i])) gone &= fd_turns_leave(e, e->adopted[i]);
    if (gone) {
        memcpy(e->adopted, e->links, e->n_links * sizeof *e->links);
        e->n_adopted = e->n_links;
        e->next_link = 0;
        e->n_no_wakeup = 0;
        for (uint32_t i = 0; i < e->n_adopted; i++) e->n_no_wakeup += !e->adopted[i]->carrier.ops->wakes;
        e->adopted_changes = e->link_changes;
        pthread_cond_broadcast(&e->adoption);
    }
    pthread_mutex_unlock(&e->mutex);
}

static bool any_bell(fd_engine_t *e) {
    for (uint32_t i = 0; i < e->n_adopted; i++)
        for (uint32_t slot = 0; slot < e->adopted[i]->work.g.n_slots; slot++)
            if (fd_slot_asks(e->adopted[i], slot) != FD_ASKS_NOTHING) return true;
    return false;
}

static void set_asleep(fd_engine_t *e, uint32_t asleep) {
    for (uint32_t i = 0; i < e->n_adopted; i++)
        __atomic_store_n(&((fd_region_header_t *)e->adopted[i]->region)->engine_asleep, asleep, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void sleep_until_rung(fd_engine_t *e, uint64_t idle_ns) {
    struct epoll_event events[16];
    fd_poll_carriers(e, false);
    set_asleep(e, 1);
    const bool news = any_bell(e) || links_changed(e), naps = e->n_no_wakeup;
    pthread_mutex_unlock(&e->duty);
    if (!news) {
        if (naps) {
            uint64_t nap_ns = fd_nap_ns(idle_ns, NAP_MAX_NS);
            struct pollfd bells = {.fd = e->epoll, .events = POLLIN};
            ppoll(&bells, 1, &(struct timespec){.tv_nsec = (long)nap_ns}, NULL);
        }
        epoll_wait(e->epoll, events, 16, naps ? 0 : SAFETY_NET_MS);
    }
    pthread_mutex_lock(&e->duty);
    set_asleep(e, 0);
}

/* Does what there is to do for calls, once. Returns whether there was anything. What a GPU does is not this thread's.
 */
static bool serve(fd_engine_t *e) {
    if (links_changed(e)) adopt_links(e);
    const bool asked = fd_turns_poll(e);
    if (e->cuda) return asked;
    if (e->n_jobs) fd_turns_work(e);
    return asked || e->n_jobs;
}

/* Whether thread 0 is to look for the end of a call that the GPU works on. */
static bool gpu_works(const fd_engine_t *e) { return e->cuda && e->n_jobs; }

static void *polling_main(void *arg) {
    fd_engine_t *e = arg;
    uint64_t idle_since = fd_now_ns();
    pthread_mutex_lock(&e->duty);
    for (uint32_t i = 1; !__atomic_load_n(&e->stop, __ATOMIC_ACQUIRE); i++) {
        if (serve(e)) {
            idle_since = fd_now_ns();
            if (idle_since - e->maintained_ns >= MAINTAIN_NS) fd_maintain(e);
        } else if (i % FD_POLLS_PER_CLOCK) {
            if (i % SPINS_PER_POLL == 0) fd_poll_carriers(e, true);
            fd_cpu_relax();
        } else if (!fd_maintain(e) && !gpu_works(e) && !fd_keep_spinning(e, idle_since)) {
            sleep_until_rung(e, fd_now_ns() - idle_since);
        }
    }
    fd_poll_carriers(e, false);
    pthread_mutex_unlock(&e->duty);
    return NULL;
}

/* ---- threads that stand in for thread 0 ---- */

static fd_stand_in_result_t stand_in_serve(void *self) {
    fd_engine_t *e = self;
    if (pthread_mutex_trylock(&e->duty)) return FD_STAND_IN_TAKEN;
    const bool any = !__atomic_load_n(&e->stop, __ATOMIC_RELAXED) && serve(e);
    pthread_mutex_unlock(&e->duty);
    return any ? FD_STAND_IN_BUSY : FD_STAND_IN_IDLE;
}

static void stand_in_leave(void *self) {
    fd_engine_t *e = self;
    if (pthread_mutex_trylock(&e->duty)) return;
    if (!__atomic_load_n(&e->stop, __ATOMIC_RELAXED) && (e->n_jobs || any_bell(e))) fd_eventfd_wake(e->eventfd);
    pthread_mutex_unlock(&e->duty);
}

void fd_engine_begin_stand_in(fd_engine_t *e, fd_stand_in_t *stand_in) {
    __atomic_add_fetch(&e->holders, 1, __ATOMIC_RELAXED);
    *stand_in = (fd_stand_in_t){stand_in_serve, stand_in_leave, e};
}

static void let_go(fd_engine_t *e) {
    if (__atomic_sub_fetch(&e->holders, 1, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&e->duty);
    free(e);
}

void fd_engine_end_stand_in(const fd_stand_in_t *stand_in) { let_go(stand_in->self); }

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
        fd_helper_t *self = malloc(sizeof *self);
        if (self) *self = (fd_helper_t){e, i};
        rc = self ? pthread_create(&e->threads[i], &attr, fd_helper_main, self) : ENOMEM;
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
    if (c->gpu >= 0 && (c->prefault || c->huge == FD_HUGE_HUGETLB))
        return "prefaulting and hugetlb pages are for pages in the host's memory, not in a GPU's";
    return NULL;
}

/* Maps the budget once to see that there are enough huge pages, so that a lack of them is reported at start and not
 * when the first S-node asks for a lease. */
static fd_status_t check_hugetlb(uint64_t bytes, fd_error_t *error) {
    bytes -= bytes % fd_memory_granule(FD_HUGE_HUGETLB);
    if (!bytes) return FD_FAIL(FD_INTERNAL, "the KV-cache's budget is smaller than one huge page");
    void *memory = fd_memory_map(bytes, FD_HUGE_HUGETLB, error);
    if (!memory) return error->status;
    fd_memory_unmap(memory, bytes);
    return FD_OK;
}

fd_engine_t *fd_engine_new(const fd_engine_config_t *config, fd_error_t *error) {
    const char *reason = config_error(config);
    if (reason) return FD_FAIL(FD_BAD_CALL, "%s", reason), NULL;
    if (config->huge == FD_HUGE_HUGETLB && check_hugetlb(config->kv_bytes, error) != FD_OK) return NULL;
    fd_engine_t *e = aligned_alloc(64, fd_round_up(sizeof *e, 64));
    if (!e) return FD_FAIL(FD_INTERNAL, "no memory for the R-engine"), NULL;
    memset(e, 0, sizeof *e);
    e->eventfd = e->epoll = -1;
    e->n_threads = config->threads;
    e->isa = config->isa;
    e->spin_ns = (uint64_t)config->spin_us * 1000;
    e->step_spin_ns = (uint64_t)config->step_spin_us * 1000;
    e->kv_bytes = config->kv_bytes;
    if (config->huge == FD_HUGE_HUGETLB) e->kv_bytes -= e->kv_bytes % fd_memory_granule(config->huge);
    e->huge = config->gpu < 0 ? config->huge : FD_HUGE_OFF;
    e->prefault = config->prefault;
    e->holders = 1;
    pthread_mutex_init(&e->duty, NULL);
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->adoption, NULL);
    e->threads = calloc(e->n_threads, sizeof *e->threads);
    if (!e->threads || !fd_bays_init(e) || !open_events(e)) {
        fd_engine_free(e);
        return FD_FAIL(FD_INTERNAL, "no memory or no file descriptors for the R-engine"), NULL;
    }
    if (config->gpu >= 0 && !(e->cuda = fd_cuda_open((uint32_t)config->gpu, error))) {
        fd_engine_free(e);
        return NULL;
    }
    sigset_t all, before; /* the threads block all signals: the program's other threads handle them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (uint32_t i = 0; i < e->n_threads && !rc; i++) rc = start_thread(e, i, config->cpus);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        uint32_t i = e->n_started;
        fd_engine_free(e);
        char where[32] = "";
        if (config->cpus) snprintf(where, sizeof where, " on CPU %d", config->cpus[i]);
        FD_FAIL(rc == EINVAL ? FD_BAD_CALL : FD_INTERNAL, "cannot start R-engine thread %u%s: %s", i, where,
                strerror(rc));
        return NULL;
    }
    return e;
}

void fd_engine_free(fd_engine_t *e) {
    __atomic_store_n(&e->stop, 1, __ATOMIC_SEQ_CST);
    if (e->n_started) {
        fd_eventfd_wake(e->eventfd);
        fd_wake_all(e);
    }
    for (uint32_t i = 0; i < e->n_started; i++) pthread_join(e->threads[i], NULL);
    pthread_mutex_lock(&e->duty); /* a stand-in may still be at work; the next one sees `stop` */
    if (e->eventfd >= 0) close(e->eventfd);
    if (e->epoll >= 0) close(e->epoll);
    fd_cuda_close(e->cuda);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->adoption);
    free(e->threads);
    fd_bays_destroy(e);
    pthread_mutex_unlock(&e->duty);
    let_go(e);
}

int fd_engine_eventfd(const fd_engine_t *e) { return e->eventfd; }

uint64_t fd_engine_kv_free(fd_engine_t *e) {
    pthread_mutex_lock(&e->mutex);
    uint64_t bytes = e->kv_bytes - e->kv_used;
    pthread_mutex_unlock(&e->mutex);
    return bytes;
}
