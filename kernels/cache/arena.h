/* The memory of a KV-cache's pages: its size, and how it grows, is faulted in ahead of use and goes back to the OS. */
#pragma once

#include "kvcache.h"

/* Bytes of memory that a cache of `n_pages` pages takes. `grows`: it was made with a greater max_pages. Its planes then
 * lie apart, and each takes whole units of memory. */
uint64_t fd_kvcache_bytes(fd_planes_t planes, uint32_t n_pages, bool grows, fd_huge_t huge);
/* The most pages that take at most `bytes`. */
uint64_t fd_kvcache_pages_within(fd_planes_t planes, uint64_t bytes, bool grows, fd_huge_t huge);

/* Maps the arena of a cache that fd_kvcache_init has made. Returns FD_OK, or FD_INTERNAL. */
fd_status_t fd_arena_map(fd_kvcache_t *kv, fd_huge_t huge, fd_error_t *error);
/* Takes memory from the OS for growing from kv->n_pages to `n_pages`, at most kv->max_pages; needs no mutex.
 * fd_kvcache_grow hands out the new pages. Returns FD_OK, or FD_INTERNAL and has changed nothing. */
fd_status_t fd_kvcache_commit(fd_kvcache_t *kv, uint32_t n_pages, fd_error_t *error);

/* Number of parts in which the first `n_pages` pages are faulted in. A part is one plane of a run of pages, 2 MiB or a
 * little more. The parts of all planes of the first pages come first: a cache that fills up needs them first. */
uint64_t fd_kvcache_parts(const fd_kvcache_t *kv, uint32_t n_pages);
/* Number of those parts, from the first one on, that growing does not change: all but an incomplete run's. */
uint64_t fd_kvcache_whole_parts(const fd_kvcache_t *kv, uint32_t n_pages);
/* Faults in one part, on the calling thread and without the mutex. Returns 0 or errno. */
int fd_kvcache_fault_in(const fd_kvcache_t *kv, uint64_t part);

/* Gives the memory of free pages back to the OS. No thread may work on a step of this cache meanwhile. Only whole
 * granules are given back: a huge page that still holds a token of any sequence stays. */
void fd_kvcache_give_back(fd_kvcache_t *kv);
/* Bytes of the granules in which a page is in use. */
uint64_t fd_kvcache_held_bytes(const fd_kvcache_t *kv);
