/* The allocator of an arena's pages: it knows which pages are free and chooses the next page of a sequence.
 *
 * Attention reads the pages of a sequence one after the other and loses time at every jump between pages that are not
 * neighbours. Sequences grow in turns, so pages handed out in order of request would mix the sequences. Therefore the
 * arena is divided into stretches of a few pages, and a sequence that needs a page receives
 *   1. the page after its last one, if that page is free and either lies in the same stretch or begins a stretch whose
 *      pages are all free;
 *   2. otherwise the first page of the largest free block: a whole stretch, half of one, and so on.
 * No page is reserved: a request succeeds while any page is free, and pages are scattered only in a nearly full arena.
 *
 * The blocks belong to a buddy allocator: 2^i pages of a stretch, at a multiple of 2^i, with i at most
 * FD_MAX_STRETCH_ORDER. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define FD_NO_PAGE UINT32_MAX
#define FD_MAX_STRETCH_ORDER 3u

typedef struct {
    uint32_t next, previous; /* in the list of first[]; FD_NO_PAGE ends it */
    uint8_t free;            /* bit i is set if page i of the stretch is free */
} fd_stretch_t;

typedef struct {
    fd_stretch_t *stretches;
    uint32_t n_pages, n_free, order; /* a stretch has 2^order pages; the last one may have fewer */
    /* first[i] heads the list of the stretches whose largest free block has 2^i pages. */
    uint32_t first[FD_MAX_STRETCH_ORDER + 1];
} fd_pages_t;

/* Makes n_pages pages free, and room for fd_pages_grow up to max_pages. Returns false if out of memory. */
bool fd_pages_init(fd_pages_t *p, uint32_t n_pages, uint32_t max_pages, uint32_t order);
/* Adds free pages, so that there are `n_pages` in all. */
void fd_pages_grow(fd_pages_t *p, uint32_t n_pages);
void fd_pages_destroy(fd_pages_t *p);

/* Takes a page for a sequence whose last page is `after`, or FD_NO_PAGE if the sequence has none. A page must be
 * free. */
uint32_t fd_pages_take(fd_pages_t *p, uint32_t after);
void fd_pages_put(fd_pages_t *p, uint32_t page);
