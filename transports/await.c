/* How a thread of the S side waits for several slots at once, whatever carriers their ports have. */
#define _GNU_SOURCE
#include "port.h"

enum {
    LOOKS_PER_CLOCK = 16, /* a waiter reads the clock once in this many looks */
    WAITV_MAX = 128       /* most words of a futex_waitv, FUTEX_WAITV_MAX */
};
#define NAP_MAX_NS 1000000u        /* longest nap (fd_nap_ns) of a waiter that no bell wakes */
#define SLEEP_MAX_NS 50000000u     /* a waiter checks at least this often whether its links are still up */
#define PROBE_HARDER_NS 250000000u /* such a waiter probes harder this often */

/* The word on which a waiter for this slot sleeps. */
static uint32_t *futex_of(const fd_awaited_t *a) {
    fd_slot_t *slot = fd_port_slot(a->port, a->slot);
    return a->port->slots[a->slot].phase == FD_SLOT_ARMING ? fd_bell_word(&slot->armed_bell) : &slot->layer_reply;
}

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
struct waitv { /* struct futex_waitv of linux/futex.h, which older headers lack */
    uint64_t val, uaddr;
    uint32_t flags, reserved;
};

/* Sleeps until the word of any pending slot changes. */
static void sleep_on_words(fd_awaited_t *awaited, size_t n, uint64_t ns) {
    struct waitv words[WAITV_MAX];
    fd_slot_t *announced[WAITV_MAX];
    size_t n_words = 0;
    bool over = false;
    for (size_t i = 0; i < n && n_words < WAITV_MAX; i++) {
        fd_awaited_t *a = &awaited[i];
        if (a->result != FD_PORT_PENDING) continue;
        uint32_t *word = futex_of(a);
        announced[n_words] = fd_port_slot(a->port, a->slot);
        __atomic_fetch_add(&announced[n_words]->waiting, 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        words[n_words++] = (struct waitv){
            .val = fd_word_read(word), .uaddr = (uintptr_t)word, .flags = 2 /* FUTEX2_SIZE_U32, shared */};
        fd_port_look(a);
        over |= a->result != FD_PORT_PENDING;
    }
    if (!n_words) return;
    uint32_t *first = (uint32_t *)(uintptr_t)words[0].uaddr;
    if (!over && n_words == 1) {
        fd_futex_wait(first, (uint32_t)words[0].val, ns, true);
    } else if (!over) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        const uint64_t at = (uint64_t)until.tv_nsec + ns;
        until.tv_sec += (time_t)(at / 1000000000u);
        until.tv_nsec = (long)(at % 1000000000u);
        if (syscall(SYS_futex_waitv, words, (unsigned)n_words, 0, &until, CLOCK_MONOTONIC) < 0 && errno == ENOSYS)
            fd_futex_wait(first, (uint32_t)words[0].val, fd_min(ns, NAP_MAX_NS), true); /* Linux < 5.16 */
    }
    for (size_t i = 0; i < n_words; i++) __atomic_fetch_sub(&announced[i]->waiting, 1, __ATOMIC_SEQ_CST);
}

/* Sleeps until a descriptor or one of the sockets that this thread reads is readable, or a link goes down. */
static void sleep_on_descriptors(const fd_waits_t *w, uint64_t ns) {
    struct pollfd fds[3 * WAITV_MAX];
    size_t n_fds = fd_min(w->n_fds, WAITV_MAX);
    const fd_awaited_t *awaited = w->awaited;
    if (n_fds) memcpy(fds, w->fds, n_fds * sizeof *fds);
    for (size_t i = 0; i < w->n && n_fds + 2 <= 3 * WAITV_MAX; i++) {
        if (!awaited[i].polling || awaited[i].result != FD_PORT_PENDING) continue;
        const fd_carrier_t *carrier = &awaited[i].port->carrier;
        fds[n_fds++] = (struct pollfd){.fd = carrier->ops->poll_fd(carrier->self), .events = POLLIN};
        fds[n_fds++] = (struct pollfd){.fd = awaited[i].port->link.fd, .events = POLLIN};
    }
    const struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    ppoll(fds, (nfds_t)n_fds, &t, NULL);
}

/* Sleeps until the answer to a pending slot may have come. The thread has waited for `waited_ns`, and probed the
 * carriers harder after `*probed_ns`. */
static void sleep_for_answers(const fd_waits_t *w, uint64_t waited_ns, uint64_t left_ns, uint64_t *probed_ns) {
    fd_awaited_t *awaited = w->awaited;
    const size_t n = w->n;
    /* Pending slots by what ends the sleep: a futex, a descriptor, or nothing, because their carrier wakes no thread.
     */
    size_t n_futexes = 0, n_fds = w->n_fds, n_silent = 0;
    for (size_t i = 0; i < n; i++) {
        if (awaited[i].result != FD_PORT_PENDING) continue;
        if (awaited[i].polling) n_fds++;
        else if (awaited[i].port->carrier.ops->wakes) n_futexes++;
        else n_silent++;
    }
    uint64_t ns = fd_min(left_ns, SLEEP_MAX_NS);
    const bool one_call = !n_silent && !(n_futexes && n_fds) && n_futexes + n_fds <= WAITV_MAX;
    if (!one_call) ns = fd_min(ns, fd_nap_ns(waited_ns, NAP_MAX_NS)); /* no system call sleeps on all of them */
    if (n_futexes && !n_fds && !n_silent) sleep_on_words(awaited, n, ns);
    else sleep_on_descriptors(w, ns);
    if (!n_silent) return;
    const bool harder = waited_ns - *probed_ns >= PROBE_HARDER_NS;
    if (harder) *probed_ns = waited_ns;
    for (size_t i = 0; i < n; i++) {
        const fd_carrier_t *carrier = &awaited[i].port->carrier;
        if (awaited[i].result == FD_PORT_PENDING && carrier->ops->probe)
            carrier->ops->probe(carrier->self, awaited[i].slot, harder);
    }
}

/* Polls the carriers of pending slots. If there are several, one system call finds the carriers with bytes to receive.
 * Returns true if any carrier was polled. */
static bool poll_carriers(fd_awaited_t *awaited, size_t n) {
    struct pollfd fds[WAITV_MAX];
    fd_awaited_t *polled[WAITV_MAX];
    size_t n_polled = 0;
    for (size_t i = 0; i < n && n_polled < WAITV_MAX; i++) {
        const fd_carrier_t *carrier = &awaited[i].port->carrier;
        if (awaited[i].result != FD_PORT_PENDING || !carrier->ops->poll) continue;
        if (!awaited[i].polling) awaited[i].polling = carrier->ops->poll(carrier->self, true);
        if (!awaited[i].polling) continue;
        fds[n_polled] = (struct pollfd){.fd = carrier->ops->poll_fd(carrier->self), .events = POLLIN};
        polled[n_polled++] = &awaited[i];
    }
    if (n_polled > 1 && poll(fds, (nfds_t)n_polled, 0) <= 0) return true;
    for (size_t i = 0; i < n_polled; i++)
        if (n_polled == 1 || fds[i].revents)
            polled[i]->polling = polled[i]->port->carrier.ops->poll(polled[i]->port->carrier.self, true);
    return n_polled > 0;
}

/* Does a round of the work that the other ends of the slots leave to this thread. True if there was any work. */
static bool serve(const fd_awaited_t *awaited, size_t n, bool go_on) {
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        const fd_carrier_t *carrier = &awaited[i].port->carrier;
        if (carrier->ops->serve && (!go_on || awaited[i].result == FD_PORT_PENDING))
            any |= carrier->ops->serve(carrier->self, go_on);
    }
    return any;
}

/* The first wait without a pending result, or -1. Looks at all slots that are pending. */
static long first_over(const fd_waits_t *w) {
    long first = -1;
    size_t i = 0;
    for (size_t k = 0; k < w->n_waits; k++) {
        size_t pending = 0;
        for (; i < w->ends[k]; i++) {
            if (w->awaited[i].result == FD_PORT_PENDING) fd_port_look(&w->awaited[i]);
            pending += w->awaited[i].result == FD_PORT_PENDING;
        }
        if (!pending && first < 0) first = (long)k;
    }
    return first;
}

/* The first descriptor that is readable, counted after the waits, or -1. */
static long first_readable(const fd_waits_t *w) {
    if (!w->n_fds || poll(w->fds, (nfds_t)w->n_fds, 0) <= 0) return -1;
    for (size_t i = 0; i < w->n_fds; i++)
        if (w->fds[i].revents) return (long)(w->n_waits + i);
    return -1;
}

long fd_port_await_any(const fd_waits_t *w, uint64_t timeout_ns) {
    uint64_t start = 0, served_at = 0, spin_ns = 0, probed_ns = 0;
    long over;
    bool serves = false; /* a carrier has `serve`; otherwise no look at the carriers is needed */
    for (size_t i = 0; i < w->n; i++) {
        const fd_port_t *port = w->awaited[i].port;
        spin_ns = fd_max(spin_ns, port->spin_ns);
        serves |= port->carrier.ops->serve != NULL;
    }
    for (uint32_t i = 1; (over = first_over(w)) < 0; i++) {
        const bool served = serves && serve(w->awaited, w->n, true), polled = poll_carriers(w->awaited, w->n);
        if (w->n && !served && !polled && i % LOOKS_PER_CLOCK) {
            fd_cpu_relax();
            continue;
        }
        if ((over = first_readable(w)) >= 0) break;
        const uint64_t now = fd_now_ns();
        if (!start) start = now;
        if (served) served_at = now;
        const uint64_t waited = now - start, idle = served_at ? now - served_at : waited;
        if (waited >= timeout_ns) break;
        if (idle >= spin_ns && !served && first_over(w) < 0)
            sleep_for_answers(w, waited, timeout_ns - waited, &probed_ns);
        else if (idle >= FD_YIELD_AFTER_NS) sched_yield();
    }
    if (serves) serve(w->awaited, w->n, false);
    for (size_t i = 0; i < w->n; i++) {
        fd_awaited_t *a = &w->awaited[i];
        if (a->polling) a->port->carrier.ops->poll(a->port->carrier.self, false);
        a->polling = false; /* the next wait for the slot has to take the carrier again */
    }
    return over;
}

void fd_port_await(fd_awaited_t *awaited, size_t n, uint64_t timeout_ns) {
    const fd_waits_t all = {.awaited = awaited, .n = n, .ends = &n, .n_waits = 1};
    if (fd_port_await_any(&all, timeout_ns) == 0) return;
    for (size_t i = 0; i < n; i++) {
        if (awaited[i].result != FD_PORT_PENDING) continue;
        fd_port_give_up(awaited[i].port, awaited[i].slot, timeout_ns);
        awaited[i].result = FD_PORT_DOWN;
    }
}
