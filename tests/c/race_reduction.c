/* Threads sum as the ranks of an S-Part (kernels/decoder/reduction.h), for sanitizers to watch (test_races.py).
 *
 * Each thread has an end of its own of one segment. All threads sum integers, of the same random sizes and dtypes, and
 * check every sum. At the end one of them leaves, and all others must get out.
 *
 * Usage: race_reduction RANKS SECONDS, or longer on a slow machine. Prints the number of sums, and of sums that the
 * ranks have shared.
 */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cpu/half.h"
#include "decoder/reduction.h"
#include "require.h"

enum { MOST_NUMBERS = 300000, SHARED_BYTES = 1 << 18, LEAST_SHARED = 20 };

/* Only the scalar kernels: test_reduction.py tests those of every ISA. */
const fd_sum_parts_t fd_sum_parts_avx2[FD_ACT_DTYPES], fd_sum_parts_avx512[FD_ACT_DTYPES],
    fd_sum_parts_neon[FD_ACT_DTYPES];

static time_t end;
static unsigned n_ranks;
static size_t n_sums, n_shared; /* of rank 0 */
static void *segment;

/* A bf16 has 8 bits, so the sums of integers up to 64 / ranks are exact. */
static float addend(size_t sum, uint32_t rank) { return (float)((sum + rank) % (64 / n_ranks)); }

static void fill(void *data, size_t n, uint32_t dtype, float x) {
    const uint16_t half = dtype == FD_ACT_FP16 ? fd_fp32_to_fp16(x) : fd_fp32_to_bf16(x);
    for (size_t i = 0; i < n; i++)
        if (dtype == FD_ACT_FP32) ((float *)data)[i] = x;
        else ((uint16_t *)data)[i] = half;
}

static void *sum(void *data) {
    const uint32_t rank = (uint32_t)(size_t)data;
    fd_reduction_t r;
    unsigned state = 1; /* the same sizes on all ranks */
    float *x = malloc(MOST_NUMBERS * sizeof *x), *want = malloc(MOST_NUMBERS * sizeof *want);
    REQUIRE(x && want);
    fd_reduction_open(&r, segment, rank, n_ranks, 100000000000u, FD_ISA_SCALAR);
    for (size_t i = 0;; i++) {
        const uint32_t dtype = (uint32_t)(i % FD_ACT_DTYPES);
        const size_t n = (size_t)rand_r(&state) % (i % 8 ? 3000 : MOST_NUMBERS), bytes = n * fd_act_bytes(dtype);
        float total = 0;
        for (uint32_t k = 0; k < n_ranks; k++) total += addend(i, k);
        fill(x, n, dtype, addend(i, rank));
        fill(want, n, dtype, total);
        if (rank == 0 && time(NULL) >= end && n_shared > LEAST_SHARED) fd_reduction_leave(&r);
        if (fd_reduction_sum(&r, x, n, dtype, 1 + rank % 2) != FD_OK) break;
        REQUIRE(!memcmp(x, want, bytes));
        if (rank == 0) n_sums++, n_shared += bytes * (n_ranks - 2) > SHARED_BYTES;
    }
    char text[100], want_text[100];
    snprintf(want_text, sizeof want_text, "rank 0 (pid %d) has left the reduction", getpid());
    REQUIRE(fd_reduction_error(&r, text, sizeof text) && !strcmp(text, want_text));
    free(x);
    free(want);
    return NULL;
}

int main(int argc, char **argv) {
    REQUIRE(argc == 3);
    n_ranks = (unsigned)atoi(argv[1]);
    end = time(NULL) + atoi(argv[2]);
    const size_t bytes = fd_reduction_segment_bytes(n_ranks);
    segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(segment != MAP_FAILED);
    pthread_t ranks[FD_MOST_RANKS];
    for (size_t i = 0; i < n_ranks; i++) REQUIRE(!pthread_create(&ranks[i], NULL, sum, (void *)i));
    for (size_t i = 0; i < n_ranks; i++) pthread_join(ranks[i], NULL);
    printf("%zu sums, %zu shared\n", n_sums, n_shared);
    return 0;
}
