/* The R-engine: a pool of threads that polls the doorbells of all its links, appends K and V, attends and rings back.
 *
 * No thread of the pool ever enters Python or takes its GIL. Thread 0 finds the calls, copies and checks their headers
 * and row tables, plans the steps and decides the order of the calls (turns.h). All threads share the work (jobs.h),
 * and thread 0 rings the replies. A thread of an S side in the same process may stand in for thread 0 (stand_in.h);
 * what is said of thread 0 in these files holds for that thread, too. Control operations run on other threads: adding
 * and removing a link takes the engine's mutex; FREE, TRIM and FORK take the link's mutex, which a call takes only
 * while it plans a step. If so configured, the threads fault in the memory of the leases ahead of use between calls, a
 * slice at a time.
 *
 * An engine may have a GPU (gpu_work.h). The arenas then lie in its memory, and its kernels do what the threads would
 * do. Thread 0 begins the calls in the order in which it finds them, and answers them as they end; links take no turns.
 */
#pragma once

#include "attention/attention.h"
#include "region/carrier.h"
#include "layers.h"
#include "cache/error.h"
#include "cache/memory.h"
#include "gpu_work.h"
#include "parts.h"
#include "region/region.h"
#include "region/stand_in.h"

#define FD_MAX_THREADS 512

typedef struct fd_engine fd_engine_t;
typedef struct fd_link fd_link_t;

typedef struct {
    uint32_t threads; /* 1..FD_MAX_THREADS */
    const int *cpus;  /* the CPU of each thread, or NULL to pin none */
    fd_isa_t isa;
    uint32_t spin_us;  /* how long an idle thread spins before it sleeps */
    uint64_t kv_bytes; /* memory that all leases share */
    fd_huge_t huge;
    bool prefault;         /* the engine's threads fault in a lease's arena as soon as it is granted */
    uint32_t step_spin_us; /* as spin_us while a step is under way, if it is longer */
    int gpu;               /* the CUDA device in whose memory pages lie and that attends; -1: none */
} fd_engine_config_t;

/* The KV-cache of one link. Each lease has an arena of its own, so that no number from a peer reaches another link's
 * pages. */
typedef struct {
    uint32_t kv_dtype; /* fd_kv_dtype_t */
    uint32_t n_pages;  /* pages of FD_PAGE_TOKENS tokens, for the layers of one section */
    uint32_t max_seqs;
    float softmax_scale;
    const fd_layer_t *layers; /* [n_layers] */
    uint32_t max_pages;       /* fd_link_grow may raise n_pages to this; at most n_pages: the lease does not grow */
    fd_part_t part;
    const fd_gpu_kernels_t *gpu_kernels; /* [n_layers], of an engine with a GPU; else NULL */
} fd_lease_t;

typedef struct {
    uint64_t calls, refused, rows, kv_bytes, busy_ns;
    uint32_t pages_total, pages_used, seqs;
} fd_link_stats_t;

/* How many bytes of a link's arena have been faulted in. If `error` (errno) is not 0, faulting in has stopped for
 * good. */
typedef struct {
    uint64_t bytes, total;
    int error;
} fd_prefault_t;

/* error.h says how these functions fail. */
fd_engine_t *fd_engine_new(const fd_engine_config_t *config, fd_error_t *error);
void fd_engine_free(fd_engine_t *engine); /* joins the threads; all links must have been removed */
/* Writing 1 wakes a sleeping engine. Only for code that the R-node trusts; a peer gets fd_link_eventfd. */
int fd_engine_eventfd(const fd_engine_t *engine);
/* Fills `stand_in`. It may be used until fd_engine_end_stand_in; after fd_engine_free it does nothing. */
void fd_engine_begin_stand_in(fd_engine_t *engine, fd_stand_in_t *stand_in);
void fd_engine_end_stand_in(const fd_stand_in_t *stand_in);
/* The planes of a page, for the layers that store K and V. The layers and the dtype must be valid. */
fd_planes_t fd_page_planes(const fd_geometry_t *g, const fd_layer_t *layers, uint32_t kv_dtype);
/* Checks the layers of a link with geometry `g`. */
fd_status_t fd_layers_check(const fd_geometry_t *g, const fd_layer_t *layers, uint32_t kv_dtype, fd_error_t *error);
uint64_t fd_engine_kv_free(fd_engine_t *engine);
/* The most pages that a lease of `bytes` may have. `grows`: its max_pages is greater. */
uint64_t fd_engine_pages_within(const fd_engine_t *engine, fd_planes_t planes, uint64_t bytes, bool grows);

/* Copies `carrier`; NULL stands for shared memory. `region` (region_bytes of the geometry's layout) must stay mapped
 * until fd_engine_remove_link returns. */
fd_link_t *fd_engine_add_link(fd_engine_t *engine, void *region, const fd_geometry_t *g, const fd_lease_t *lease,
                              const fd_carrier_t *carrier, fd_error_t *error);
/* Stops the work on the link's calls, answers the unserved ones with FD_LINK_CLOSED (without sending) and
 * unmaps the arena. */
void fd_engine_remove_link(fd_engine_t *engine, fd_link_t *link);
/* Does all that but unmap the arena: the sequences with the indexes kept[n_kept] stay until fd_engine_remove_link, and
 * the control operations work. The region and the carrier are not used any more. */
void fd_engine_retire_link(fd_engine_t *engine, fd_link_t *link, const uint32_t *kept, uint32_t n_kept);
/* Gives the memory of free pages of a retired link back to the OS and to the budget, as far as granules (memory.h) have
 * no page in use. The link takes no more pages after this. Does nothing to hugetlb pages. */
void fd_link_shrink(fd_link_t *link);

/* Writing 1 wakes a sleeping engine. A peer may have this eventfd: whatever it does to it harms no other link. */
int fd_link_eventfd(const fd_link_t *link);

/* The sequence must not take part in a call in progress; if it does, the contents of this lease may be wrong, but
 * nothing else. Freeing an empty sequence does nothing. */
fd_status_t fd_link_free(fd_link_t *link, uint32_t seq_index, uint32_t tag, fd_error_t *error);
fd_status_t fd_link_trim(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error);
/* Makes the empty sequence `dst` share the first `length` tokens of `src`. Pages are reference-counted; a partly used
 * last page is copied when either sequence appends to it. */
fd_status_t fd_link_fork(fd_link_t *link, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                         uint32_t length, fd_error_t *error);
/* Lets the empty sequence hold `length` tokens, whose K and V fd_link_receive_pages brings. */
fd_status_t fd_link_receive(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error);
/* Bytes of pages [first, first + n) of a sequence, from `offset` on: page by page, each plane by plane. */
typedef struct {
    uint32_t seq_index, tag, first, n;
    uint64_t offset;
} fd_page_range_t;

/* These do a limited number of the bytes, *done, in each call. A page outside the sequence is refused, so a peer writes
 * into the sequence's pages alone.
 *
 * fd_link_fault_in lets the OS find memory for bytes that fd_link_receive_pages will bring; any thread may call it.
 * fd_link_send_pages and fd_link_receive_pages move as many bytes as the non-blocking stream socket `fd` takes or has
 * now, 0 if it is not ready; if it has failed, they return FD_LINK_CLOSED with its errno in error->number. What comes
 * from the socket is not looked at. fd_link_copy_pages copies to another link of the same R-engine, whose pages must
 * have the same planes. */
fd_status_t fd_link_fault_in(fd_link_t *link, const fd_page_range_t *range, uint64_t *done, fd_error_t *error);
fd_status_t fd_link_send_pages(fd_link_t *link, int fd, const fd_page_range_t *range, uint64_t *done,
                               fd_error_t *error);
fd_status_t fd_link_receive_pages(fd_link_t *link, int fd, const fd_page_range_t *range, uint64_t *done,
                                  fd_error_t *error);
fd_status_t fd_link_copy_pages(fd_link_t *from, const fd_page_range_t *source, fd_link_t *to,
                               const fd_page_range_t *target, uint64_t *done, fd_error_t *error);
/* Sets *length to the tokens of a sequence; 0: it is empty. */
fd_status_t fd_link_length(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t *length, fd_error_t *error);
/* Allocates [*n] numbers: the sequence's pages, in order. The caller frees *pages. */
fd_status_t fd_link_pages(fd_link_t *link, uint32_t seq_index, uint32_t tag, uint32_t **pages, uint32_t *n,
                          fd_error_t *error);
/* Grows the lease to `n_pages`; the pages that it has stay where they are. Does nothing if it has as many. One thread
 * at a time. */
fd_status_t fd_link_grow(fd_link_t *link, uint32_t n_pages, fd_error_t *error);
void fd_link_stats(fd_link_t *link, fd_link_stats_t *out);
void fd_link_prefault(fd_link_t *link, fd_prefault_t *out);
