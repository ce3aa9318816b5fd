/* A library to preload into a process: it counts how often R-engine threads, whose names begin with fd-r, call the
 * allocator and lock a mutex. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static unsigned long allocations, locks;
static int (*real_lock)(pthread_mutex_t *);

static void count(unsigned long *counter) {
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    if (!strncmp(name, "fd-r", 4)) __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST);
}

unsigned long fd_count_allocations(void) { return __atomic_load_n(&allocations, __ATOMIC_SEQ_CST); }
unsigned long fd_count_locks(void) { return __atomic_load_n(&locks, __ATOMIC_SEQ_CST); }

void *malloc(size_t n) { return count(&allocations), __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return count(&allocations), __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return count(&allocations), __libc_realloc(p, n); }
void *aligned_alloc(size_t alignment, size_t n) { return count(&allocations), __libc_memalign(alignment, n); }
void free(void *p) { count(&allocations), __libc_free(p); }

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    if (!real_lock) *(void **)&real_lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    count(&locks);
    return real_lock(mutex);
}
