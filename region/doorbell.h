/* How both ends of a link ring the doorbells of its activation region (region.h) and wait for them.
 *
 *   S side                                           R side
 *   fd_ring_request(slot, number, asleep, eventfd)   fd_bell_read(request_bell), or asleep on the eventfd
 *   fd_wait_reply(slot, number, ...)                 fd_ring_reply(slot, number)
 *
 * Neither side makes a system call while the other side is awake. A thread that is about to sleep announces it and then
 * reads the bell once more; a thread that rings looks for sleepers afterwards. A sequentially consistent fence between
 * the two steps on each side makes at least one thread see the other (Dekker's argument), so no wake-up is lost.
 * Every sleep has a time limit, because a hostile peer may write any of these words at any time.
 */
#ifndef FD_DOORBELL_H
#define FD_DOORBELL_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "region.h"

/* An R-engine thread calls this right after it has rung a reply bell, so that a TCP or RDMA carrier sends the reply.
 * Must not block and must not need Python's GIL. */
typedef void (*fd_notify_fn)(void *ctx, uint32_t slot);

/* The R-engine's thread 0 calls this so that a carrier can take in the bytes that have arrived, and ring. While the
 * thread is idle it calls again and again, with `go_on` true. Before it works, sleeps or releases the link it calls
 * once, with `go_on` false. Must not block. */
typedef void (*fd_poll_fn)(void *ctx, bool go_on);

/* A PyCapsule named FD_NOTIFY_CAPSULE points to this. The capsule must outlive the link that it is given to. */
typedef struct {
    fd_notify_fn fn;
    void *ctx;       /* first argument of both functions */
    fd_poll_fn poll; /* or NULL */
} fd_notify_t;

#define FD_NOTIFY_CAPSULE "fastdecode.notify"

/* A waiter that has spun this long yields its core between two reads of the bell. Where threads outnumber cores, the
 * thread that will ring may need this very core, and would otherwise get it only at the scheduler's next tick,
 * milliseconds later. */
#define FD_YIELD_AFTER_NS 500u

typedef enum {
    FD_WAIT_DONE = 0,
    FD_WAIT_TIMEOUT = 1,
    FD_WAIT_STOPPED = 2,
} fd_wait_t;

static inline void fd_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* CLOCK_MONOTONIC, nanoseconds. */
static inline uint64_t fd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t fd_bell_read(const uint64_t *bell) {
    const uint64_t number = __atomic_load_n(bell, __ATOMIC_ACQUIRE);
#if defined(__aarch64__)
    /* Acquire orders only what CPUs have written; this may have been written by an RDMA device. */
    __asm__ __volatile__("dmb oshld" : : : "memory");
#endif
    return number;
}

static inline fd_slot_t *fd_slot_at(void *region, const fd_layout_t *y, uint32_t slot) {
    return (fd_slot_t *)((uint8_t *)region + y->slot0 + slot * y->slot_bytes);
}

/* The word that futexes wait on: the low half of a bell (little-endian). */
static inline uint32_t *fd_bell_word(uint64_t *bell) { return (uint32_t *)bell; }

/* Sleeps while *word == expected, at most `ns` nanoseconds. `shared`: processes share the memory of the word. */
static inline void fd_futex_wait(uint32_t *word, uint32_t expected, uint64_t ns, bool shared) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, expected, &t, NULL, 0);
}

static inline void fd_futex_wake(uint32_t *word, bool shared) {
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* How long a thread sleeps that no bell can wake, after it has waited for `waited_ns`: an eighth of that, so that its
 * naps lengthen a wait by an eighth at most, within 20 us and `longest_ns`. */
static inline uint64_t fd_nap_ns(uint64_t waited_ns, uint64_t longest_ns) {
    const uint64_t shortest_ns = 20000u, nap_ns = waited_ns / 8;
    return nap_ns < shortest_ns ? shortest_ns : nap_ns > longest_ns ? longest_ns : nap_ns;
}

static inline void fd_eventfd_wake(int fd) {
    uint64_t one = 1;
    /* A full counter (EAGAIN) has already woken the reader. */
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

/* Publishes a call whose header, table and rows are all written. Called on the S side, or at the R-node's end of a TCP
 * link. `wake_fd` < 0 if the R-engine is at the other end of a wire. */
static inline void fd_ring_request(fd_slot_t *slot, uint64_t number, const uint32_t *engine_asleep, int wake_fd) {
    __atomic_store_n(&slot->request_bell, number, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (wake_fd >= 0 && __atomic_load_n(engine_asleep, __ATOMIC_RELAXED)) fd_eventfd_wake(wake_fd);
}

/* Publishes a reply whose header and rows are all written. Called on the R side, or at the S-node's end of a TCP
 * link. */
static inline void fd_ring_reply(fd_slot_t *slot, uint64_t number) {
    __atomic_store_n(&slot->reply_bell, number, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&slot->reply_waiting, __ATOMIC_RELAXED)) fd_futex_wake(fd_bell_word(&slot->reply_bell), true);
}

/* Waits until the reply bell reads exactly `number`: spins for spin_ns, then sleeps on the bell. Gives up after
 * timeout_ns, or once *stop is not 0 (`stop` may be NULL). fd_stop_waiters sets *stop and wakes the waiter at once. */
static inline fd_wait_t fd_wait_reply(fd_slot_t *slot, uint64_t number, uint64_t spin_ns, uint64_t timeout_ns,
                                      const uint32_t *stop) {
    const uint64_t nap_ns = 50000000u;
    uint64_t start = 0;
    for (uint32_t i = 1;; i++) {
        if (fd_bell_read(&slot->reply_bell) == number) return FD_WAIT_DONE;
        if (i % 16) {
            fd_cpu_relax();
            continue;
        }
        if (stop && __atomic_load_n(stop, __ATOMIC_ACQUIRE)) return FD_WAIT_STOPPED;
        uint64_t now = fd_now_ns();
        if (!start) start = now;
        if (now - start >= spin_ns) break;
        if (now - start >= FD_YIELD_AFTER_NS) sched_yield();
    }
    for (;;) {
        uint64_t waited = fd_now_ns() - start;
        if (waited >= timeout_ns) return FD_WAIT_TIMEOUT;
        __atomic_fetch_add(&slot->reply_waiting, 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        uint64_t bell = fd_bell_read(&slot->reply_bell);
        bool stopped = stop && __atomic_load_n(stop, __ATOMIC_ACQUIRE);
        if (bell != number && !stopped) {
            uint64_t left = timeout_ns - waited;
            fd_futex_wait(fd_bell_word(&slot->reply_bell), (uint32_t)bell, left < nap_ns ? left : nap_ns, true);
        }
        __atomic_fetch_sub(&slot->reply_waiting, 1, __ATOMIC_SEQ_CST);
        if (fd_bell_read(&slot->reply_bell) == number) return FD_WAIT_DONE;
        if (stopped) return FD_WAIT_STOPPED;
    }
}

/* Sets *stop and wakes the threads that sleep in fd_wait_reply on this slot. */
static inline void fd_stop_waiters(fd_slot_t *slot, uint32_t *stop) {
    __atomic_store_n(stop, 1, __ATOMIC_SEQ_CST);
    fd_futex_wake(fd_bell_word(&slot->reply_bell), true);
}

#endif
