#define _GNU_SOURCE
#include "roofline.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "doorbell.h"

enum { LINE = 64, STREAMS = 4, LINES_AHEAD = 32 };

typedef long long fd_line_t __attribute__((vector_size(LINE), aligned(LINE)));

/* Reads STREAMS streams, far apart, so that hardware prefetchers work on several pages at once. The read_* functions
 * inline this with the widest load of their ISA. */
static inline __attribute__((always_inline)) long long read_lines(const fd_line_t *lines, size_t n, uint32_t passes) {
    const size_t stride = n / STREAMS;
    fd_line_t sum[STREAMS] = {0};
    for (uint32_t pass = 0; pass < passes; pass++) {
        for (size_t i = 0; i < stride; i++)
            for (int s = 0; s < STREAMS; s++) {
                __builtin_prefetch(&lines[s * stride + i + LINES_AHEAD]);
                sum[s] ^= lines[s * stride + i];
            }
        for (size_t i = stride * STREAMS; i < n; i++) sum[0] ^= lines[i];
        __asm__ __volatile__("" : : : "memory"); /* forces the next pass to read again */
    }
    for (int s = 1; s < STREAMS; s++) sum[0] ^= sum[s];
    long long all = 0;
    for (size_t i = 0; i < LINE / sizeof all; i++) all ^= sum[0][i];
    return all;
}

typedef long long (*read_fn)(const fd_line_t *lines, size_t n, uint32_t passes);

static long long read_scalar(const fd_line_t *lines, size_t n, uint32_t passes) { return read_lines(lines, n, passes); }

#if FD_X86
__attribute__((target("avx2"))) static long long read_avx2(const fd_line_t *lines, size_t n, uint32_t passes) {
    return read_lines(lines, n, passes);
}

__attribute__((target("avx512f"))) static long long read_avx512(const fd_line_t *lines, size_t n, uint32_t passes) {
    return read_lines(lines, n, passes);
}
#endif

static read_fn widest_read(void) {
#if FD_X86
    if (fd_isa_supported(FD_ISA_AVX512)) return read_avx512;
    if (fd_isa_supported(FD_ISA_AVX2)) return read_avx2;
#endif
    return read_scalar;
}

typedef struct {
    pthread_t thread;
    const fd_line_t *lines;
    size_t n;
    uint32_t passes;
    uint32_t *ready; /* threads that have not started; all begin to read when this is 0 */
    uint64_t start_ns, end_ns;
    long long sum; /* keeps the reads from being optimised away */
} reader_t;

static void *reader_main(void *arg) {
    reader_t *r = arg;
    read_fn read = widest_read();
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

double fd_read_seconds(const void *buffer, size_t bytes, const int *cpus, uint32_t n_threads, uint32_t passes) {
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
        readers[started] =
            (reader_t){.lines = (const fd_line_t *)buffer + first, .n = end - first, .passes = passes, .ready = &ready};
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

#if FD_X86
/* Uses 16 sums, so that no instruction waits for the one before it on the same sum. */
#define FD_RATE(instruction)                                                                                           \
    __attribute__((target("avx512f"))) static double rate_##instruction(uint64_t rounds) {                             \
        const uint64_t start = fd_now_ns();                                                                            \
        for (uint64_t i = 0; i < rounds; i++)                                                                          \
            __asm__ volatile(FD_4(instruction, "0", "1", "2", "3") FD_4(instruction, "4", "5", "6", "7")               \
                                 FD_4(instruction, "8", "9", "10", "11") FD_4(instruction, "12", "13", "14", "15")::   \
                                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16");                 \
        return 16.0 * rounds / (fd_now_ns() - start) * 1e9;                                                            \
    }
#define FD_1(instruction, sum) #instruction " %%zmm16, %%zmm16, %%zmm" sum "\n"
#define FD_4(instruction, a, b, c, d)                                                                                  \
    FD_1(instruction, a) FD_1(instruction, b) FD_1(instruction, c) FD_1(instruction, d)
FD_RATE(vfmadd231ps)
FD_RATE(vdpbf16ps)
FD_RATE(vpdpbusd)
#endif

double fd_multiply_rate(const char *instruction, uint64_t rounds) {
#if FD_X86
    if (!strcmp(instruction, "vfmadd231ps") && fd_isa_supported(FD_ISA_AVX512)) return rate_vfmadd231ps(rounds);
    if (!strcmp(instruction, "vdpbf16ps") && fd_isa_supported(FD_ISA_AVX512BF16)) return rate_vdpbf16ps(rounds);
    if (!strcmp(instruction, "vpdpbusd") && fd_isa_supported(FD_ISA_AVX512VNNI)) return rate_vpdpbusd(rounds);
#endif
    return -1;
}
