#include "reduction.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "cpu/parallel.h"
#include "region/doorbell.h"

enum {
    PAGE = 4096,
    LINES_APART = 128, /* two cache lines, because a processor fetches the neighbour of a line */
    LOOKS_PER_CLOCK = 16,
    CHUNK = 64 /* numbers that one thread adds up at least: whole cache lines of every dtype */
};
#define SPIN_NS 200000u        /* a waiter looks this long before it sleeps */
#define SLEEP_MAX_NS 50000000u /* a waiter looks this often at the rank that it waits for */
/* The ranks share a sum if that spares a rank the reading of more than this: of n ranks it reads two times its own
 * bytes, not n times, but waits twice. */
#define SHARED_BYTES (1u << 18)

/* The words of a rank, which no other rank writes, except for `sleepers`. */
typedef struct {
    uint32_t arrived;    /* atomic: the barriers that the rank has arrived at */
    uint32_t pid;        /* atomic: 0 until the rank has joined */
    uint64_t addends[2]; /* of each slot: numbers * FD_ACT_DTYPES + dtype */
    uint32_t thread;     /* atomic: the thread that sums; 0 until the first sum */
    uint8_t pad[LINES_APART - sizeof(uint32_t) * 3 - sizeof(uint64_t) * 2];
    uint32_t sleepers; /* atomic: the ranks that sleep until this rank arrives */
} words_t;

/* Why a reduction is broken. */
typedef enum { WHOLE = 0, ENDED, STALLED, LOOPS, DIFFERS, LEFT } fault_t;

/* The first page of the segment. `broken` is 0, or the fault * FD_MOST_RANKS + its rank. */
typedef struct {
    uint32_t broken; /* atomic */
} head_t;

static const size_t area_bytes = PAGE + 2 * (size_t)FD_RANK_SLOT_BYTES;

FD_VECTOR_OPS(fd_sum_parts_t, fd_sum_parts);
extern const fd_sum_parts_t fd_sum_parts_scalar[];

static head_t *head_of(const fd_reduction_t *r) { return (head_t *)r->segment; }
static uint8_t *area_of(const fd_reduction_t *r, uint32_t rank) { return r->segment + PAGE + rank * area_bytes; }
static words_t *words_of(const fd_reduction_t *r, uint32_t rank) { return (words_t *)area_of(r, rank); }
static uint8_t *slot_of(const fd_reduction_t *r, uint32_t rank, uint32_t slot) {
    return area_of(r, rank) + PAGE + slot * (size_t)FD_RANK_SLOT_BYTES;
}

size_t fd_reduction_segment_bytes(uint32_t n_ranks) {
    return n_ranks < 1 || n_ranks > FD_MOST_RANKS ? 0 : PAGE + n_ranks * area_bytes;
}

void fd_reduction_open(fd_reduction_t *r, void *segment, uint32_t rank, uint32_t n_ranks, uint64_t limit_ns,
                       fd_isa_t isa) {
    *r = (fd_reduction_t){.segment = segment,
                          .rank = rank,
                          .n_ranks = n_ranks,
                          .limit_ns = limit_ns,
                          .sum_parts = isa == FD_ISA_SCALAR ? fd_sum_parts_scalar
                                                            : FD_VECTOR_OPS_OF(fd_sum_parts, isa, 0),
                          .passed_ns = fd_now_ns(),
                          .watched = rank};
    memset(slot_of(r, rank, 0), 0, 2 * (size_t)FD_RANK_SLOT_BYTES);
    __atomic_store_n(&words_of(r, rank)->pid, (uint32_t)getpid(), __ATOMIC_RELEASE);
}

/* ---- the broken word ---- */

static bool is_broken(const fd_reduction_t *r) {
    return __atomic_load_n(&head_of(r)->broken, __ATOMIC_ACQUIRE) != WHOLE;
}

/* The first fault stays. Returns false, as the function that meets a fault does. */
static bool break_with(const fd_reduction_t *r, fault_t fault, uint32_t rank) {
    uint32_t whole = WHOLE;
    __atomic_compare_exchange_n(&head_of(r)->broken, &whole, fault * FD_MOST_RANKS + rank, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < r->n_ranks; i++) fd_futex_wake(&words_of(r, i)->arrived, true);
    return false;
}

void fd_reduction_leave(fd_reduction_t *r) { break_with(r, LEFT, r->rank); }

bool fd_reduction_error(const fd_reduction_t *r, char *text, size_t bytes) {
    const uint32_t broken = __atomic_load_n(&head_of(r)->broken, __ATOMIC_ACQUIRE), rank = broken % FD_MOST_RANKS;
    const uint32_t pid = __atomic_load_n(&words_of(r, rank)->pid, __ATOMIC_ACQUIRE);
    const double limit_s = (double)r->limit_ns * 1e-9;
    char why[96];
    switch (broken / FD_MOST_RANKS) {
    case WHOLE: return false;
    case ENDED: snprintf(why, sizeof why, "has ended"); break;
    case STALLED: snprintf(why, sizeof why, "has not gone on for %.1f s, while others wait for it", limit_s); break;
    case LOOPS: snprintf(why, sizeof why, "computes without end what other ranks have computed"); break;
    case DIFFERS: snprintf(why, sizeof why, "sums other numbers than the ranks before it"); break;
    default: snprintf(why, sizeof why, "has left the reduction");
    }
    snprintf(text, bytes, "rank %u (pid %u) %s", rank, pid, why);
    return true;
}

/* ---- barriers ---- */

static bool has_arrived(const words_t *words, uint32_t barrier) {
    return (int32_t)(__atomic_load_n(&words->arrived, __ATOMIC_ACQUIRE) - barrier) >= 0; /* the counter wraps around */
}

static void arrive(fd_reduction_t *r) {
    words_t *own = words_of(r, r->rank);
    r->watched = r->rank;
    __atomic_store_n(&own->thread, fd_thread_number(), __ATOMIC_RELAXED);
    __atomic_store_n(&own->arrived, ++r->arrived, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->sleepers, __ATOMIC_SEQ_CST)) fd_futex_wake(&own->arrived, true);
}

static void sleep_until_arrived(const fd_reduction_t *r, words_t *words, uint64_t ns) {
    __atomic_fetch_add(&words->sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t arrived = __atomic_load_n(&words->arrived, __ATOMIC_SEQ_CST);
    if ((int32_t)(arrived - r->arrived) < 0 && !is_broken(r)) fd_futex_wait(&words->arrived, arrived, ns, true);
    __atomic_fetch_sub(&words->sleepers, 1, __ATOMIC_SEQ_CST);
}

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
/* True if the process has ended, also if nobody has waited for it yet. False where Linux cannot tell (before 5.3). */
static bool has_ended(uint32_t pid) {
    if (!pid) return false;
    const int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) return errno == ESRCH;
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    const bool has = poll(&ended, 1, 0) > 0;
    close(fd);
    return has;
}

/* `same_work`: the rank does what this rank has done. */
static bool look(fd_reduction_t *r, uint32_t rank, bool same_work) {
    const words_t *words = words_of(r, rank);
    const uint32_t pid = __atomic_load_n(&words->pid, __ATOMIC_ACQUIRE);
    const uint32_t thread = __atomic_load_n(&words->thread, __ATOMIC_ACQUIRE);
    if (is_broken(r)) return false;
    if (!pid) return true; /* it has not joined */
    if (has_ended(pid)) return break_with(r, ENDED, rank);
    if (r->watched != rank) {
        r->watched = rank;
        r->watch = (fd_rank_watch_t){0};
        r->own_ns = fd_now_ns() - r->passed_ns;
    }
    const fd_rank_sight_t sight = fd_rank_look(&r->watch, pid, thread ? thread : pid, r->limit_ns, r->own_ns);
    if (sight == FD_RANK_STALLS) return break_with(r, STALLED, rank);
    return sight != FD_RANK_LOOPS || !same_work || break_with(r, LOOPS, rank);
}

bool fd_reduction_look(fd_reduction_t *r, uint32_t rank) { return look(r, rank, rank != 0); }

/* Waits until `rank` has arrived where this rank is. False if the reduction is broken. */
static bool await_rank(fd_reduction_t *r, uint32_t rank) {
    words_t *words = words_of(r, rank);
    uint64_t start = 0;
    for (uint32_t i = 1; !has_arrived(words, r->arrived); i++) {
        if (i % LOOKS_PER_CLOCK) {
            fd_cpu_relax();
            continue;
        }
        if (is_broken(r)) return false;
        const uint64_t now = fd_now_ns();
        if (!start) start = now;
        const uint64_t waited = now - start;
        if (waited >= SPIN_NS) {
            sleep_until_arrived(r, words, SLEEP_MAX_NS);
            if (!has_arrived(words, r->arrived) && !look(r, rank, true)) return false;
        } else if (waited >= FD_YIELD_AFTER_NS) sched_yield();
    }
    return true;
}

static bool pass_barrier(fd_reduction_t *r) {
    arrive(r);
    for (uint32_t i = 0; i < r->n_ranks; i++)
        if (i != r->rank && !await_rank(r, i)) return false;
    r->passed_ns = fd_now_ns();
    return !is_broken(r);
}

/* ---- sums ---- */

/* A sum of at most a slot's numbers. Threads share it in chunks of CHUNK numbers. */
typedef struct {
    const fd_reduction_t *r;
    uint8_t *data;
    size_t n, number_bytes;
    uint32_t act_dtype, slot;
    const void *parts[FD_MOST_RANKS];
    void *out;
    size_t first; /* the chunk with which the loop begins */
} piece_t;

static size_t chunks_of(const piece_t *p) { return (p->n + CHUNK - 1) / CHUNK; }
/* The first chunk of a rank's range; that of rank n_ranks is the end. */
static size_t range_of(const piece_t *p, uint32_t rank) { return chunks_of(p) * rank / p->r->n_ranks; }
/* The numbers of `n` chunks from `first` on: the last one may be shorter. */
static size_t numbers_of(const piece_t *p, size_t first, size_t n) {
    const size_t left = p->n - first * CHUNK;
    return n * CHUNK < left ? n * CHUNK : left;
}

static void copy(const piece_t *p, void *to, const void *from, size_t first, size_t n) {
    const size_t offset = first * CHUNK * p->number_bytes;
    memcpy((uint8_t *)to + offset, (const uint8_t *)from + offset, numbers_of(p, first, n) * p->number_bytes);
}

static void copy_addends(void *piece, size_t first, size_t n) {
    const piece_t *p = piece;
    copy(p, slot_of(p->r, p->r->rank, p->slot), p->data, first, n);
}

static void add_up(void *piece, size_t first, size_t n) {
    const piece_t *p = piece;
    first += p->first;
    p->r->sum_parts[p->act_dtype](p->parts, p->r->n_ranks, first * CHUNK, numbers_of(p, first, n), p->out);
}

static void copy_sums(void *piece, size_t rank, size_t n) {
    const piece_t *p = piece;
    for (; n; rank++, n--) {
        const size_t first = range_of(p, (uint32_t)rank), end = range_of(p, (uint32_t)rank + 1);
        if (first < end) copy(p, p->data, p->parts[rank], first, end - first);
    }
}

/* True if every rank has as many addends of the same dtype. */
static bool sums_agree(const piece_t *p) {
    const uint64_t addends = words_of(p->r, 0)->addends[p->slot];
    for (uint32_t i = 1; i < p->r->n_ranks; i++)
        if (words_of(p->r, i)->addends[p->slot] != addends) return break_with(p->r, DIFFERS, i);
    return true;
}

static bool sum_piece(fd_reduction_t *r, uint8_t *data, size_t n, uint32_t act_dtype, unsigned threads) {
    piece_t p = {
        .r = r, .data = data, .n = n, .number_bytes = fd_act_bytes(act_dtype), .act_dtype = act_dtype, .slot = r->slot};
    for (uint32_t i = 0; i < r->n_ranks; i++) p.parts[i] = slot_of(r, i, p.slot);
    r->slot ^= 1;
    const unsigned most = fd_worth_threads(n, threads);
    fd_parallel(copy_addends, &p, chunks_of(&p), 0, most);
    words_of(r, r->rank)->addends[p.slot] = n * FD_ACT_DTYPES + act_dtype;
    if (!pass_barrier(r) || !sums_agree(&p)) return false;
    if (n * p.number_bytes * (r->n_ranks - 2) <= SHARED_BYTES) {
        p.out = data;
        fd_parallel(add_up, &p, chunks_of(&p), 0, most);
        return true;
    }
    /* Of every slot only this rank reads its own range, so its sums may replace its addends. */
    p.out = slot_of(r, r->rank, p.slot);
    p.first = range_of(&p, r->rank);
    fd_parallel(add_up, &p, range_of(&p, r->rank + 1) - p.first, 0, most);
    if (!pass_barrier(r)) return false;
    fd_parallel(copy_sums, &p, r->n_ranks, 1, most);
    return true;
}

fd_status_t fd_reduction_sum(fd_reduction_t *r, void *data, size_t n, uint32_t act_dtype, unsigned threads) {
    const size_t number_bytes = fd_act_bytes(act_dtype), most = FD_RANK_SLOT_BYTES / number_bytes;
    uint8_t *piece = data;
    if (is_broken(r)) return FD_LINK_CLOSED;
    for (size_t m; r->n_ranks > 1 && n; n -= m, piece += m * number_bytes) {
        m = n < most ? n : most;
        if (!sum_piece(r, piece, m, act_dtype, threads)) return FD_LINK_CLOSED;
    }
    return FD_OK;
}
