/* The KV-cache of one lease: an arena of pages, and the list of pages that each sequence holds.
 *
 * FD_PAGE_TOKENS tokens of a sequence are a block. A page holds a block for the layers of one section (planes.h). The
 * arena consists of planes, so that the call of a layer reads memory that lies together: the chunk of (layer, page, KV
 * head) begins at byte plane * plane_stride + page * plane_bytes + offset + head * chunk_bytes. The pages of a sequence
 * and section lie side by side where possible, in stretches (pages.h) of at most 2 MiB per plane, so that a new
 * sequence touches one huge page per plane.
 *
 * A lease that may grow reserves address space for `max_pages` pages of each plane, and commits the first `n_pages` of
 * each. Growing commits more, so a page never moves, and attention computes addresses as without growth.
 *
 * Pages are reference-counted. Sequences that share a prefix share its pages, including the last, partly used one. A
 * sequence writes only pages that it holds alone: a step copies a shared page before it appends to it.
 *
 * A sequence has a floor: no row will come at a position below it (FD_ROW_SLIDE). In the sections of limited reach the
 * sequence has given back the pages that no row from its floor on sees.
 *
 * Control operations change page lists and reference counts but touch no page, so only the R-engine's threads fault in
 * the arena.
 *
 * These functions take no lock: the caller holds the link's mutex. Only `fd_kv_chunk` runs without the mutex, on page
 * numbers that a step copied while it held the mutex. The arena stays mapped until the link is removed, so an outdated
 * page number reads or writes memory of this lease only.
 */
#pragma once

#include "attention/attention.h"
#include "memory.h"
#include "pages.h"
#include "planes.h"
#include "region/region.h"

#define FD_MAX_SHARED_REFS (1u << 24) /* limit on the page references that FORKs add in one lease */
#define FD_MAX_GIVEN_BACK (1u << 24)  /* limit on the pages given back that the page lists of one lease still name */

typedef struct {
    uint32_t *pages;             /* [n_blocks][sections]; FD_NO_PAGE: given back */
    uint32_t n_blocks, capacity; /* in blocks */
    uint32_t length;             /* tokens; 0: the sequence is empty and `tag` has no meaning */
    uint32_t floor;              /* at most `length` */
    uint32_t dropped;            /* blocks whose pages fd_kvcache_drop_blocks has given back */
    uint32_t tag;
    uint32_t mark;   /* finds duplicates: number of the last row table, or list of indexes, that named this sequence */
    uint32_t copies; /* valid while a step is checked: bit i: the step would copy the page of section i */
} fd_sequence_t;

/* A page that a step appends to and that starts as a copy of a page its sequence shared. */
typedef struct {
    uint32_t src, dst;
} fd_page_copy_t;

typedef struct {
    uint8_t *arena;
    size_t arena_bytes;
    fd_planes_t planes;
    size_t plane_stride;  /* bytes from one plane to the next */
    size_t granule, unit; /* fd_memory_granule and fd_memory_unit of the arena's memory */
    fd_huge_t huge;
    bool grows;                     /* made with max_pages > n_pages: the planes lie apart */
    uint32_t page_chunks, max_seqs; /* page_chunks: KV heads of all layers of a page, on average */
    fd_store_t *stores;             /* [layers that store K and V] */
    uint32_t n_pages;               /* atomic: fd_kvcache_fault_in reads it without the mutex */
    uint32_t max_pages;             /* the most that the lease may grow to */
    fd_sequence_t *sequences;       /* [max_seqs] */
    uint32_t *refs;                 /* [max_pages] number of sequences that hold each page */
    uint32_t *pins; /* [max_pages] number of copies under way from or to each page; such a page is not free */
    fd_pages_t free;
    uint32_t n_seqs, shared_refs, n_given_back, mark;
} fd_kvcache_t;

/* Makes a cache without an arena for `n_layers` layers that store K and V; fd_arena_map (arena.h) gives it one. Without
 * an arena, for pages that lie in the memory of a device, planes are n_pages * plane_bytes apart, and only the
 * functions for page lists may be called. Returns FD_OK, or FD_INTERNAL if out of memory. The caller has checked the
 * sizes, and n_pages <= max_pages. */
fd_status_t fd_kvcache_init(fd_kvcache_t *kv, const fd_stored_t *layers, uint32_t n_layers, fd_kv_dtype_t dtype,
                            uint32_t n_pages, uint32_t max_pages, uint32_t max_seqs, fd_error_t *error);
void fd_kvcache_destroy(fd_kvcache_t *kv);

/* Hands out the pages up to `n_pages`, which fd_kvcache_commit (arena.h) has taken from the OS. */
void fd_kvcache_grow(fd_kvcache_t *kv, uint32_t n_pages);

/* Freeing an empty sequence does nothing, because the step that should have filled it may have been refused. */
fd_status_t fd_kvcache_free(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, fd_error_t *error);
/* Frees all sequences but those with the indexes kept[n_kept]. */
void fd_kvcache_free_others(fd_kvcache_t *kv, const uint32_t *kept, uint32_t n_kept);
fd_status_t fd_kvcache_trim(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error);
fd_status_t fd_kvcache_fork(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                            uint32_t length, fd_error_t *error);
/* Lets the sequence, which is empty or has whole blocks alone, hold `length` tokens, more than it has. The caller
 * brings K and V of the new ones. Returns FD_OK, FD_BAD_SEQUENCE, or FD_OUT_OF_PAGES if too few pages are free. */
fd_status_t fd_kvcache_receive(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error);
/* Gives back the pages of the first `n_blocks` blocks of a sequence, whose tokens lie elsewhere from now on. In a cache
 * whose layers see all tokens. */
fd_status_t fd_kvcache_drop_blocks(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t n_blocks,
                                   fd_error_t *error);
/* Gives the pages of `src`, which has whole blocks alone, to `dst`, in the place of the last of the blocks whose pages
 * it has given back. `src` is empty then. */
fd_status_t fd_kvcache_restore_blocks(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                                      fd_error_t *error);
/* Sets *length to the sequence's tokens; 0: it is empty. */
fd_status_t fd_kvcache_length(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t *length, fd_error_t *error);
/* Points *pages at the sequence's [*n] page numbers, the first block's first; FD_NO_PAGE stands for a page given back.
 * They are valid until the cache changes. */
fd_status_t fd_kvcache_pages(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, const uint32_t **pages, uint32_t *n,
                             fd_error_t *error);

/* Returns FD_OK if every entry appends at the end of its sequence of the lease, no two entries name the same sequence,
 * and enough pages are free for all new rows. Changes only fields that checks use. Entries have at least one row.
 *
 * A sequence appends only to a page of its own, so it copies a shared page first; the last of the sequences that share
 * a page keeps it. */
fd_status_t fd_kvcache_check(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, fd_error_t *error);
/* Takes pages for the new rows of a table that fd_kvcache_check has accepted. Lists the pages that are to be copied
 * before any row is appended in copies[n_entries * sections], and their number in *n_copies; the caller ends these
 * copies.
 * Returns FD_OK, or FD_INTERNAL if out of memory; then it has changed nothing. */
fd_status_t fd_kvcache_append(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, fd_page_copy_t *copies,
                              uint32_t *n_copies, fd_error_t *error);
/* The copies are complete: pages that no sequence holds any more become free. */
void fd_kvcache_end_copies(fd_kvcache_t *kv, const fd_page_copy_t *copies, uint32_t n_copies);
/* Copies one plane of a page. Needs no mutex. */
static inline void fd_kvcache_copy(const fd_kvcache_t *kv, fd_page_copy_t copy, uint32_t plane);

static inline uint32_t fd_pages_for(uint64_t tokens) {
    return (uint32_t)((tokens + FD_PAGE_TOKENS - 1) / FD_PAGE_TOKENS);
}

/* The first block that a row at `pos` sees in layers of this reach (0: no limit). */
static inline uint32_t fd_first_block(uint32_t pos, uint32_t reach) {
    return reach && pos >= reach ? (pos - reach + 1) / FD_PAGE_TOKENS : 0;
}

/* The part of a page that lies in a plane. */
static inline uint8_t *fd_kv_plane(const fd_kvcache_t *kv, uint32_t plane, uint32_t page) {
    return kv->arena + plane * kv->plane_stride + page * kv->planes.plane_bytes;
}

/* The chunk of a KV head in the layer stores[store]. */
static inline uint8_t *fd_kv_chunk(const fd_kvcache_t *kv, uint32_t store, uint32_t page, uint32_t head) {
    const fd_store_t *s = &kv->stores[store];
    return fd_kv_plane(kv, s->plane, page) + s->offset + head * s->chunk_bytes;
}

/* The chunk of index keys in the layer stores[store], which has one. */
static inline uint8_t *fd_kv_index_chunk(const fd_kvcache_t *kv, uint32_t store, uint32_t page) {
    return fd_kv_chunk(kv, store, page, kv->stores[store].n_kv_heads);
}

static inline void fd_kvcache_copy(const fd_kvcache_t *kv, fd_page_copy_t copy, uint32_t plane) {
    memcpy(fd_kv_plane(kv, plane, copy.dst), fd_kv_plane(kv, plane, copy.src), kv->planes.plane_bytes);
}
