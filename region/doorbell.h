/* How both ends of a link ring the words of its activation region (region.h), and sleep.
 *
 * Neither side makes a system call while the other side is awake. A thread that is about to sleep announces it and then
 * reads the word once more; a thread that rings looks for sleepers afterwards. A sequentially consistent fence between
 * the two steps on each side makes at least one thread see the other (Dekker's argument), so no wake-up is lost.
 * Every sleep has a time limit, because a hostile peer may write any of these words at any time.
 */
#pragma once

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "region.h"

/* A waiter that has spun this long yields its core between two reads of the bell. Where threads outnumber cores, the
 * thread that will ring may need this very core, and would otherwise get it only at the scheduler's next tick,
 * milliseconds later. */
#define FD_YIELD_AFTER_NS 500u

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

/* Acquire orders only what CPUs have written; a word may have been written by an RDMA device. */
static inline void fd_order_device_writes(void) {
#if defined(__aarch64__)
    __asm__ __volatile__("dmb oshld" : : : "memory");
#endif
}

static inline uint64_t fd_bell_read(const uint64_t *bell) {
    const uint64_t number = __atomic_load_n(bell, __ATOMIC_ACQUIRE);
    fd_order_device_writes();
    return number;
}

static inline uint32_t fd_word_read(const uint32_t *word) {
    const uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    fd_order_device_writes();
    return value;
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

/* Wakes the R-engine if it sleeps, after its word has been stored. `wake_fd` is the R-engine's eventfd; < 0 if the
 * R-engine is at the other end of a wire. */
static inline void fd_wake_engine(const uint32_t *engine_asleep, int wake_fd) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (wake_fd >= 0 && __atomic_load_n(engine_asleep, __ATOMIC_RELAXED)) fd_eventfd_wake(wake_fd);
}

/* Wakes the threads that sleep on this slot's armed_bell or layer_reply, after a word has been stored. */
static inline void fd_wake_waiters(fd_slot_t *slot) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&slot->waiting, __ATOMIC_RELAXED)) return;
    fd_futex_wake(fd_bell_word(&slot->armed_bell), true);
    fd_futex_wake(&slot->layer_reply, true);
}

/* Stores a word of the S side or of the R side. A thread that reads the word sees all earlier writes. */
static inline void fd_bell_store(uint64_t *bell, uint64_t number) { __atomic_store_n(bell, number, __ATOMIC_RELEASE); }
static inline void fd_word_store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Opens every gate of a region whose link has died, and wakes all waiters. The one way to end all waits; the caller
 * has marked the link as down. */
static inline void fd_poison_all(void *region, const fd_geometry_t *g) {
    const fd_layout_t y = fd_region_layout(g);
    for (uint32_t i = 0; i < g->n_slots; i++) {
        fd_slot_t *slot = fd_slot_at(region, &y, i);
        __atomic_store_n(&slot->layer_reply, FD_POISON, __ATOMIC_SEQ_CST);
        fd_futex_wake(fd_bell_word(&slot->armed_bell), true);
        fd_futex_wake(&slot->layer_reply, true);
    }
}
