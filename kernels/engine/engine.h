/* The R-engine: a pool of threads that polls the doorbells of all its links, appends K and V, attends and rings back.
 *
 * Python is never entered on that path and its GIL never taken. Calls are served in the order their bells are seen,
 * each by all threads: thread 0 takes the call, copies and checks header and table, plans the step (once a step), all
 * threads work, the last one to finish rings the reply. Control operations (lease, free, ...) come from any other
 * thread; they take the engine's mutex, which a call takes only while it plans a step. Between calls the threads
 * maintain the leases' memory, a slice at a time: they fault it in ahead and give what is free back to the OS, where
 * that was asked for.
 */
#ifndef FD_ENGINE_H
#define FD_ENGINE_H

#include "attention.h"
#include "doorbell.h"
#include "memory.h"
#include "region.h"

typedef struct fd_engine fd_engine_t;
typedef struct fd_link fd_link_t;

typedef struct {
    uint32_t threads; /* >= 1 */
    const int *cpus;  /* cpu of each thread, or NULL: unpinned */
    fd_isa_t isa;
    uint32_t spin_us;  /* how long an idle thread spins before it sleeps */
    uint64_t kv_bytes; /* budget that all leases share */
    fd_huge_t huge;
    bool prefault;         /* the engine's threads fault a lease's arena in as soon as it is granted */
    uint64_t trim_idle_ns; /* after so long without a call, a link's free pages go back to the OS; 0: never. Not for
                              hugetlb */
} fd_engine_config_t;

/* A link's share of the KV-cache: an arena of its own, so no number a peer sends can reach another's pages. */
typedef struct {
    uint32_t kv_dtype; /* fd_kv_dtype_t */
    uint32_t n_pages;  /* pages of FD_PAGE_TOKENS tokens, each counted once for all layers */
    uint32_t max_seqs;
    float softmax_scale;
    const uint32_t *windows; /* [n_layers], 0: full attention */
} fd_lease_t;

typedef struct {
    uint64_t calls, refused, rows, kv_bytes, busy_ns;
    uint32_t pages_total, pages_used, seqs;
} fd_link_stats_t;

/* How far the arena of a link has been faulted in; stopped for good if `error` (errno) is not 0. */
typedef struct {
    uint64_t bytes, total;
    int error;
} fd_prefault_t;

/* All of these return NULL / a negative fd_status_t on failure and leave a readable sentence in err. After NULL, errno
 * is EINVAL if what was asked for makes no sense, else it says what was lacking (ENOMEM: memory or KV-cache). */
fd_engine_t *fd_engine_new(const fd_engine_config_t *config, char *err, size_t err_len);
void fd_engine_free(fd_engine_t *engine); /* joins the threads; all links must be gone */
int fd_engine_eventfd(
    const fd_engine_t *engine); /* write 1 to wake a sleeping engine; for those that the node trusts */
size_t fd_page_bytes(const fd_geometry_t *g, uint32_t kv_dtype); /* one page, all layers and KV heads */
uint64_t fd_engine_kv_free(fd_engine_t *engine);

/* `notify` is copied; NULL: nobody is told. `region` (region_bytes of the geometry's layout) must stay mapped until
 * fd_engine_remove_link returns. */
fd_link_t *fd_engine_add_link(fd_engine_t *engine, void *region, const fd_geometry_t *g, const fd_lease_t *lease,
                              const fd_notify_t *notify, char *err, size_t err_len);
/* Waits for a call in progress, answers one that is not with FD_LINK_CLOSED (without notify), then unmaps the arena. */
void fd_engine_remove_link(fd_engine_t *engine, fd_link_t *link);

/* Also wakes the engine. The one to hand to a peer: what it does to an eventfd of its own harms no other link. */
int fd_link_eventfd(const fd_link_t *link);

/* A sequence named here must not be part of a call in progress; if it is, the lease's contents suffer and nothing else.
 * Freeing an empty sequence does nothing. */
int fd_link_free(fd_link_t *link, uint32_t seq_index, uint32_t tag, char *err, size_t err_len);
int fd_link_trim(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, char *err, size_t err_len);
/* dst (empty) shares src's first `length` tokens; pages are reference-counted, and the cut one copied when either
 * appends to it. */
int fd_link_fork(fd_link_t *link, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag, uint32_t length,
                 char *err, size_t err_len);
/* The numbers of a sequence's pages, in order: [*n], to be freed by the caller. */
int fd_link_pages(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t **pages, uint32_t *n, char *err,
                  size_t err_len);
void fd_link_stats(fd_link_t *link, fd_link_stats_t *out);
void fd_link_prefault(fd_link_t *link, fd_prefault_t *out);

#endif
