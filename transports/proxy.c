#define _GNU_SOURCE
#include "proxy.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

enum { LOOKS_PER_CLOCK = 16 }; /* the thread reads the clock once in this many rounds */
#define NAP_MAX_NS 200000u     /* longest nap (fd_nap_ns) while slots are driven and no word changes */
#define IDLE_NAP_NS 5000000u   /* nap while no slot is driven */

typedef struct {
    fd_port_t *port;
    uint32_t slot, sent; /* layers that have been asked for */
    bool ending;         /* fd_proxy_end waits for the thread to let go of the slot */
} driven_t;

struct fd_proxy {
    pthread_t thread;
    pthread_mutex_t lock; /* guards everything below; the thread holds it for a round */
    pthread_cond_t ended; /* the thread has let go of a slot */
    bool stop;
    uint64_t spin_ns;
    driven_t slots[FD_PROXY_SLOTS];
    uint32_t n;
};

/* Carries what has changed for one slot. Returns false if nothing has. */
static bool carry(driven_t *d) {
    fd_port_t *port = d->port;
    const fd_carrier_t *carrier = &port->carrier;
    const fd_slot_t *slot = fd_port_slot(port, d->slot);
    if (fd_is_down(&port->down)) {
        fd_port_poison(port);
        return false;
    }
    if (carrier->ops->poll) carrier->ops->poll(carrier->self, true);
    const uint32_t request = fd_word_read(&slot->layer_request);
    if (request <= d->sent || request > port->geometry.n_layers) return false;
    d->sent = request;
    carrier->ops->send(carrier->self, d->slot, FD_LAYER);
    return true;
}

/* Lets go of the slots that are ending. A carrier is released with the last slot of its port. */
static void let_go(fd_proxy_t *p) {
    bool any = false;
    for (uint32_t k = 0; k < p->n; k++) {
        if (!p->slots[k].ending) continue;
        fd_port_t *port = p->slots[k].port;
        port->slots[p->slots[k].slot].asked = p->slots[k].sent;
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
        const bool stop = p->stop, idle = !p->n;
        for (uint32_t k = 0; k < p->n; k++) any |= carry(&p->slots[k]);
        let_go(p);
        pthread_mutex_unlock(&p->lock);
        if (stop) return NULL;
        if (any || i % LOOKS_PER_CLOCK) {
            if (any) quiet_since = fd_now_ns();
            fd_cpu_relax();
            if (!idle) continue;
        }
        const uint64_t quiet_ns = fd_now_ns() - quiet_since;
        if (!idle && quiet_ns < p->spin_ns) {
            if (quiet_ns >= FD_YIELD_AFTER_NS) sched_yield();
            continue;
        }
        const uint64_t nap_ns = idle ? IDLE_NAP_NS : fd_nap_ns(quiet_ns, NAP_MAX_NS);
        nanosleep(&(struct timespec){.tv_nsec = (long)nap_ns}, NULL);
    }
}

fd_proxy_t *fd_proxy_new(uint32_t spin_us) {
    fd_proxy_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->spin_ns = spin_us * 1000ull;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->ended, NULL);
    sigset_t all, before; /* Python's main thread handles signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&p->thread, NULL, proxy_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!rc) return p;
    free(p);
    errno = rc;
    return NULL;
}

void fd_proxy_free(fd_proxy_t *p) {
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->ended);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

fd_port_result_t fd_proxy_begin(fd_proxy_t *p, fd_port_t *port, uint32_t slot, const char **misuse) {
    *misuse = NULL;
    if (fd_is_down(&port->down)) return FD_PORT_DOWN;
    if (slot >= port->geometry.n_slots) *misuse = "the slot is beyond the region";
    else if (port->slots[slot].phase != FD_SLOT_ARMED || port->slots[slot].asked)
        *misuse = "no step is armed in the slot, or a layer has been asked for";
    if (*misuse) return FD_PORT_MISUSE;
    pthread_mutex_lock(&p->lock);
    if (p->n == FD_PROXY_SLOTS) {
        *misuse = "the proxy drives as many slots as it can";
    } else {
        fd_word_store(&fd_port_slot(port, slot)->layer_request, 0);
        port->slots[slot].phase = FD_SLOT_ASKED;
        p->slots[p->n++] = (driven_t){.port = port, .slot = slot};
    }
    pthread_mutex_unlock(&p->lock);
    return *misuse ? FD_PORT_MISUSE : FD_PORT_OK;
}

fd_port_result_t fd_proxy_end(fd_proxy_t *p, fd_port_t *port, uint32_t slot, fd_report_t *report) {
    pthread_mutex_lock(&p->lock);
    bool there = true, begun = false;
    for (bool first = true; there; first = false) {
        if (!first) pthread_cond_wait(&p->ended, &p->lock);
        there = false;
        for (uint32_t k = 0; k < p->n; k++)
            if (p->slots[k].port == port && p->slots[k].slot == slot) there = p->slots[k].ending = true;
        if (first && !there) break;
        begun = true;
    }
    pthread_mutex_unlock(&p->lock);
    if (!begun) return FD_PORT_MISUSE;
    fd_awaited_t look = {.port = port, .slot = slot, .result = FD_PORT_PENDING};
    fd_port_look(&look);
    *report = look.report;
    if (look.result == FD_PORT_OK && port->slots[slot].asked < port->geometry.n_layers) look.result = FD_PORT_PENDING;
    port->slots[slot].phase = look.result == FD_PORT_OK || look.result == FD_PORT_PENDING ? FD_SLOT_ARMED
                                                                                          : FD_SLOT_IDLE;
    return look.result;
}
