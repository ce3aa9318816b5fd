/* Links of the R-engine: adding them, removing them, and the control operations on them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "slots.h"
#include "cache/arena.h"
#include "cache/error.h"
#include "turns.h"

enum { FIRST_NS_PER_COST = 50 }; /* until calls have been measured */

fd_planes_t fd_page_planes(const fd_geometry_t *g, const fd_layer_t *layers, uint32_t kv_dtype) {
    fd_stored_t stored[FD_MAX_LAYERS];
    fd_store_t stores[FD_MAX_LAYERS];
    return fd_planes_of(stored, fd_stored_layers(g, layers, stored), (fd_kv_dtype_t)kv_dtype, stores);
}

static uint32_t count_kinds(const fd_layer_t *layers, uint32_t n_layers) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_layers; i++) {
        uint32_t j = 0;
        while (j < i && !fd_same_kind(&layers[j], &layers[i])) j++;
        n += j == i;
    }
    return n;
}

fd_status_t fd_layers_check(const fd_geometry_t *g, const fd_layer_t *layers, uint32_t kv_dtype, fd_error_t *error) {
    const char *reason;
    if (g->v_in_k && kv_dtype == FD_KV_INT8_INT4)
        return FD_FAIL(FD_BAD_CALL, "V of this model is a part of K, so int8-int4 cannot store it in int4: use int8 or "
                                    "int4");
    for (uint32_t i = 0; i < g->n_layers; i++)
        if ((reason = fd_layer_error(layers, i, g))) return FD_FAIL(FD_BAD_CALL, "layer %u: %s", i, reason);
    const uint32_t n = count_kinds(layers, g->n_layers);
    if (n <= FD_MAX_LAYER_KINDS) return FD_OK;
    return FD_FAIL(FD_BAD_CALL, "the layers are of %u kinds, at most %u are supported", n, FD_MAX_LAYER_KINDS);
}

static uint32_t max_pages(const fd_lease_t *lease) { return fd_max(lease->max_pages, lease->n_pages); }

static fd_status_t check_part(const fd_geometry_t *g, const fd_lease_t *lease, fd_error_t *error) {
    if (lease->part.n > FD_MAX_PARTS || lease->part.index >= lease->part.n)
        return FD_FAIL(FD_BAD_CALL, "part %u of %u is not one of at most %u", lease->part.index, lease->part.n,
                       FD_MAX_PARTS);
    for (uint32_t i = 0; i < g->n_layers; i++) {
        const fd_layer_t *y = &lease->layers[i];
        const size_t o = (size_t)y->heads.n_q_heads * y->heads.v_size * fd_act_bytes(g->act_dtype);
        if (fd_layer_reach(y) || y->slopes || y->sinks || y->selection)
            return FD_FAIL(FD_BAD_CALL,
                           "layer %u has a window, ALiBi, sinks or an indexer, and parts of the tokens cannot", i);
        if (o + y->heads.n_q_heads * sizeof(float) > fd_region_layout(g).o_row_bytes)
            return FD_FAIL(FD_BAD_CALL, "layer %u leaves no room for log-sum-exps in the O rows", i);
    }
    return FD_OK;
}

static fd_status_t check_lease(const fd_geometry_t *g, const fd_lease_t *lease, const void *region, fd_error_t *error) {
    const char *reason = fd_geometry_error(g);
    if (reason) return FD_FAIL(FD_BAD_CALL, "%s", reason);
    if (lease->kv_dtype >= FD_KV_DTYPES) return FD_FAIL(FD_BAD_CALL, "unknown KV-cache dtype %u", lease->kv_dtype);
    if (lease->n_pages < 1 || lease->n_pages > FD_MAX_PAGES)
        return FD_FAIL(FD_BAD_CALL, "%u pages are not within 1..%u", lease->n_pages, FD_MAX_PAGES);
    if (max_pages(lease) > FD_MAX_PAGES)
        return FD_FAIL(FD_BAD_CALL, "at most %u pages are not within 1..%u", lease->max_pages, FD_MAX_PAGES);
    if (lease->max_seqs < 1 || lease->max_seqs > FD_MAX_SEQS)
        return FD_FAIL(FD_BAD_CALL, "%u sequences are not within 1..%u", lease->max_seqs, FD_MAX_SEQS);
    if (!isfinite(lease->softmax_scale)) return FD_FAIL(FD_BAD_CALL, "the softmax scale is not finite");
    if (lease->gpu_kernels && g->max_rows > FD_GPU_MAX_ROWS)
        return FD_FAIL(FD_BAD_CALL, "%u rows of a call are more than the %u that a GPU takes", g->max_rows,
                       FD_GPU_MAX_ROWS);
    if ((uintptr_t)region % FD_LINE) return FD_FAIL(FD_BAD_CALL, "the region does not begin on a cache line");
    if (fd_layers_check(g, lease->layers, lease->kv_dtype, error) != FD_OK) return error->status;
    return fd_is_part(lease->part) ? check_part(g, lease, error) : FD_OK;
}

/* Frees what the engine needs to serve the link's calls. Also frees it of a half-built link. */
static void destroy_calls(fd_link_t *link) {
    for (uint32_t i = 0; link->slots && i < link->work.g.n_slots; i++) fd_step_destroy(&link->slots[i].step);
    free(link->slots);
    link->slots = NULL;
    fd_gpu_work_free(link->gpu);
    link->gpu = NULL;
    fd_work_destroy(&link->work);
    if (link->eventfd >= 0) {
        /* close alone would leave the eventfd in the epoll set if the peer holds a duplicate of the descriptor. */
        epoll_ctl(link->engine->epoll, EPOLL_CTL_DEL, link->eventfd, NULL);
        close(link->eventfd);
        link->eventfd = -1;
    }
}

/* Takes the memory of a cache in the GPU, for all pages that the lease may grow to. The cache's functions touch no page
 * of it. */
static fd_status_t take_gpu_arena(fd_link_t *link, fd_error_t *error) {
    fd_device_ptr_t at = 0;
    fd_kvcache_t *kv = &link->kv;
    kv->plane_stride = kv->max_pages * kv->planes.plane_bytes;
    const size_t bytes = kv->plane_stride * kv->planes.n_planes;
    fd_cuda_use(link->engine->cuda);
    if (FD_CUDA(link->engine->cuda, MemAlloc, &at, bytes) != FD_OK)
        return FD_FAIL(FD_OUT_OF_PAGES, "the GPU has no %zu bytes of memory for %u pages", bytes, kv->max_pages);
    kv->arena = (uint8_t *)at;
    return FD_OK;
}

static void free_gpu_arena(fd_link_t *link) {
    if (!link->engine->cuda || !link->kv.arena) return;
    fd_cuda_use(link->engine->cuda);
    link->engine->cuda->MemFree((fd_device_ptr_t)link->kv.arena);
    link->kv.arena = NULL;
}

static fd_status_t init_cache(fd_link_t *link, const fd_stored_t *stored, uint32_t n_stored, const fd_lease_t *lease,
                              fd_error_t *error) {
    if (fd_kvcache_init(&link->kv, stored, n_stored, lease->kv_dtype, lease->n_pages, max_pages(lease), lease->max_seqs,
                        error) != FD_OK)
        return error->status;
    return link->engine->cuda ? take_gpu_arena(link, error) : fd_arena_map(&link->kv, link->engine->huge, error);
}

/* Frees everything that the link owns except its share of the budget. Also frees a half-built link. */
static void destroy(fd_link_t *link) {
    destroy_calls(link);
    free_gpu_arena(link);
    fd_kvcache_destroy(&link->kv);
    pthread_mutex_destroy(&link->mutex);
    free(link);
}

static fd_link_t *build(fd_engine_t *e, void *region, const fd_geometry_t *g, const fd_lease_t *lease,
                        fd_error_t *error) {
    fd_stored_t stored[FD_MAX_LAYERS];
    const uint32_t n_stored = fd_stored_layers(g, lease->layers, stored);
    fd_link_t *link = calloc(1, sizeof *link);
    if (!link) return FD_FAIL(FD_INTERNAL, "no memory for a link"), NULL;
    link->engine = e;
    link->region = region;
    pthread_mutex_init(&link->mutex, NULL);
    link->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    if (link->eventfd < 0 || epoll_ctl(e->epoll, EPOLL_CTL_ADD, link->eventfd, &event)) {
        FD_FAIL(FD_INTERNAL, "no file descriptor for a link");
    } else if (init_cache(link, stored, n_stored, lease, error) == FD_OK) {
        bool ok = fd_work_init(&link->work, g, &link->kv, lease->kv_dtype, e->isa, lease->softmax_scale, lease->layers,
                               lease->part, e->n_threads) == FD_OK;
        link->slots = ok ? aligned_alloc(FD_LINE, g->n_slots * sizeof *link->slots) : NULL;
        ok = link->slots != NULL;
        if (ok) memset(link->slots, 0, g->n_slots * sizeof *link->slots);
        link->turn.credit_ns = FD_QUANTUM_NS;
        link->turn.ns_per_cost = FIRST_NS_PER_COST;
        for (uint32_t i = 0; ok && i < g->n_slots; i++)
            ok = fd_step_init(&link->slots[i].step, g->max_rows, link->kv.planes.n_sections, link->work.shapes,
                              link->work.n_kinds, lease->part) == FD_OK;
        if (e->prefault) link->prefault.parts = fd_kvcache_parts(&link->kv, lease->n_pages);
        link->prefault.redo = UINT64_MAX;
        if (!ok) FD_FAIL(FD_INTERNAL, "no memory for the working space of a link");
        else if (!e->cuda) return link;
        else if ((link->gpu = fd_gpu_work_new(e->cuda, &link->work, region, lease->gpu_kernels, error))) return link;
    }
    destroy(link);
    return NULL;
}

/* Counts links and bytes against the engine's limits, before anything is allocated for them. */
static fd_status_t reserve(fd_engine_t *e, uint32_t n_links, uint32_t n_pages, uint64_t bytes, fd_error_t *error) {
    pthread_mutex_lock(&e->mutex);
    fd_status_t status = FD_OK;
    if (n_links > FD_MAX_LINKS - e->n_reserved)
        status = FD_FAIL(FD_OUT_OF_PAGES, "the R-engine already serves %u links", FD_MAX_LINKS);
    else if (bytes > e->kv_bytes - e->kv_used)
        status = FD_FAIL(FD_OUT_OF_PAGES, "%u pages need %llu bytes of KV-cache, but %llu are free", n_pages,
                         (unsigned long long)bytes, (unsigned long long)(e->kv_bytes - e->kv_used));
    if (status == FD_OK) {
        e->n_reserved += n_links;
        e->kv_used += bytes;
    }
    pthread_mutex_unlock(&e->mutex);
    return status;
}

static void release(fd_engine_t *e, uint32_t n_links, uint64_t bytes) {
    pthread_mutex_lock(&e->mutex);
    e->n_reserved -= n_links;
    e->kv_used -= bytes;
    pthread_mutex_unlock(&e->mutex);
}

fd_link_t *fd_engine_add_link(fd_engine_t *e, void *region, const fd_geometry_t *g, const fd_lease_t *lease,
                              const fd_carrier_t *carrier, fd_error_t *error) {
    if (check_lease(g, lease, region, error) != FD_OK) return NULL;
    const bool grows = lease->max_pages > lease->n_pages && !e->cuda;
    const uint32_t n_pages = e->cuda ? max_pages(lease) : lease->n_pages;
    const fd_planes_t planes = fd_page_planes(g, lease->layers, lease->kv_dtype);
    const uint64_t bytes = fd_kvcache_bytes(planes, n_pages, grows, e->huge);
    if (reserve(e, 1, n_pages, bytes, error) != FD_OK) return NULL;
    fd_link_t *link = build(e, region, g, lease, error);
    if (!link) {
        release(e, 1, bytes);
        return NULL;
    }
    link->lease_bytes = bytes;
    link->shm = (fd_shm_r_t){region, link->work.layout};
    link->carrier = carrier ? *carrier : (fd_carrier_t){&fd_shm_r_ops, &link->shm};
    pthread_mutex_lock(&e->mutex);
    e->links[e->n_links++] = link;
    __atomic_fetch_add(&e->link_changes, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&e->mutex);
    fd_eventfd_wake(e->eventfd);
    return link;
}

/* Ends the work on a link's calls. */
static void stop_calls(fd_engine_t *e, fd_link_t *link) {
    pthread_mutex_lock(&e->mutex);
    uint32_t i = 0;
    while (e->links[i] != link) i++;
    e->links[i] = e->links[--e->n_links];
    uint32_t change = __atomic_add_fetch(&e->link_changes, 1, __ATOMIC_SEQ_CST);
    fd_eventfd_wake(e->eventfd);
    while ((int32_t)(e->adopted_changes - change) < 0) pthread_cond_wait(&e->adoption, &e->mutex);
    pthread_mutex_unlock(&e->mutex);
    fd_link_refuse_waiting(link);
    destroy_calls(link);
}

void fd_engine_remove_link(fd_engine_t *e, fd_link_t *link) {
    if (link->slots) stop_calls(e, link);
    uint64_t bytes = link->lease_bytes;
    destroy(link);
    release(e, 1, bytes);
}

void fd_engine_retire_link(fd_engine_t *e, fd_link_t *link, const uint32_t *kept, uint32_t n_kept) {
    stop_calls(e, link);
    pthread_mutex_lock(&link->mutex);
    fd_kvcache_free_others(&link->kv, kept, n_kept);
    pthread_mutex_unlock(&link->mutex);
}

void fd_link_shrink(fd_link_t *link) {
    if (link->engine->cuda) return;
    if (link->engine->huge == FD_HUGE_HUGETLB) return; /* kernels before 5.18 cannot give back hugetlb pages */
    pthread_mutex_lock(&link->mutex);
    fd_kvcache_give_back(&link->kv);
    const uint64_t left = fd_kvcache_held_bytes(&link->kv), before = link->lease_bytes;
    if (left < before) link->lease_bytes = left;
    pthread_mutex_unlock(&link->mutex);
    if (left < before) release(link->engine, 0, before - left);
}

uint64_t fd_engine_pages_within(const fd_engine_t *e, fd_planes_t planes, uint64_t bytes, bool grows) {
    return fd_kvcache_pages_within(planes, bytes, grows, e->huge);
}

fd_status_t fd_link_grow(fd_link_t *link, uint32_t n_pages, fd_error_t *error) {
    fd_engine_t *e = link->engine;
    fd_kvcache_t *kv = &link->kv;
    const uint32_t old = kv->n_pages;
    if (n_pages <= old) return FD_OK;
    if (n_pages > kv->max_pages)
        return FD_FAIL(FD_OUT_OF_PAGES, "the lease may grow to %u pages, not to %u", kv->max_pages, n_pages);
    const uint64_t bytes = e->cuda ? link->lease_bytes : fd_kvcache_bytes(kv->planes, n_pages, kv->grows, e->huge);
    const uint64_t more = bytes - link->lease_bytes;
    if (reserve(e, 0, n_pages - old, more, error) != FD_OK) return error->status;
    const fd_status_t status = e->cuda ? FD_OK : fd_kvcache_commit(kv, n_pages, error);
    if (status != FD_OK) {
        release(e, 0, more);
        return status;
    }
    pthread_mutex_lock(&link->mutex);
    fd_kvcache_grow(kv, n_pages);
    link->lease_bytes = bytes;
    if (e->prefault) {
        const uint64_t redo = fd_kvcache_whole_parts(kv, old);
        uint64_t before = __atomic_load_n(&link->prefault.redo, __ATOMIC_RELAXED);
        __atomic_store_n(&link->prefault.parts, fd_kvcache_parts(kv, n_pages), __ATOMIC_RELAXED);
        while (redo < before && !__atomic_compare_exchange_n(&link->prefault.redo, &before, redo, false,
                                                             __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
        }
    }
    pthread_mutex_unlock(&link->mutex);
    if (e->prefault) fd_eventfd_wake(e->eventfd);
    return FD_OK;
}

int fd_link_eventfd(const fd_link_t *link) { return link->eventfd; }

/* What `call` returns, which is called under the link's mutex. */
#define LOCKED(link, call)                                                                                             \
    ({                                                                                                                 \
        pthread_mutex_lock(&(link)->mutex);                                                                            \
        const fd_status_t outcome = (call);                                                                            \
        pthread_mutex_unlock(&(link)->mutex);                                                                          \
        outcome;                                                                                                       \
    })

fd_status_t fd_link_free(fd_link_t *link, uint32_t seq_index, uint32_t tag, fd_error_t *error) {
    return LOCKED(link, fd_kvcache_free(&link->kv, seq_index, tag, error));
}

fd_status_t fd_link_trim(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error) {
    return LOCKED(link, fd_kvcache_trim(&link->kv, seq_index, tag, length, error));
}

fd_status_t fd_link_fork(fd_link_t *link, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                         uint32_t length, fd_error_t *error) {
    return LOCKED(link, fd_kvcache_fork(&link->kv, src, src_tag, dst, dst_tag, length, error));
}

fd_status_t fd_link_receive(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error) {
    return LOCKED(link, fd_kvcache_receive(&link->kv, seq_index, tag, length, error));
}

fd_status_t fd_link_length(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t *length, fd_error_t *error) {
    return LOCKED(link, fd_kvcache_length(&link->kv, seq_index, tag, length, error));
}

fd_status_t fd_link_pages(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t **pages, uint32_t *n,
                          fd_error_t *error) {
    const uint32_t *list;
    pthread_mutex_lock(&link->mutex);
    fd_status_t status = fd_kvcache_pages(&link->kv, seq_index, tag, &list, n, error);
    if (status == FD_OK) {
        *pages = malloc((*n + 1) * sizeof **pages);
        if (*pages && *n) memcpy(*pages, list, *n * sizeof **pages);
        if (!*pages) status = FD_FAIL(FD_INTERNAL, "no memory for a list of %u pages", *n);
    }
    pthread_mutex_unlock(&link->mutex);
    return status;
}

void fd_link_stats(fd_link_t *link, fd_link_stats_t *out) {
    out->calls = __atomic_load_n(&link->stats.calls, __ATOMIC_RELAXED);
    out->refused = __atomic_load_n(&link->stats.refused, __ATOMIC_RELAXED);
    out->rows = __atomic_load_n(&link->stats.rows, __ATOMIC_RELAXED);
    out->kv_bytes = __atomic_load_n(&link->stats.kv_bytes, __ATOMIC_RELAXED);
    out->busy_ns = __atomic_load_n(&link->stats.busy_ns, __ATOMIC_RELAXED);
    pthread_mutex_lock(&link->mutex);
    out->pages_total = link->kv.n_pages;
    out->pages_used = link->kv.n_pages - link->kv.free.n_free;
    out->seqs = link->kv.n_seqs;
    pthread_mutex_unlock(&link->mutex);
}

void fd_link_prefault(fd_link_t *link, fd_prefault_t *out) {
    uint64_t parts = __atomic_load_n(&link->prefault.parts, __ATOMIC_RELAXED),
             done = __atomic_load_n(&link->prefault.done, __ATOMIC_RELAXED);
    out->total = parts ? link->lease_bytes : 0;
    out->bytes = done < parts ? out->total / parts * done : out->total;
    out->error = __atomic_load_n(&link->prefault.error, __ATOMIC_RELAXED);
}
