/* The part of every sequence's tokens that a link keeps, when several R-nodes share them (token-level partition).
 *
 * Positions are cut into blocks of FD_PAGE_TOKENS, and block b belongs to part b % n. The S-node speaks of positions in
 * the whole sequence. Here the kept tokens of a sequence follow each other without gaps, so that the cache and the
 * kernels know nothing of parts: the token at position p is the fd_part_length(part, p)-th that is kept, if it is. */
#pragma once

#include "region/region.h"

#define FD_MAX_PARTS 64u

typedef struct {
    uint32_t index, n; /* n at most 1: all tokens */
} fd_part_t;

static inline bool fd_is_part(fd_part_t part) { return part.n > 1; }

/* How many of the first `length` tokens of a sequence the part keeps. */
static inline uint32_t fd_part_length(fd_part_t part, uint64_t length) {
    if (!fd_is_part(part)) return (uint32_t)length;
    const uint64_t round = (uint64_t)part.n * FD_PAGE_TOKENS, first = (uint64_t)part.index * FD_PAGE_TOKENS,
                   rest = length % round, own = rest > first ? rest - first : 0;
    return (uint32_t)(length / round * FD_PAGE_TOKENS + (own < FD_PAGE_TOKENS ? own : FD_PAGE_TOKENS));
}

/* Whether the part keeps the token at a position. */
static inline bool fd_part_keeps(fd_part_t part, uint32_t pos) {
    return !fd_is_part(part) || pos / FD_PAGE_TOKENS % part.n == part.index;
}
