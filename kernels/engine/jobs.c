#include "jobs.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "cache/arena.h"

enum {
    SPINS_PER_YIELD = 256, /* thread 0 yields its core this often while it waits for helpers */
    RENEWAL = 1 << 20, /* jobs after which thread 0 writes all lanes' words, so that no epoch is too old to compare */
    TALLY_THREADS = 8  /* threads that share a tally: few enough not to wait for each other, as thread 0 reads all */
};

/* ---- the words that threads claim items by ---- */

static uint32_t n_tallies(const fd_engine_t *e) { return (e->n_threads + TALLY_THREADS - 1) / TALLY_THREADS; }

/* A thread's number among the threads that take part; jobs in different bays begin with different threads. */
static uint32_t rank_of(const fd_engine_t *e, const fd_bay_t *bay, uint32_t thread) {
    return (thread + e->n_threads - bay->first_thread) % e->n_threads;
}

static fd_lane_t *lane_of(const fd_engine_t *e, const fd_bay_t *bay, uint32_t rank) {
    return &bay->lanes[(bay->first_thread + rank) % e->n_threads];
}

/* The items of a lane as the job began: epoch << 32 | next << 16 | end. */
static uint64_t whole_lane(const fd_engine_t *e, uint64_t notice, uint32_t rank) {
    const uint32_t n_items = (uint32_t)notice, lanes = fd_job_threads(e, n_items);
    const uint64_t next = rank < lanes ? (uint64_t)n_items * rank / lanes : 0,
                   end = rank < lanes ? (uint64_t)n_items * (rank + 1) / lanes : 0;
    return (notice & ~(uint64_t)UINT32_MAX) | next << 16 | end;
}

/* The lane's word under this notice. A lane from which no thread has claimed still has the word of an earlier job, so
 * that thread 0 need not write it. Sets *late if the notice is that of an earlier job. */
static uint64_t lane_word(const fd_engine_t *e, uint64_t word, uint64_t notice, uint32_t rank, bool *late) {
    const int32_t age = (int32_t)((uint32_t)(word >> 32) - (uint32_t)(notice >> 32));
    *late = age > 0;
    return age < 0 ? whole_lane(e, notice, rank) : word;
}

/* The number of items in a lane's word. */
static uint32_t n_left(uint64_t word) {
    const uint32_t next = word >> 16 & 0xffff, end = word & 0xffff;
    return end > next ? end - next : 0;
}

static bool claim_index(const fd_engine_t *e, fd_lane_t *lane, uint64_t notice, uint32_t rank, uint32_t *index) {
    uint64_t word = __atomic_load_n(&lane->claim, __ATOMIC_ACQUIRE);
    for (;;) {
        bool late;
        const uint64_t now = lane_word(e, word, notice, rank, &late);
        if (late || !n_left(now)) return false;
        if (!__atomic_compare_exchange_n(&lane->claim, &word, now + 0x10000, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            continue;
        *index = now >> 16 & 0xffff;
        return true;
    }
}

/* Claims an item (fd_step_t.left). A job lasts until its last item is counted or collected by thread 0. So a thread may
 * read bay->job while it has a claimed item that it has neither counted nor parked, and only then. */
static bool claim_item(const fd_engine_t *e, fd_bay_t *bay, uint64_t notice, uint32_t rank, uint32_t *item) {
    fd_lane_t *lane = lane_of(e, bay, rank);
    if (__atomic_load_n(&lane->parked, __ATOMIC_RELAXED) &&
        (*item = __atomic_exchange_n(&lane->parked, 0, __ATOMIC_ACQ_REL)))
        return true;
    if (rank >= fd_job_threads(e, (uint32_t)notice) || !claim_index(e, lane, notice, rank, item)) return false;
    *item = bay->job->items ? bay->job->items[*item] : *item << 1;
    return true;
}

/* ---- working ---- */

typedef struct {
    uint32_t items;
    uint64_t kv_bytes;
} count_t;

bool fd_job_do_item(fd_job_t *job, uint32_t item, uint32_t thread, const fd_stop_t *stop, uint64_t *kv_bytes) {
    if (__atomic_load_n(&job->cancelled, __ATOMIC_RELAXED)) return true;
    if (job->kind == FD_JOB_FAULT_IN) {
        const int error = fd_kvcache_fault_in(job->work->kv, job->first_part + (item >> 1));
        if (error) __atomic_store_n(&job->error, error, __ATOMIC_RELAXED);
        return true;
    }
    if (!(item & 1)) fd_work_begin(job->step, item >> 1);
    if (job->kind == FD_JOB_COPIES) return fd_work_copy(job->work, job->step, item >> 1, job->n_cut, stop);
    return fd_work_advance(job->work, job->step, job->slot, job->layer, item >> 1, thread, stop, kv_bytes);
}

static void publish(fd_bay_t *bay, uint32_t thread, count_t *done) {
    if (!done->items && !done->kv_bytes) return;
    fd_tally_t *tally = &bay->tallies[thread / TALLY_THREADS];
    __atomic_fetch_add(&tally->kv_bytes, done->kv_bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&tally->items, done->items, __ATOMIC_RELEASE);
    *done = (count_t){0, 0};
}

/* Works on the job that `notice` announces, until nothing is left to claim or the thread should stop. Returns whether
 * the thread has done anything. */
static bool work_on(fd_engine_t *e, fd_bay_t *bay, uint64_t notice, uint32_t thread, uint64_t until_ns) {
    const fd_stop_t stop = {bay->notice, notice, until_ns};
    const uint32_t own = rank_of(e, bay, thread), lanes = fd_job_threads(e, (uint32_t)notice);
    count_t done = {0, 0};
    bool any = false;
    for (uint32_t k = 0; k <= lanes; k++) {
        const uint32_t rank = k ? (own + k) % lanes : own;
        if (k == 1) publish(bay, thread, &done); /* before it looks into the other lanes, which takes a while */
        for (uint32_t item; claim_item(e, bay, notice, rank, &item);) {
            any = true;
            if (!fd_job_do_item(bay->job, item, thread, &stop, &done.kv_bytes)) {
                publish(bay, thread, &(count_t){0, done.kv_bytes});
                done.kv_bytes = 0;
                __atomic_store_n(&lane_of(e, bay, own)->parked, item | 1, __ATOMIC_RELEASE);
                k = lanes;
                break;
            }
            done.items++;
            if (__atomic_load_n(bay->notice, __ATOMIC_RELAXED) == notice && (!until_ns || fd_now_ns() < until_ns))
                continue;
            k = lanes;
            break;
        }
    }
    publish(bay, thread, &done);
    return any;
}

/* ---- helpers ---- */

static void wake(fd_engine_t *e, uint32_t thread) {
    uint32_t *asleep = &e->sleepers[thread].asleep;
    if (__atomic_load_n(asleep, __ATOMIC_RELAXED) && __atomic_exchange_n(asleep, 0, __ATOMIC_ACQ_REL))
        fd_futex_wake(asleep, false);
}

/* Each thread that takes part wakes two others, so that thread 0 need not make a system call for each sleeper. */
static void wake_next(fd_engine_t *e, const fd_bay_t *bay, uint64_t notice, uint32_t rank) {
    const uint32_t lanes = fd_job_threads(e, (uint32_t)notice);
    for (uint32_t next = 2 * rank + 1; next <= 2 * rank + 2 && next < lanes; next++)
        wake(e, (bay->first_thread + next) % e->n_threads);
}

void fd_wake_all(fd_engine_t *e) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (uint32_t t = 1; t < e->n_threads; t++) wake(e, t);
}

/* Works on the jobs that have been announced since `seen` was taken. Returns whether the thread has done anything. */
static bool help(fd_engine_t *e, uint32_t thread, uint64_t *seen) {
    bool any = false;
    for (uint32_t p = 0; p < FD_BAYS; p++) {
        const uint64_t notice = __atomic_load_n(&e->board[p], __ATOMIC_ACQUIRE);
        if (notice == seen[p]) continue;
        fd_bay_t *bay = &e->bays[p];
        const uint32_t rank = rank_of(e, bay, thread);
        seen[p] = notice;
        if (rank >= fd_job_threads(e, (uint32_t)notice)) continue;
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* see sleep_until_woken */
        wake_next(e, bay, notice, rank);
        any |= work_on(e, bay, notice, thread, 0);
    }
    return any;
}

/* A sleeper announces itself and then reads the board once more; a thread that has put up or read a notice looks for
 * sleepers afterwards. The fences between the two steps make at least one of them see the other. */
static void sleep_until_woken(fd_engine_t *e, uint32_t thread, const uint64_t *seen) {
    uint32_t *asleep = &e->sleepers[thread].asleep;
    __atomic_store_n(asleep, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    bool news = __atomic_load_n(&e->stop, __ATOMIC_RELAXED);
    for (uint32_t p = 0; p < FD_BAYS; p++) news |= __atomic_load_n(&e->board[p], __ATOMIC_RELAXED) != seen[p];
    if (!news) fd_futex_wait(asleep, 1, 1000000000u, false);
    __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
}

bool fd_keep_spinning(const fd_engine_t *e, uint64_t idle_since) {
    const bool under_way = __atomic_load_n(&e->under_way, __ATOMIC_RELAXED);
    const uint64_t idle = fd_now_ns() - idle_since;
    if (idle >= e->spin_ns && !(under_way && idle < e->step_spin_ns)) return false;
    if (idle >= FD_YIELD_AFTER_NS) sched_yield();
    return true;
}

void *fd_helper_main(void *arg) {
    fd_helper_t self = *(fd_helper_t *)arg;
    free(arg);
    fd_engine_t *e = self.engine;
    uint64_t seen[FD_BAYS] = {0}, idle_since = fd_now_ns();
    for (uint32_t i = 1; !__atomic_load_n(&e->stop, __ATOMIC_ACQUIRE); i++) {
        if (help(e, self.thread, seen)) idle_since = fd_now_ns();
        else if (i % FD_POLLS_PER_CLOCK) fd_cpu_relax();
        else if (!fd_keep_spinning(e, idle_since)) sleep_until_woken(e, self.thread, seen);
    }
    return NULL;
}

/* ---- thread 0 ---- */

fd_bay_t *fd_bay_free(fd_engine_t *e) {
    for (uint32_t p = 0; p < FD_BAYS; p++)
        if (!e->bays[p].job) return &e->bays[p];
    return NULL;
}

static void sum(const fd_engine_t *e, const fd_bay_t *bay, uint64_t *items, uint64_t *kv_bytes) {
    *items = *kv_bytes = 0;
    for (uint32_t i = 0; i < n_tallies(e); i++) {
        *items += __atomic_load_n(&bay->tallies[i].items, __ATOMIC_ACQUIRE);
        *kv_bytes += __atomic_load_n(&bay->tallies[i].kv_bytes, __ATOMIC_RELAXED);
    }
}

void fd_job_start(fd_engine_t *e, fd_bay_t *bay, fd_job_t *job) {
    bay->job = job;
    job->bay = bay;
    bay->n_items = job->n_items;
    bay->n_collected = 0;
    bay->withdrawn = false;
    const uint64_t notice = (uint64_t)++bay->epoch << 32 | job->n_items;
    if (bay->epoch % RENEWAL == 0)
        for (uint32_t rank = 0; rank < e->n_threads; rank++)
            __atomic_store_n(&lane_of(e, bay, rank)->claim, whole_lane(e, notice, rank), __ATOMIC_RELEASE);
    __atomic_store_n(bay->notice, notice, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (bay->first_thread) wake(e, bay->first_thread);
    wake_next(e, bay, notice, rank_of(e, bay, 0));
}

bool fd_job_help(fd_engine_t *e, fd_bay_t *bay, uint64_t until_ns) {
    return work_on(e, bay, *bay->notice, 0, until_ns);
}

void fd_job_withdraw(fd_engine_t *e, fd_bay_t *bay) {
    const uint64_t notice = *bay->notice, closed = (uint64_t)bay->epoch << 32;
    __atomic_store_n(bay->notice, closed, __ATOMIC_RELEASE);
    for (uint32_t rank = 0; rank < fd_job_threads(e, bay->n_items); rank++) {
        bool late;
        fd_lane_t *lane = lane_of(e, bay, rank);
        const uint64_t word = __atomic_exchange_n(&lane->claim, closed, __ATOMIC_ACQ_REL);
        lane->kept = lane_word(e, word, notice, rank, &late);
    }
    bay->withdrawn = true;
}

/* Takes the items that threads have parked. Returns true if these and the unclaimed items are all that is
 * left of a withdrawn job; they become the job's items then. */
static bool collect(fd_engine_t *e, fd_bay_t *bay, uint64_t n_done) {
    for (uint32_t t = 0; t < e->n_threads; t++) {
        const uint32_t item = __atomic_exchange_n(&bay->lanes[t].parked, 0, __ATOMIC_ACQ_REL);
        if (item) bay->collected[bay->n_collected++] = item;
    }
    fd_job_t *job = bay->job;
    const uint32_t lanes = fd_job_threads(e, bay->n_items);
    uint32_t unclaimed = 0, n = 0;
    for (uint32_t rank = 0; rank < lanes; rank++) unclaimed += n_left(lane_of(e, bay, rank)->kept);
    if (n_done + unclaimed + bay->n_collected < bay->n_items) return false;
    for (uint32_t rank = 0; rank < lanes; rank++) {
        const uint64_t kept = lane_of(e, bay, rank)->kept;
        /* The lanes are in the order of the list, so nothing is overwritten before it has been read. */
        for (uint32_t i = 0, first = kept >> 16 & 0xffff; i < n_left(kept); i++)
            job->left[n++] = job->items ? job->items[first + i] : (first + i) << 1;
    }
    for (uint32_t i = 0; i < bay->n_collected; i++) job->left[n++] = bay->collected[i];
    job->items = job->left;
    job->n_items = n;
    return true;
}

bool fd_job_over(fd_engine_t *e, fd_bay_t *bay) {
    uint64_t items, kv_bytes;
    sum(e, bay, &items, &kv_bytes);
    const uint64_t n_done = items - bay->items_before;
    fd_job_t *job = bay->job;
    if (bay->withdrawn ? !collect(e, bay, n_done) : n_done < bay->n_items) return false;
    if (!bay->withdrawn) job->n_items = 0;
    job->kv_bytes += kv_bytes - bay->kv_bytes_before;
    bay->items_before = items;
    bay->kv_bytes_before = kv_bytes;
    job->bay = NULL;
    bay->job = NULL;
    return true;
}

void fd_job_run(fd_engine_t *e, fd_bay_t *bay, fd_job_t *job) {
    fd_job_start(e, bay, job);
    fd_job_help(e, bay, 0);
    for (uint32_t i = 1; !fd_job_over(e, bay); i++) {
        if (i % SPINS_PER_YIELD) fd_cpu_relax();
        else sched_yield(); /* a helper that still works may need this core */
    }
}

/* ---- life ---- */

bool fd_bays_init(fd_engine_t *e) {
    const size_t lanes = e->n_threads * sizeof(fd_lane_t), tallies = n_tallies(e) * sizeof(fd_tally_t);
    e->sleepers = aligned_alloc(FD_LINE, e->n_threads * sizeof *e->sleepers);
    if (!e->sleepers) return false;
    memset(e->sleepers, 0, e->n_threads * sizeof *e->sleepers);
    for (uint32_t p = 0; p < FD_BAYS; p++) {
        fd_bay_t *bay = &e->bays[p];
        bay->notice = &e->board[p];
        bay->first_thread = e->n_threads * p / FD_BAYS;
        bay->lanes = aligned_alloc(FD_LINE, lanes);
        bay->collected = malloc(e->n_threads * sizeof *bay->collected);
        bay->tallies = aligned_alloc(FD_LINE, tallies);
        if (!bay->lanes || !bay->tallies || !bay->collected) return false;
        memset(bay->lanes, 0, lanes);
        memset(bay->tallies, 0, tallies);
    }
    return true;
}

void fd_bays_destroy(fd_engine_t *e) {
    for (uint32_t p = 0; p < FD_BAYS; p++) {
        free(e->bays[p].lanes);
        free(e->bays[p].tallies);
        free(e->bays[p].collected);
    }
    free(e->sleepers);
}
