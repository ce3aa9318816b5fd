/* A link's share of the KV-cache: an arena of pages, and which sequence holds which of them.
 *
 * A page holds FD_PAGE_TOKENS tokens of one sequence, all layers. The arena is layer-major, so that what a layer's call
 * reads lies together: the chunk of (layer, page, KV head) stands at ((layer * n_pages + page) * n_kv_heads + head) *
 * chunk_bytes. A sequence's pages lie side by side where that can be had, in stretches (pages.h) of 2 MiB a layer at
 * most: a sequence that is new touches a huge page of its own, not several.
 *
 * Pages are reference-counted; sequences that share a prefix share its pages, the one that it cuts included. A page is
 * written only by a sequence that holds it alone: a step copies a shared page before it appends to it.
 *
 * Control operations keep the books and touch no page, so it is the R-engine's threads that fault the arena in.
 *
 * Nothing here locks: the link's mutex is held around every call. Only `fd_kv_chunk` is used without it, on page
 * numbers that a step copied while it had the mutex; the arena stays mapped until the link is gone, so a stale number
 * reads or writes this lease's memory and no other's.
 */
#ifndef FD_KVCACHE_H
#define FD_KVCACHE_H

#include "attention.h"
#include "memory.h"
#include "pages.h"
#include "region.h"

#define FD_MAX_SHARED_REFS (1u << 24) /* page references beyond the first that FORK may create in one lease */

typedef struct {
    uint32_t *pages;
    uint32_t n_pages, capacity;
    uint32_t length; /* tokens; 0: the sequence is empty and its tag means nothing */
    uint32_t tag;
    uint32_t mark; /* of the last row table that named it; finds duplicates */
    bool copies;   /* while a step is checked: it would copy the page that it appends to */
} fd_sequence_t;

typedef struct {
    uint8_t *arena;
    size_t arena_bytes, chunk_bytes, row_bytes; /* row: a page's share of a layer */
    size_t granule;                             /* fd_memory_granule of the arena */
    uint32_t n_layers, n_kv_heads, n_pages, max_seqs;
    fd_sequence_t *sequences; /* [max_seqs] */
    uint32_t *refs;           /* [n_pages] sequences that hold a page */
    fd_pages_t free;
    uint32_t n_seqs, shared_refs, mark;
    uint64_t swept; /* rows that fd_kvcache_give_back has passed since a page was last taken or dropped */
} fd_kvcache_t;

/* Returns FD_OK or FD_INTERNAL (no memory). Sizes have been checked by the caller. */
fd_status_t fd_kvcache_init(fd_kvcache_t *kv, const fd_geometry_t *g, fd_kv_dtype_t dtype, uint32_t n_pages,
                            uint32_t max_seqs, fd_huge_t huge, char *err, size_t err_len);
void fd_kvcache_destroy(fd_kvcache_t *kv);

/* A free of an empty sequence does nothing: the step that was to fill it may have been refused. */
fd_status_t fd_kvcache_free(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, char *err, size_t err_len);
fd_status_t fd_kvcache_trim(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t length, char *err,
                            size_t err_len);
fd_status_t fd_kvcache_fork(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                            uint32_t length, char *err, size_t err_len);
/* A sequence's pages, in order: [*n] at *pages until the cache changes. */
fd_status_t fd_kvcache_pages(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, const uint32_t **pages, uint32_t *n,
                             char *err, size_t err_len);

/* Whether a step fits: every entry names a sequence of the lease once, at its end, and there are pages for all new
 * rows. Changes nothing that matters. Entries have at least one row. */
fd_status_t fd_kvcache_check(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, char *err, size_t err_len);
/* Makes room for the new rows of a table that fits, or changes nothing. Fails only for want of memory (FD_INTERNAL). */
fd_status_t fd_kvcache_append(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, char *err, size_t err_len);

/* The arena in parts of a few huge pages, in the order in which a cache that fills up needs them: of the first pages
 * all layers, and so on. A part is faulted in by whoever calls, without the mutex. Returns 0 or errno. */
uint64_t fd_kvcache_parts(const fd_kvcache_t *kv);
int fd_kvcache_fault_in(const fd_kvcache_t *kv, uint64_t part);

/* Gives the memory of free pages back to the OS, one stretch a call; returns false when there is none left. No thread
 * may be working on a step of this cache meanwhile. What is given back are whole granules: a huge page that still holds
 * a token of somebody stays as it is. */
bool fd_kvcache_give_back(fd_kvcache_t *kv);

static inline uint32_t fd_pages_for(uint64_t tokens) {
    return (uint32_t)((tokens + FD_PAGE_TOKENS - 1) / FD_PAGE_TOKENS);
}

static inline uint8_t *fd_kv_chunk(const fd_kvcache_t *kv, uint32_t layer, uint32_t page, uint32_t head) {
    return kv->arena + (((size_t)layer * kv->n_pages + page) * kv->n_kv_heads + head) * kv->chunk_bytes;
}

#endif
