/* The common part of the fuzzers. The bytes of an input choose the actions of a hostile peer, from its arrival to its
 * departure.
 *
 * A fuzzer defines fuzz_one, which runs one input, and fuzz_end, which makes the final checks. There are two drivers:
 * libFuzzer, which searches for inputs that reach new code (clang -fsanitize=fuzzer -DFD_LIBFUZZER), and the `main`
 * below with pseudo-random inputs, for compilers without libFuzzer. PROGRAM [inputs [first seed [seconds]]] runs at
 * least that many inputs, for at least that many seconds. tests/c/test_fuzz.py builds and runs them.
 */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "region/region.h"
#include "require.h"

static void fuzz_one(const uint8_t *data, size_t size);
static void fuzz_end(void);

typedef struct {
    const uint8_t *at, *end;
} input_t;

static inline uint32_t take(input_t *in, uint32_t bytes) {
    uint32_t x = 0;
    while (bytes-- && in->at < in->end) x = x << 8 | *in->at++;
    return x;
}

/* A number from the input that is often 0, `bound`, another edge, or close to one. */
static inline uint32_t edgy(input_t *in, uint32_t bound) {
    uint32_t x = take(in, 1);
    const uint32_t edges[] = {0,   1,   bound - 1, bound,      bound + 1,       127,
                              128, 129, 1u << 31,  UINT32_MAX, UINT32_MAX - 63, bound / 2};
    if (x < 64) return edges[x % 12];
    return x < 72 ? take(in, 4) : bound ? take(in, 2) % bound : 0;
}

/* A zeroed region whose header says that it has geometry `g`; the caller frees it. */
static inline void *new_region(const fd_geometry_t *g) {
    size_t bytes = fd_region_layout(g).region_bytes;
    fd_region_header_t *region = aligned_alloc(FD_REGION_PAGE, bytes);
    REQUIRE(region);
    memset(region, 0, bytes);
    *region = (fd_region_header_t){.magic = FD_REGION_MAGIC, .version = FD_PROTOCOL_VERSION, .geometry = *g};
    return region;
}

#ifdef FD_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int registered;
    if (!registered) registered = !atexit(fuzz_end);
    fuzz_one(data, size);
    return 0;
}
#else
int main(int argc, char **argv) {
    uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 10) : 100, seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    time_t end = time(NULL) + (argc > 3 ? atoi(argv[3]) : 0);
    for (uint64_t i = 0; i < inputs || time(NULL) < end; i++) {
        static uint8_t data[4096];
        uint64_t x = (seed + i) * 0x9e3779b97f4a7c15u;
        for (size_t k = 0; k < sizeof data; k++) { /* xorshift64 */
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            data[k] = (uint8_t)(x >> 32);
        }
        fuzz_one(data, 512 + x % (sizeof data - 512));
    }
    fuzz_end();
    return 0;
}
#endif
