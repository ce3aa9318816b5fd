/* A simulated device: replays a fixed list of commands, as a captured CUDA graph would
 * (tests/transports/test_device.py).
 *
 * It knows nothing of the host: it copies rows, writes words and waits until words are great enough.
 */
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { COPY, WRITE, WAIT };

typedef struct {
    uint64_t kind, value; /* of WRITE and WAIT: the word's */
    void *to;             /* COPY: where to; WRITE, WAIT: the word */
    const void *from;
    uint64_t bytes;
} command_t;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Returns `n`, or the index of a gate that has not opened within `timeout_ns`. */
uint64_t device_replay(const command_t *commands, uint64_t n, uint64_t timeout_ns) {
    for (uint64_t i = 0; i < n; i++) {
        const command_t *c = &commands[i];
        if (c->kind == COPY) {
            memcpy(c->to, c->from, c->bytes);
        } else if (c->kind == WRITE) {
            __atomic_store_n((uint32_t *)c->to, (uint32_t)c->value, __ATOMIC_RELEASE);
        } else {
            const uint64_t start = now_ns();
            while (__atomic_load_n((uint32_t *)c->to, __ATOMIC_ACQUIRE) < c->value) {
                if (now_ns() - start > timeout_ns) return i;
                sched_yield();
            }
        }
    }
    return n;
}
