#include "arena.h"

#include "error.h"

#define PART_BYTES ((size_t)2 << 20) /* a call that arrives while a part is faulted in waits for that part */

uint64_t fd_kvcache_bytes(fd_planes_t planes, uint32_t n_pages, bool grows, fd_huge_t huge) {
    const uint64_t plane = n_pages * planes.plane_bytes;
    if (grows) return fd_round_up(plane, fd_memory_unit(huge)) * planes.n_planes;
    return huge == FD_HUGE_HUGETLB ? fd_round_up(plane * planes.n_planes, fd_memory_unit(huge))
                                   : plane * planes.n_planes;
}

uint64_t fd_kvcache_pages_within(fd_planes_t planes, uint64_t bytes, bool grows, fd_huge_t huge) {
    uint64_t plane = bytes / planes.n_planes;
    if (grows) plane -= plane % fd_memory_unit(huge);
    else if (huge == FD_HUGE_HUGETLB) plane = (bytes - bytes % fd_memory_unit(huge)) / planes.n_planes;
    return plane / planes.plane_bytes;
}

/* Commits pages [from, to) of every plane of a lease that may grow. */
static fd_status_t commit(fd_kvcache_t *kv, uint32_t from, uint32_t to, fd_error_t *error) {
    const size_t begin = fd_round_up(from * kv->planes.plane_bytes, kv->unit),
                 bytes = fd_round_up(to * kv->planes.plane_bytes, kv->unit) - begin;
    for (uint32_t plane = 0; bytes && plane < kv->planes.n_planes; plane++) {
        uint8_t *start = kv->arena + plane * kv->plane_stride + begin;
        if (fd_memory_commit(start, bytes, kv->huge, error) == FD_OK) continue;
        while (plane--) fd_memory_decommit(kv->arena + plane * kv->plane_stride + begin, bytes);
        return FD_INTERNAL;
    }
    return FD_OK;
}

fd_status_t fd_arena_map(fd_kvcache_t *kv, fd_huge_t huge, fd_error_t *error) {
    kv->huge = huge;
    kv->granule = fd_memory_granule(huge);
    kv->unit = fd_memory_unit(huge);
    if (kv->max_pages > kv->n_pages) {
        kv->plane_stride =
            fd_round_up(kv->max_pages * kv->planes.plane_bytes, fd_max(kv->granule, FD_TRANSPARENT_BYTES));
        kv->arena_bytes = kv->plane_stride * kv->planes.n_planes;
        kv->grows = true;
        kv->arena = fd_memory_reserve(kv->arena_bytes, huge, error);
        return kv->arena ? commit(kv, 0, kv->n_pages, error) : FD_INTERNAL;
    }
    kv->plane_stride = kv->n_pages * kv->planes.plane_bytes;
    kv->arena_bytes = fd_round_up(kv->plane_stride * kv->planes.n_planes, kv->unit);
    kv->arena = fd_memory_map(kv->arena_bytes, huge, error);
    return kv->arena ? FD_OK : FD_INTERNAL;
}

fd_status_t fd_kvcache_commit(fd_kvcache_t *kv, uint32_t n_pages, fd_error_t *error) {
    return commit(kv, kv->n_pages, n_pages, error);
}

/* Number of pages in a part. */
static uint32_t part_pages(const fd_kvcache_t *kv) {
    return (uint32_t)((PART_BYTES + kv->planes.plane_bytes - 1) / kv->planes.plane_bytes);
}

uint64_t fd_kvcache_parts(const fd_kvcache_t *kv, uint32_t n_pages) {
    uint32_t n = part_pages(kv);
    return ((uint64_t)n_pages + n - 1) / n * kv->planes.n_planes;
}

uint64_t fd_kvcache_whole_parts(const fd_kvcache_t *kv, uint32_t n_pages) {
    return (uint64_t)(n_pages / part_pages(kv)) * kv->planes.n_planes;
}

int fd_kvcache_fault_in(const fd_kvcache_t *kv, uint64_t part) {
    uint32_t n_pages = __atomic_load_n(&kv->n_pages, __ATOMIC_ACQUIRE);
    uint32_t n = part_pages(kv), first = (uint32_t)(part / kv->planes.n_planes * n),
             plane = (uint32_t)(part % kv->planes.n_planes);
    return fd_memory_fault_in(fd_kv_plane(kv, plane, first), fd_min(n, n_pages - first) * kv->planes.plane_bytes);
}

/* Whether a sequence or a copy needs page `at` of all planes. */
static bool in_use(const fd_kvcache_t *kv, uint64_t at) {
    return kv->refs[at % kv->n_pages] || kv->pins[at % kv->n_pages];
}

uint64_t fd_kvcache_held_bytes(const fd_kvcache_t *kv) {
    const size_t plane_bytes = kv->planes.plane_bytes;
    uint64_t bytes = 0;
    size_t counted = 0; /* the granules of the arena's first bytes, up to this one, are counted */
    for (uint32_t plane = 0; plane < kv->planes.n_planes; plane++) {
        for (uint32_t page = 0; page < kv->n_pages; page++) {
            if (!in_use(kv, page)) continue;
            const size_t start = plane * kv->plane_stride + page * plane_bytes;
            const size_t from = fd_max(start - start % kv->granule, counted),
                         to = fd_round_up(start + plane_bytes, kv->granule);
            if (to <= from) continue;
            bytes += to - from;
            counted = to;
        }
    }
    return bytes;
}

void fd_kvcache_give_back(fd_kvcache_t *kv) {
    const uint64_t n_all = (uint64_t)kv->planes.n_planes * kv->n_pages;
    /* Free pages at the end of a plane and at the start of the next one form one run, unless the planes lie apart. */
    const uint64_t block = kv->grows ? kv->n_pages : n_all;
    for (uint64_t at = 0; at < n_all;) {
        if (in_use(kv, at)) {
            at++;
            continue;
        }
        const uint64_t first = at, begin = first - first % block, end = begin + block;
        while (at < end && !in_use(kv, at)) at++;
        uint8_t *start = kv->arena + first / block * kv->plane_stride;
        size_t from = fd_round_up((first - begin) * kv->planes.plane_bytes, kv->granule),
               to = (at - begin) * kv->planes.plane_bytes;
        if (at < end) to -= to % kv->granule;
        if (from < to) fd_memory_give_back(start + from, to - from);
    }
}
