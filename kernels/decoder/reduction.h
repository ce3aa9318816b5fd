/* Sums over the ranks of a tensor-parallel S-Part: processes of one machine that share a segment of memory.
 *
 * Every rank has an area of its own in the segment: its words, and two slots into which it copies its addends in turns.
 * A rank that has copied its addends counts `arrived` up, waits until all ranks have, and adds up all slots. It writes
 * a slot again two sums later, when every other rank has arrived at the sum between and so has read the slot. Large
 * sums are shared: each rank adds up a range of the numbers, and after a second barrier copies the ranges of the
 * others.
 *
 * Numbers are added in fp32 in the order of the ranks, so all ranks get the same bits.
 *
 * A rank that has ended, or that does not go on (rank_watch.h), breaks the reduction: the `broken` word of the segment
 * names it, lets all other ranks out at once, and fails every later sum.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/isa.h"
#include "rank_watch.h"
#include "region/region.h"

#define FD_MOST_RANKS 64u
#define FD_RANK_SLOT_BYTES (1u << 20) /* larger sums are taken piece by piece */

/* One ISA's function for one dtype: out[i] = parts[0][i] + ... + parts[n_parts - 1][i], for `n` numbers from `first`
 * on. `out` may be one of the parts. */
typedef void (*fd_sum_parts_t)(const void *const *parts, uint32_t n_parts, size_t first, size_t n, void *out);

/* A rank's end of the segment. One thread at a time sums. */
typedef struct {
    uint8_t *segment;
    uint32_t rank, n_ranks;
    uint64_t limit_ns; /* a rank that does not go on for this time is lost */
    const fd_sum_parts_t *sum_parts;
    uint32_t arrived;   /* the barriers that this rank has arrived at */
    uint32_t slot;      /* of the next sum, 0 or 1 */
    uint64_t passed_ns; /* when the last barrier was passed */
    uint32_t watched;   /* the rank that is waited for; the own rank: none */
    uint64_t own_ns;    /* from the last barrier to the first look at that rank */
    fd_rank_watch_t watch;
} fd_reduction_t;

/* Bytes of a segment for `n_ranks` ranks, or 0 if FD_MOST_RANKS are fewer. A new segment is zeros and page-aligned. */
size_t fd_reduction_segment_bytes(uint32_t n_ranks);

/* Joins the segment as one of its ranks; `rank` < `n_ranks`. The calling thread touches the rank's area first, so that
 * the memory lies on its NUMA node. */
void fd_reduction_open(fd_reduction_t *r, void *segment, uint32_t rank, uint32_t n_ranks, uint64_t limit_ns,
                       fd_isa_t isa);

/* Replaces data [n], of the activation dtype, by the sum over all ranks, in up to `threads` threads. All ranks call
 * this for as many numbers of the same dtype, in the same order. FD_LINK_CLOSED if the reduction is broken; then `data`
 * is undefined. */
fd_status_t fd_reduction_sum(fd_reduction_t *r, void *data, size_t n, uint32_t act_dtype, unsigned threads);

/* Looks at a rank that this rank waits for elsewhere, at most every 50 ms. No loop of rank 0 is told there, because it
 * has work that no other rank does. False if the reduction is broken, by this look or earlier. */
bool fd_reduction_look(fd_reduction_t *r, uint32_t rank);

/* Breaks the reduction, because this rank ends. Any thread may call this, beside one that sums. */
void fd_reduction_leave(fd_reduction_t *r);

/* Writes why the reduction is broken to text [bytes], as a sentence that names the rank. False if it is not. */
bool fd_reduction_error(const fd_reduction_t *r, char *text, size_t bytes);
