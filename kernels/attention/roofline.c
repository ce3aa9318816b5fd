#define _GNU_SOURCE
#include "roofline.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "region/doorbell.h"

#if FD_X86
#include <cpuid.h>
#endif

enum { LINE = 64 };

typedef long long fd_line_t __attribute__((vector_size(LINE), aligned(LINE)));

/* Reads `streams` streams, far apart, so that hardware prefetchers work on several pages at once, and prefetches each
 * of them `ahead` lines further on, into L1 or (from FAR lines on) into L2. The read_* functions inline this with the
 * widest load of their ISA. */
enum { MAX_STREAMS = 4, FAR = 512 };
static inline __attribute__((always_inline)) long long read_lines(const fd_line_t *lines, size_t n, uint32_t passes,
                                                                  const int streams, const int ahead) {
    const size_t stride = n / streams;
    fd_line_t sum[MAX_STREAMS] = {0};
    for (uint32_t pass = 0; pass < passes; pass++) {
        for (size_t i = 0; i < stride; i++)
            for (int s = 0; s < streams; s++) {
                if (ahead >= FAR) __builtin_prefetch(&lines[s * stride + i + ahead], 0, 2);
                else if (ahead) __builtin_prefetch(&lines[s * stride + i + ahead]);
                sum[s] ^= lines[s * stride + i];
            }
        for (size_t i = stride * streams; i < n; i++) sum[0] ^= lines[i];
        __asm__ __volatile__("" : : : "memory"); /* forces the next pass to read again */
    }
    for (int s = 1; s < streams; s++) sum[0] ^= sum[s];
    long long all = 0;
    for (size_t i = 0; i < LINE / sizeof all; i++) all ^= sum[0][i];
    return all;
}

typedef long long (*read_fn)(const fd_line_t *lines, size_t n, uint32_t passes);

/* The variants: X(streams, lines ahead). */
#define FD_VARIANTS(X) X(1, 0) X(1, 16) X(1, 32) X(1, 512) X(2, 0) X(2, 16) X(2, 32) X(2, 512) X(4, 0) X(4, 16) X(4, 32)
#define FD_READ(streams, ahead)                                                                                        \
    FD_TARGET static long long FD_READ_NAME(streams, ahead)(const fd_line_t *lines, size_t n, uint32_t passes) {       \
        return read_lines(lines, n, passes, streams, ahead);                                                           \
    }
#define FD_TABLE(streams, ahead) FD_READ_NAME(streams, ahead),
#define FD_TARGET
#define FD_READ_NAME(streams, ahead) read_scalar_##streams##_##ahead
FD_VARIANTS(FD_READ)
static const read_fn scalar_reads[] = {FD_VARIANTS(FD_TABLE)};
#undef FD_TARGET
#undef FD_READ_NAME

#if FD_X86
#define FD_TARGET __attribute__((target("avx2")))
#define FD_READ_NAME(streams, ahead) read_avx2_##streams##_##ahead
FD_VARIANTS(FD_READ)
static const read_fn avx2_reads[] = {FD_VARIANTS(FD_TABLE)};
#undef FD_TARGET
#undef FD_READ_NAME

#define FD_TARGET __attribute__((target("avx512f")))
#define FD_READ_NAME(streams, ahead) read_avx512_##streams##_##ahead
FD_VARIANTS(FD_READ)
static const read_fn avx512_reads[] = {FD_VARIANTS(FD_TABLE)};
#endif

static const read_fn *widest_reads(void) {
#if FD_X86
    if (fd_isa_supported(FD_ISA_AVX512)) return avx512_reads;
    if (fd_isa_supported(FD_ISA_AVX2)) return avx2_reads;
#endif
    return scalar_reads;
}

const char *fd_read_variant(uint32_t variant) {
#define FD_NAME(streams, ahead) "streams " #streams ", lines ahead " #ahead,
    static const char *const names[] = {FD_VARIANTS(FD_NAME)};
    return variant < sizeof names / sizeof *names ? names[variant] : NULL;
}

typedef struct {
    pthread_t thread;
    const fd_line_t *lines;
    size_t n;
    uint32_t passes, variant;
    bool cold;
    uint32_t *ready; /* threads that have not started; all begin to read when this is 0 */
    uint64_t start_ns, end_ns;
    long long sum; /* keeps the reads from being optimised away */
} reader_t;

/* Takes lines out of all caches, on x86 and 64-bit Arm. clflush waits for each line, clflushopt does not. */
#if FD_X86
static bool has_clflushopt(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ebx & bit_CLFLUSHOPT;
}
__attribute__((target("clflushopt"))) static void evict_together(const fd_line_t *lines, size_t n) {
    for (size_t i = 0; i < n; i++) __builtin_ia32_clflushopt(&lines[i]);
}
#endif
static void evict(const fd_line_t *lines, size_t n) {
#if FD_X86
    if (has_clflushopt()) evict_together(lines, n);
    else
        for (size_t i = 0; i < n; i++) __builtin_ia32_clflush(&lines[i]);
#elif FD_ARM64
    for (size_t i = 0; i < n; i++) __asm__ __volatile__("dc civac, %0" : : "r"(&lines[i]) : "memory");
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void *reader_main(void *arg) {
    reader_t *r = arg;
    const read_fn read = widest_reads()[r->variant];
    if (r->cold) evict(r->lines, r->n);
    __atomic_sub_fetch(r->ready, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(r->ready, __ATOMIC_ACQUIRE)) sched_yield();
    r->start_ns = fd_now_ns();
    r->sum = read(r->lines, r->n, r->passes);
    r->end_ns = fd_now_ns();
    return NULL;
}

static int start(reader_t *r, int cpu) {
    pthread_attr_t attr;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_attr_init(&attr);
    pthread_attr_setaffinity_np(&attr, sizeof set, &set);
    int rc = pthread_create(&r->thread, &attr, reader_main, r);
    pthread_attr_destroy(&attr);
    return rc;
}

double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes,
                       uint32_t variant, bool cold) {
    reader_t *readers = calloc(n_threads, sizeof *readers);
    if (!readers) return -1;
    const size_t lines = bytes / LINE;
    uint32_t ready = n_threads, started = 0;
    sigset_t all, before; /* reader threads take no signals of the process */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (; started < n_threads && !rc; started += !rc) {
        const size_t first = lines * started / n_threads, end = lines * (started + 1) / n_threads;
        readers[started] = (reader_t){.lines = (const fd_line_t *)buffer + first,
                                      .n = end - first,
                                      .passes = passes,
                                      .variant = variant,
                                      .cold = cold,
                                      .ready = &ready};
        rc = start(&readers[started], cpus[started]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    __atomic_sub_fetch(&ready, n_threads - started,
                       __ATOMIC_ACQ_REL); /* releases the started threads if one failed to start */
    uint64_t first = UINT64_MAX, last = 0;
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(readers[i].thread, NULL);
        if (readers[i].start_ns < first) first = readers[i].start_ns;
        if (readers[i].end_ns > last) last = readers[i].end_ns;
    }
    free(readers);
    errno = rc;
    return rc ? -1 : (double)(last - first) * 1e-9;
}
