/* Which pages of an arena are free, and which one a sequence is best given next.
 *
 * Attention reads a sequence's pages one after the other, and loses time at every jump to a page that lies elsewhere.
 * Sequences grow in turns, so pages handed out in the order in which they are asked for would be shuffled. Therefore
 * the arena is cut into stretches of a few pages, and a sequence that needs a page is given, in this order:
 *   1. the page behind its last one, if it is free and in the same stretch, or begins a stretch of which all pages are
 * free;
 *   2. the first page of the largest free block there is: a whole stretch, half of one, and so on.
 * Nothing is set aside: as long as there is a free page, whoever asks for one gets it, and only the last to come have
 * to do with scattered ones.
 *
 * Blocks are those of a buddy allocator: 2^i pages of a stretch, i at most FD_MAX_STRETCH_ORDER, at a multiple of their
 * size. */
#ifndef FD_PAGES_H
#define FD_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#define FD_NO_PAGE UINT32_MAX
#define FD_MAX_STRETCH_ORDER 3u

typedef struct {
    uint32_t next, previous; /* in the list of stretches whose largest free block is as large; FD_NO_PAGE: none */
    uint8_t free;            /* bit i: page i of the stretch */
} fd_stretch_t;

typedef struct {
    fd_stretch_t *stretches;
    uint32_t n_pages, n_free, order;          /* a stretch has 2^order pages, the last one perhaps fewer */
    uint32_t first[FD_MAX_STRETCH_ORDER + 1]; /* of each list: by the order of the largest free block */
} fd_pages_t;

/* All of n_pages are free. Returns false for want of memory. */
bool fd_pages_init(fd_pages_t *p, uint32_t n_pages, uint32_t order);
void fd_pages_destroy(fd_pages_t *p);

/* A page for a sequence whose last one is `after` (FD_NO_PAGE: it has none). There must be a free one. */
uint32_t fd_pages_take(fd_pages_t *p, uint32_t after);
void fd_pages_put(fd_pages_t *p, uint32_t page);

#endif
