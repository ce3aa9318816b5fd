#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "region/doorbell.h"

#define AWAKE_NS 200000u     /* a worker looks for the next loop this long before it sleeps */
#define SLEEP_NS 1000000000u /* a sleep's time limit; it is woken when there is a loop */
enum { MOST_WORKERS = 1023, LINE = 64 };

typedef struct {
    void (*body)(void *data, size_t first, size_t n);
    void *data;
    size_t parts, least; /* at least `least` of a slice's parts are taken at a time */
    uint32_t number;
    unsigned slices;
    uint64_t began;               /* fd_now_ns if the loop is timed, otherwise 0 */
    _Alignas(LINE) uint64_t came; /* sum of the times at which workers came */
    uint64_t busy_ns, n_came;     /* of the workers */
} loop_t;

/* A thread's slice of a loop's parts: the loop's number in the upper half, and how many of its parts have been taken in
 * the lower one. If the number is another loop's, none has been taken. So the caller need not write to lines that the
 * workers' caches hold. */
typedef struct {
    _Alignas(LINE) uint64_t taken;
} slice_t;

/* The pool's state is one word, so that a worker joins a loop only while its caller is there:
 *   bits 0 to 14   workers that are in the loop
 *   bit 15         the loop takes workers
 *   bits 16 to 31  the most workers that it takes
 *   bits 32 to 63  the loop's number */
#define IN_LOOP 0x7fffu
#define OPEN 0x8000u

/* Threads that wait read the state only, and what else changes has lines of its own. */
static struct {
    _Alignas(LINE) uint64_t state;
    loop_t *loop; /* valid for workers in the loop */
    _Alignas(LINE) uint32_t sleepers, bell;
    _Alignas(LINE) pthread_mutex_t busy; /* held by the caller of the loop in progress, and by a reader of `times` */
    uint32_t number, n_workers;          /* of the loop in progress, of all workers; under `busy` */
    bool timed;                          /* under `busy` */
    fd_loop_times_t times[FD_LOOP_KINDS];
    slice_t slices[MOST_WORKERS + 1]; /* the caller's is the first */
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local fd_loop_kind_t loops_compute;

fd_loop_kind_t fd_loops_compute(fd_loop_kind_t kind) {
    const fd_loop_kind_t before = loops_compute;
    loops_compute = kind;
    return before;
}

/* Takes parts of a slice until none is left, three quarters of them at a time, so that others can take the rest. */
static void take_slice(const loop_t *loop, size_t slice) {
    uint64_t *word = &pool.slices[slice].taken, before = __atomic_load_n(word, __ATOMIC_RELAXED);
    const size_t begin = loop->parts * slice / loop->slices, end = loop->parts * (slice + 1) / loop->slices;
    for (;;) {
        const size_t taken = before >> 32 == loop->number ? (uint32_t)before : 0, left = end - begin - taken;
        if (!left) return;
        const size_t most = left - left / 4, wanted = most > loop->least ? most : loop->least;
        const size_t n = wanted + loop->least > left ? left : wanted;
        const uint64_t after = (uint64_t)loop->number << 32 | (taken + n);
        if (!__atomic_compare_exchange_n(word, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        loop->body(loop->data, begin + taken, n);
        before = __atomic_load_n(word, __ATOMIC_RELAXED);
    }
}

/* Takes the parts of the thread's own slice, and then what other threads have left of theirs. */
static void take_parts(const loop_t *loop, size_t thread) {
    for (size_t i = 0; i < loop->slices; i++) take_slice(loop, (thread + i) % loop->slices);
}

/* True if a worker that was in loop `last` may join the present one. */
static bool takes_workers(uint64_t state, uint32_t last) {
    return (state & OPEN) && (uint32_t)(state >> 32) != last && (state & IN_LOOP) < (state >> 16 & 0xffff);
}

/* Joins the present loop, if it takes workers. */
static bool join(uint32_t *last) {
    uint64_t state = __atomic_load_n(&pool.state, __ATOMIC_ACQUIRE);
    while (takes_workers(state, *last))
        if (__atomic_compare_exchange_n(&pool.state, &state, state + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            *last = (uint32_t)(state >> 32);
            return true;
        }
    return false;
}

static void sleep_until_called(uint32_t last) {
    const uint32_t bell = __atomic_load_n(&pool.bell, __ATOMIC_ACQUIRE);
    __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    if (!takes_workers(__atomic_load_n(&pool.state, __ATOMIC_SEQ_CST), last))
        fd_futex_wait(&pool.bell, bell, SLEEP_NS, false);
    __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_RELAXED);
}

static void *work(void *thread) {
    uint32_t last = 0;
    uint64_t since = fd_now_ns();
    for (;;) {
        if (join(&last)) {
            loop_t *loop = pool.loop;
            const uint64_t came = loop->began ? fd_now_ns() : 0;
            take_parts(loop, (size_t)thread);
            if (came) {
                __atomic_fetch_add(&loop->came, came, __ATOMIC_RELAXED);
                __atomic_fetch_add(&loop->busy_ns, fd_now_ns() - came, __ATOMIC_RELAXED);
                __atomic_fetch_add(&loop->n_came, 1, __ATOMIC_RELAXED);
            }
            __atomic_fetch_sub(&pool.state, 1, __ATOMIC_RELEASE);
            since = fd_now_ns();
            continue;
        }
        const uint64_t waited = fd_now_ns() - since;
        if (waited > AWAKE_NS) {
            sleep_until_called(last);
            since = fd_now_ns(); /* if it came too late for a loop, it is awake for the next one */
        } else if (waited > FD_YIELD_AFTER_NS) sched_yield();
        else fd_cpu_relax();
    }
    return NULL;
}

/* The child of a fork has no workers. */
static void forget_workers(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.busy, NULL);
}

static void forget_workers_at_fork(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Starts the worker whose slice is `thread`. */
static bool start_worker(size_t thread) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    sigset_t all, before;
    pthread_t id;
    pthread_once(&once, forget_workers_at_fork);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are for the threads of Python */
    const bool started = !pthread_create(&id, NULL, work, (void *)thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_detach(id);
    return started;
}

static void wake_workers(unsigned n) {
    __atomic_fetch_add(&pool.bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Adds the times of a loop of up to `workers` workers that has ended. The caller had no more parts at `caller_done`. */
static void add_times(const loop_t *loop, unsigned workers, uint64_t caller_done) {
    const uint64_t now = fd_now_ns(), ns = now - loop->began;
    const uint64_t late = loop->came - loop->n_came * loop->began + (workers - loop->n_came) * ns;
    const uint64_t busy = loop->busy_ns + caller_done - loop->began;
    fd_loop_times_t *times = &pool.times[loops_compute];
    times->loops++;
    times->ns += ns;
    times->late_ns += late;
    times->busy_ns += busy;
    times->done_ns += (workers + 1) * ns - late - busy;
}

static void run(loop_t *loop, unsigned workers) {
    while (pool.n_workers < workers && start_worker(pool.n_workers + 1)) pool.n_workers++;
    pool.loop = loop;
    loop->began = pool.timed ? fd_now_ns() : 0;
    if (!++pool.number) { /* 0 is a new worker's last loop; the others' numbers begin again */
        pool.number = 1;
        memset(pool.slices, 0, sizeof pool.slices);
    }
    loop->number = pool.number;
    const uint64_t state = (uint64_t)pool.number << 32 | (uint64_t)workers << 16 | OPEN;
    __atomic_store_n(&pool.state, state, __ATOMIC_SEQ_CST);
    const uint32_t sleepers = __atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST), awake = pool.n_workers - sleepers;
    if (sleepers && awake < workers) wake_workers(workers - awake);
    take_parts(loop, 0);
    __atomic_fetch_and(&pool.state, ~(uint64_t)OPEN, __ATOMIC_ACQ_REL);
    const uint64_t since = fd_now_ns();
    while (__atomic_load_n(&pool.state, __ATOMIC_ACQUIRE) & IN_LOOP) {
        if (fd_now_ns() - since > FD_YIELD_AFTER_NS) sched_yield();
        else fd_cpu_relax();
    }
    if (loop->began) add_times(loop, workers, since);
}

void fd_parallel(void (*body)(void *data, size_t first, size_t n), void *data, size_t parts, size_t least,
                 unsigned threads) {
    if (!least) least = parts / ((size_t)threads * 4) + 1;
    const size_t most = (parts + least - 1) / least, wanted = most < threads ? most : threads;
    const unsigned slices = wanted > MOST_WORKERS ? MOST_WORKERS + 1 : (unsigned)wanted;
    if (slices < 2 || pthread_mutex_trylock(&pool.busy)) {
        body(data, 0, parts);
        return;
    }
    loop_t loop = {.body = body, .data = data, .parts = parts, .least = least, .slices = slices};
    run(&loop, slices - 1);
    pthread_mutex_unlock(&pool.busy);
}

void fd_time_loops(bool on) {
    pthread_mutex_lock(&pool.busy);
    if (on) memset(pool.times, 0, sizeof pool.times);
    pool.timed = on;
    pthread_mutex_unlock(&pool.busy);
}

void fd_read_loop_times(fd_loop_times_t times[FD_LOOP_KINDS]) {
    pthread_mutex_lock(&pool.busy);
    memcpy(times, pool.times, sizeof pool.times);
    pthread_mutex_unlock(&pool.busy);
}
