#define _GNU_SOURCE
#include "proxy.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

enum { LOOKS_PER_CLOCK = 16 };     /* the thread reads the clock once in this many rounds */
#define NAP_MAX_NS 200000u         /* longest nap (fd_nap_ns) while slots are driven and no word changes */
#define PROBE_NS 1000000u          /* a carrier that wakes no thread is probed this often */
#define PROBE_HARDER_NS 250000000u /* and harder this often */

typedef struct {
    fd_port_t *port;
    uint32_t slot;
    bool ending;         /* fd_proxy_end waits for the thread to let go of the slot */
    uint64_t timeout_ns; /* how long the R-node may take for a layer */
    uint64_t asked_ns;   /* when the last layer was asked for */
    uint64_t probed_ns, probed_harder_ns;
} driven_t;

struct fd_proxy {
    uint8_t *page;              /* completion words, a line each */
    int done_fds[FD_MAX_SLOTS]; /* eventfds */
    pthread_t thread;
    pthread_mutex_t lock; /* guards everything below; the thread holds it for a round */
    pthread_cond_t begun; /* there is something to watch, or the thread is to stop */
    pthread_cond_t ended; /* the thread has let go of a slot */
    bool stop;
    uint64_t spin_ns;
    uint32_t expected; /* bit i: the completion word of mini-batch i is watched */
    driven_t slots[FD_PROXY_SLOTS];
    uint32_t n;
};

static uint32_t *completion(const fd_proxy_t *p, uint32_t i) { return (uint32_t *)(void *)(p->page + i * FD_LINE); }

/* Carries what has changed for one slot. Returns false if nothing has. */
static bool carry(driven_t *d) {
    fd_port_t *port = d->port;
    const fd_carrier_t *carrier = &port->carrier;
    const fd_slot_t *slot = fd_port_slot(port, d->slot);
    if (fd_link_is_down(&port->link)) {
        fd_port_poison(port);
        return false;
    }
    if (carrier->ops->poll) carrier->ops->poll(carrier->self, true);
    fd_port_slot_t *state = &port->slots[d->slot];
    const uint32_t request = fd_word_read(&slot->layer_request);
    if (request <= state->asked || request > state->arm.n_layers) return false;
    state->asked = request;
    d->asked_ns = fd_now_ns();
    carrier->ops->send(carrier->self, d->slot, FD_LAYER);
    return true;
}

/* The watchdog of a driven slot: takes a link down whose R-node is late, and lets its carrier look for a dead peer. */
static void look_after(driven_t *d, uint64_t now) {
    fd_port_t *port = d->port;
    const uint32_t asked = port->slots[d->slot].asked;
    if (fd_link_is_down(&port->link) || fd_word_read(&fd_port_slot(port, d->slot)->layer_reply) >= asked) return;
    if (now - d->asked_ns >= d->timeout_ns) {
        fd_port_give_up(port, d->slot, d->timeout_ns);
        return;
    }
    const fd_carrier_t *carrier = &port->carrier;
    if (!carrier->ops->probe || now - d->probed_ns < PROBE_NS) return;
    const bool harder = now - d->probed_harder_ns >= PROBE_HARDER_NS;
    d->probed_ns = now;
    if (harder) d->probed_harder_ns = now;
    carrier->ops->probe(carrier->self, d->slot, harder);
}

/* Signals the eventfds of the mini-batches whose device has written the completion word. */
static bool signal_completions(fd_proxy_t *p) {
    const uint32_t expected = p->expected;
    for (uint32_t i = 0; expected && i < FD_MAX_SLOTS; i++) {
        if (!(expected >> i & 1) || !fd_word_read(completion(p, i))) continue;
        p->expected &= ~(1u << i);
        fd_eventfd_wake(p->done_fds[i]);
    }
    return p->expected != expected;
}

/* Lets go of the slots that are ending. A carrier is released with the last slot of its port. */
static void let_go(fd_proxy_t *p) {
    bool any = false;
    for (uint32_t k = 0; k < p->n; k++) {
        if (!p->slots[k].ending) continue;
        fd_port_t *port = p->slots[k].port;
        p->slots[k--] = p->slots[--p->n];
        bool last = any = true;
        for (uint32_t i = 0; i < p->n; i++) last &= p->slots[i].port != port;
        if (last && port->carrier.ops->poll) port->carrier.ops->poll(port->carrier.self, false);
    }
    if (any) pthread_cond_broadcast(&p->ended);
}

static void *proxy_main(void *arg) {
    fd_proxy_t *p = arg;
    uint64_t quiet_since = fd_now_ns();
    for (uint32_t i = 1;; i++) {
        bool any = false;
        pthread_mutex_lock(&p->lock);
        for (; !p->stop && !p->n && !p->expected; any = true) pthread_cond_wait(&p->begun, &p->lock);
        const bool stop = p->stop;
        for (uint32_t k = 0; k < p->n; k++) any |= carry(&p->slots[k]);
        any |= signal_completions(p);
        if (p->n && i % LOOKS_PER_CLOCK == 0) {
            const uint64_t now = fd_now_ns();
            for (uint32_t k = 0; k < p->n; k++) look_after(&p->slots[k], now);
        }
        let_go(p);
        pthread_mutex_unlock(&p->lock);
        if (stop) return NULL;
        if (any) quiet_since = fd_now_ns();
        if (any || i % LOOKS_PER_CLOCK) {
            fd_cpu_relax();
            continue;
        }
        const uint64_t quiet_ns = fd_now_ns() - quiet_since, nap_ns = fd_nap_ns(quiet_ns, NAP_MAX_NS);
        if (quiet_ns >= p->spin_ns) nanosleep(&(struct timespec){.tv_nsec = (long)nap_ns}, NULL);
        else if (quiet_ns >= FD_YIELD_AFTER_NS) sched_yield();
    }
}

/* Frees everything but the thread. */
static void destroy(fd_proxy_t *p) {
    for (uint32_t i = 0; i < FD_MAX_SLOTS; i++)
        if (p->done_fds[i] >= 0) close(p->done_fds[i]);
    free(p->page);
    free(p);
}

/* Makes the page and the eventfds. False with errno. */
static bool make_completions(fd_proxy_t *p) {
    bool ok = true;
    p->page = aligned_alloc(FD_PROXY_PAGE, FD_PROXY_PAGE);
    for (uint32_t i = 0; i < FD_MAX_SLOTS; i++) {
        p->done_fds[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        ok &= p->done_fds[i] >= 0;
    }
    if (p->page) memset(p->page, 0, FD_PROXY_PAGE);
    return ok && p->page;
}

fd_proxy_t *fd_proxy_new(uint32_t spin_us) {
    fd_proxy_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    if (!make_completions(p)) {
        const int error = errno;
        destroy(p);
        errno = error;
        return NULL;
    }
    p->spin_ns = spin_us * 1000ull;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->begun, NULL);
    pthread_cond_init(&p->ended, NULL);
    sigset_t all, before; /* Python's main thread handles signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&p->thread, NULL, proxy_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc) return p;
    destroy(p);
    errno = rc;
    return NULL;
}

void fd_proxy_free(fd_proxy_t *p) {
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_signal(&p->begun);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->begun);
    pthread_cond_destroy(&p->ended);
    pthread_mutex_destroy(&p->lock);
    destroy(p);
}

uint8_t *fd_proxy_page(fd_proxy_t *p) { return p->page; }

int fd_proxy_done_fd(const fd_proxy_t *p, uint32_t i) { return p->done_fds[i]; }

bool fd_proxy_done(const fd_proxy_t *p, uint32_t i) { return fd_word_read(completion(p, i)) != 0; }

void fd_proxy_expect(fd_proxy_t *p, uint32_t i) {
    uint64_t count;
    pthread_mutex_lock(&p->lock);
    fd_word_store(completion(p, i), 0);
    while (read(p->done_fds[i], &count, sizeof count) < 0 && errno == EINTR) {
    }
    p->expected |= 1u << i;
    pthread_cond_signal(&p->begun);
    pthread_mutex_unlock(&p->lock);
}

const char *fd_proxy_begin(fd_proxy_t *p, fd_port_t *port, uint32_t slot, uint64_t timeout_ns) {
    if (slot >= port->geometry.n_slots) return "the slot is beyond the region";
    if (port->slots[slot].phase != FD_SLOT_ARMED || port->slots[slot].asked)
        return "no step is armed in the slot, or a layer has been asked for";
    pthread_mutex_lock(&p->lock);
    const bool full = p->n == FD_PROXY_SLOTS;
    if (!full) {
        fd_word_store(&fd_port_slot(port, slot)->layer_request, 0);
        port->slots[slot].phase = FD_SLOT_ASKED;
        p->slots[p->n++] = (driven_t){.port = port, .slot = slot, .timeout_ns = timeout_ns};
        pthread_cond_signal(&p->begun);
    }
    pthread_mutex_unlock(&p->lock);
    return full ? "the proxy drives no further slot: it has the most that it can drive" : NULL;
}

/* The slot, if the thread drives it. */
static driven_t *find(fd_proxy_t *p, const fd_port_t *port, uint32_t slot) {
    for (uint32_t k = 0; k < p->n; k++)
        if (p->slots[k].port == port && p->slots[k].slot == slot) return &p->slots[k];
    return NULL;
}

fd_port_result_t fd_proxy_end(fd_proxy_t *p, fd_port_t *port, uint32_t slot, fd_report_t *report) {
    pthread_mutex_lock(&p->lock);
    driven_t *driven = find(p, port, slot);
    if (driven) driven->ending = true;
    while (find(p, port, slot)) pthread_cond_wait(&p->ended, &p->lock);
    pthread_mutex_unlock(&p->lock);
    if (!driven) return FD_PORT_MISUSE;
    fd_awaited_t look = {.port = port, .slot = slot, .result = FD_PORT_PENDING};
    fd_port_look(&look);
    *report = port->reports[slot];
    if (look.result == FD_PORT_OK && port->slots[slot].asked < port->slots[slot].arm.n_layers)
        look.result = FD_PORT_PENDING;
    port->slots[slot].phase = look.result == FD_PORT_OK || look.result == FD_PORT_PENDING ? FD_SLOT_ARMED
                                                                                          : FD_SLOT_IDLE;
    return look.result;
}
