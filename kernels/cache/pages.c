#include "pages.h"

#include <stdlib.h>
#include <string.h>

enum { FULL = -1 }; /* no page is free */

/* The bits, in fd_stretch_t.free, of the block of 2^order pages that begins at page `at` of the stretch. */
static uint8_t block(uint32_t order, uint32_t at) { return (uint8_t)(((1u << (1u << order)) - 1) << at); }

/* The first page, within its stretch, of the first free block of 2^order pages; FULL if there is none. */
static int find_block(const fd_pages_t *p, uint8_t free, uint32_t order) {
    for (uint32_t at = 0; at < 1u << p->order; at += 1u << order)
        if ((free & block(order, at)) == block(order, at)) return (int)at;
    return FULL;
}

/* The order of the largest free block of a stretch with these free pages, or FULL. */
static int largest(const fd_pages_t *p, uint8_t free) {
    for (int order = (int)p->order; order >= 0; order--)
        if (find_block(p, free, (uint32_t)order) != FULL) return order;
    return FULL;
}

static void leave_list(fd_pages_t *p, uint32_t stretch, int order) {
    const fd_stretch_t *s = &p->stretches[stretch];
    if (order == FULL) return;
    if (s->previous == FD_NO_PAGE) p->first[order] = s->next;
    else p->stretches[s->previous].next = s->next;
    if (s->next != FD_NO_PAGE) p->stretches[s->next].previous = s->previous;
}

static void join_list(fd_pages_t *p, uint32_t stretch, int order) {
    fd_stretch_t *s = &p->stretches[stretch];
    if (order == FULL) return;
    s->previous = FD_NO_PAGE;
    s->next = p->first[order];
    if (s->next != FD_NO_PAGE) p->stretches[s->next].previous = stretch;
    p->first[order] = stretch;
}

static void set_free(fd_pages_t *p, uint32_t stretch, uint8_t free) {
    fd_stretch_t *s = &p->stretches[stretch];
    const int before = largest(p, s->free), now = largest(p, free);
    s->free = free;
    if (before == now) return;
    leave_list(p, stretch, before);
    join_list(p, stretch, now);
}

bool fd_pages_init(fd_pages_t *p, uint32_t n_pages, uint32_t max_pages, uint32_t order) {
    const uint32_t n = (uint32_t)(((uint64_t)max_pages + (1u << order) - 1) >> order);
    *p = (fd_pages_t){.stretches = calloc(n, sizeof *p->stretches), .order = order};
    if (!p->stretches) return false;
    memset(p->first, 0xff, sizeof p->first);
    fd_pages_grow(p, n_pages);
    return true;
}

void fd_pages_grow(fd_pages_t *p, uint32_t n_pages) {
    const uint32_t all = 1u << p->order, old = p->n_pages;
    /* Backwards, so that the first new stretch heads its list and is taken first. */
    for (uint32_t i = (uint32_t)(((uint64_t)n_pages + all - 1) >> p->order); i-- > old >> p->order;) {
        const uint32_t first = i << p->order, left = n_pages - first, from = old > first ? old - first : 0;
        const uint32_t here = (1u << (left < all ? left : all)) - 1;
        set_free(p, i, p->stretches[i].free | (uint8_t)(here & ~((1u << from) - 1)));
    }
    p->n_free += n_pages - old;
    p->n_pages = n_pages;
}

void fd_pages_destroy(fd_pages_t *p) {
    free(p->stretches);
    memset(p, 0, sizeof *p);
}

/* True if a sequence that ends right before `page` may continue there: rule 1 in pages.h. */
static bool continues_run(const fd_pages_t *p, uint32_t page) {
    if (page >= p->n_pages) return false;
    const uint32_t at = page & ((1u << p->order) - 1);
    const uint8_t needed = at ? block(0, at) : block(p->order, 0);
    return (p->stretches[page >> p->order].free & needed) == needed;
}

uint32_t fd_pages_take(fd_pages_t *p, uint32_t after) {
    uint32_t page = after + 1;
    if (after == FD_NO_PAGE || !continues_run(p, page)) {
        uint32_t order = p->order;
        while (p->first[order] == FD_NO_PAGE) order--;
        const uint32_t stretch = p->first[order];
        page = (stretch << p->order) + (uint32_t)find_block(p, p->stretches[stretch].free, order);
    }
    const uint32_t stretch = page >> p->order;
    set_free(p, stretch, p->stretches[stretch].free & (uint8_t)~block(0, page & ((1u << p->order) - 1)));
    p->n_free--;
    return page;
}

void fd_pages_put(fd_pages_t *p, uint32_t page) {
    const uint32_t stretch = page >> p->order;
    set_free(p, stretch, p->stretches[stretch].free | block(0, page & ((1u << p->order) - 1)));
    p->n_free++;
}
