/* Memory: the device's own, and the host's that is mapped into it. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_BLOCKS = 4096, PAGE = 4096 };
enum { PORTABLE = 1, DEVICE_MAP = 2, IO_MEMORY = 4, READ_ONLY = 8 }; /* of cuMemHostRegister */
#define SPACE ((size_t)1 << 38)                                      /* addresses of the device */

/* A stretch of the device's addresses, never used again after its end. */
typedef struct {
    uint8_t *device, *host; /* host: NULL for the device's own memory */
    size_t bytes;
    bool read_only, mapped, by_driver; /* by_driver: the host's memory was allocated by the driver */
} block_t;

size_t sim_memory_limit = (size_t)24 << 30;

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static block_t blocks[MAX_BLOCKS];
static size_t n_blocks, used;
static unsigned n_ended; /* blocks that have ended */
static uint8_t *space, *next;

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Addresses of the device for whole pages, followed by a page that nothing may touch. The caller has the lock. */
static uint8_t *take_addresses(size_t bytes) {
    if (!space) {
        space = mmap(NULL, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space == MAP_FAILED) abort();
        next = space;
    }
    if (n_blocks == MAX_BLOCKS || (size_t)(space + SPACE - next) < bytes + PAGE) abort(); /* a test's own limit */
    uint8_t *at = next;
    next += whole_pages(bytes) + PAGE;
    return at;
}

/* True if all bytes are in one block's range: the device's, or the host's if `host`. */
static const block_t *find(const void *pointer, size_t bytes, bool host) {
    const uint8_t *p = pointer;
    for (size_t i = 0; i < n_blocks; i++) {
        const uint8_t *start = host ? blocks[i].host : blocks[i].device;
        if (start && p >= start && p < start + blocks[i].bytes)
            return bytes <= (size_t)(start + blocks[i].bytes - p) ? &blocks[i] : NULL;
    }
    return NULL;
}

/* Kernels ask for every access, mostly to blocks that their thread has met before: it keeps the last few that are good
 * to read, for as long as no block ends. */
enum { MET = 4 };
static _Thread_local struct {
    const uint8_t *start, *end;
    unsigned ended;
    bool read_only;
} met[MET];
static _Thread_local unsigned n_met;

bool sim_is_device(const void *pointer, size_t bytes, bool write) {
    const uint8_t *p = pointer;
    const unsigned now = __atomic_load_n(&n_ended, __ATOMIC_ACQUIRE);
    for (int i = 0; i < MET; i++)
        if (p >= met[i].start && p < met[i].end && bytes <= (size_t)(met[i].end - p) && met[i].ended == now)
            return !(write && met[i].read_only);
    pthread_rwlock_rdlock(&lock);
    const block_t *b = find(pointer, bytes, false);
    const bool good = b && b->mapped;
    const bool refused = good && write && b->read_only;
    if (good) {
        const unsigned i = n_met++ % MET;
        met[i].start = b->device, met[i].end = b->device + b->bytes;
        met[i].ended = n_ended, met[i].read_only = b->read_only;
    }
    pthread_rwlock_unlock(&lock);
    return good && !refused;
}

bool sim_is_pinned(const void *pointer, size_t bytes) {
    pthread_rwlock_rdlock(&lock);
    const bool good = find(pointer, bytes, true);
    pthread_rwlock_unlock(&lock);
    return good;
}

static void drop(block_t *b) {
    const size_t before = (size_t)b->device % PAGE;
    mmap(b->device - before, whole_pages(before + b->bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (b->by_driver) munmap(b->host, whole_pages(b->bytes));
    if (!b->host) used -= b->bytes;
    *b = blocks[--n_blocks];
    __atomic_add_fetch(&n_ended, 1, __ATOMIC_RELEASE);
}

void sim_release_memory(void) {
    pthread_rwlock_wrlock(&lock);
    while (n_blocks) drop(&blocks[n_blocks - 1]);
    sim_memory_limit = (size_t)24 << 30;
    pthread_rwlock_unlock(&lock);
}

void sim_count_memory(sim_counts_t *counts) {
    pthread_rwlock_rdlock(&lock);
    for (size_t i = 0; i < n_blocks; i++) {
        if (!blocks[i].host) counts->allocated++;
        else if (blocks[i].by_driver) counts->pinned++;
        else counts->registered++;
    }
    pthread_rwlock_unlock(&lock);
}

/* Ends the block that starts at `pointer`, once nothing is queued any more. */
static int end_block(const void *pointer, bool host, bool by_driver, int code, const char *what) {
    sim_wait_for_all();
    pthread_rwlock_wrlock(&lock);
    block_t *b = (block_t *)find(pointer, 1, host);
    const bool good = b && (host ? b->host : b->device) == pointer && b->by_driver == by_driver && !b->host == !host;
    if (good) drop(b);
    pthread_rwlock_unlock(&lock);
    return good ? DONE : sim_fail(code, "%p is not the start of memory that was %s", pointer, what);
}

/* ---- the host's memory ---- */

/* Maps the pages of the host's memory a second time, at `device`. Returns false if that cannot be done. */
static bool alias(uint8_t *device, uint8_t *host, size_t bytes) {
    if (mremap(host, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, device) != MAP_FAILED) return true;
    if (errno != EINVAL) return false;
    /* Private memory has one place only: it becomes shared memory with the same contents. */
    const int fd = memfd_create("simulated-pinned", MFD_CLOEXEC);
    bool good = fd >= 0 && !ftruncate(fd, (off_t)bytes) && write(fd, host, bytes) == (ssize_t)bytes;
    good = good && mmap(host, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
    good = good && mmap(device, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
    if (fd >= 0) close(fd);
    return good;
}

API int cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
    ENTER(true);
    uint8_t *p = pointer, residency[1];
    if (!p || !bytes || flags & ~(PORTABLE | DEVICE_MAP | IO_MEMORY | READ_ONLY))
        return sim_fail(INVALID_VALUE, "cuMemHostRegister(%p, %zu, %u)", pointer, bytes, flags);
    if ((size_t)p % PAGE) return sim_fail(INVALID_VALUE, "the simulation registers memory that starts at a page");
    for (size_t at = 0; at < bytes; at += PAGE)
        if (mincore(p + at, 1, residency)) return sim_fail(INVALID_VALUE, "%p is not mapped", (void *)(p + at));
    pthread_rwlock_wrlock(&lock);
    for (size_t i = 0; i < n_blocks; i++)
        if (blocks[i].host && p < blocks[i].host + blocks[i].bytes && blocks[i].host < p + bytes) {
            pthread_rwlock_unlock(&lock);
            return sim_fail(ALREADY_REGISTERED, "%p is registered", pointer);
        }
    uint8_t *device = take_addresses(bytes);
    const bool good = alias(device, p, whole_pages(bytes));
    if (good) blocks[n_blocks++] = (block_t){device, p, bytes, flags & READ_ONLY, flags & DEVICE_MAP, false};
    pthread_rwlock_unlock(&lock);
    return good ? DONE : sim_fail(INVALID_VALUE, "%p cannot be mapped", pointer);
}

API int cuMemHostUnregister(void *pointer) {
    ENTER(true);
    return end_block(pointer, true, false, NOT_REGISTERED, "registered");
}

API int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    ENTER(true);
    (void)flags;
    if (!bytes) return sim_fail(INVALID_VALUE, "cuMemHostAlloc of no bytes");
    uint8_t *host = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED) return OUT_OF_MEMORY;
    memset(host, POISON_BYTE, bytes);
    pthread_rwlock_wrlock(&lock);
    uint8_t *device = take_addresses(bytes);
    if (!alias(device, host, whole_pages(bytes))) abort();
    blocks[n_blocks++] = (block_t){device, host, bytes, false, true, true};
    pthread_rwlock_unlock(&lock);
    *pointer = host;
    return DONE;
}

API int cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

API int cuMemFreeHost(void *pointer) {
    ENTER(true);
    return end_block(pointer, true, true, INVALID_VALUE, "allocated by cuMemHostAlloc");
}

API int cuMemHostGetDevicePointer_v2(device_ptr_t *device, void *pointer, unsigned flags) {
    ENTER(false);
    pthread_rwlock_rdlock(&lock);
    const block_t *b = flags ? NULL : find(pointer, 1, true);
    const bool good = b && b->mapped;
    if (good) *device = (device_ptr_t)(uintptr_t)(b->device + ((uint8_t *)pointer - b->host));
    pthread_rwlock_unlock(&lock);
    return good ? DONE : sim_fail(INVALID_VALUE, "%p was not registered with DEVICEMAP", pointer);
}

/* ---- the device's memory ---- */

API int cuMemAlloc_v2(device_ptr_t *pointer, size_t bytes) {
    ENTER(true);
    if (!bytes) return sim_fail(INVALID_VALUE, "cuMemAlloc of no bytes");
    pthread_rwlock_wrlock(&lock);
    if (bytes > sim_memory_limit - used) {
        pthread_rwlock_unlock(&lock);
        return sim_fail(OUT_OF_MEMORY, "%zu bytes, %zu are free", bytes, sim_memory_limit - used);
    }
    uint8_t *at = take_addresses(bytes);
    if (mmap(at, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        abort();
    blocks[n_blocks++] = (block_t){at, NULL, bytes, false, true, false};
    used += bytes;
    pthread_rwlock_unlock(&lock);
    memset(at, POISON_BYTE, bytes);
    *pointer = (device_ptr_t)(uintptr_t)at;
    return DONE;
}

API int cuMemFree_v2(device_ptr_t pointer) {
    ENTER(true);
    return end_block((void *)(uintptr_t)pointer, false, false, INVALID_VALUE, "allocated by cuMemAlloc");
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(false);
    pthread_rwlock_rdlock(&lock);
    *free_bytes = sim_memory_limit - used;
    *total = sim_memory_limit;
    pthread_rwlock_unlock(&lock);
    return DONE;
}
