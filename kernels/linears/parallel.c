#include "parallel.h"

#include <dlfcn.h>

/* GOMP_parallel. */
typedef void parallel_fn(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn *find_parallel(void) {
    static parallel_fn *found;
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) { /* threads that race here find the same */
        *(void **)&found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    return found;
}

typedef struct {
    void (*body)(void *data, size_t first, size_t n);
    void *data;
    size_t parts, step, next; /* a thread takes `step` of `parts` at a time; `next` is the first that is free */
} loop_t;

static void take_parts(void *data) {
    loop_t *loop = data;
    for (;;) {
        const size_t first = __atomic_fetch_add(&loop->next, loop->step, __ATOMIC_RELAXED);
        if (first >= loop->parts) return;
        const size_t rest = loop->parts - first;
        loop->body(loop->data, first, rest < loop->step ? rest : loop->step);
    }
}

void fd_parallel(void (*body)(void *data, size_t first, size_t n), void *data, size_t parts, unsigned threads) {
    parallel_fn *parallel = threads > 1 ? find_parallel() : NULL;
    if (!parallel) {
        body(data, 0, parts);
        return;
    }
    loop_t loop = {body, data, parts, parts / (threads * 4) + 1, 0};
    parallel(take_parts, &loop, threads, 0);
}
