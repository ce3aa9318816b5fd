#include "kvcache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "error.h"

/* log2 of the pages in a stretch: as many as one huge page holds of one plane. */
static uint32_t stretch_order(const fd_kvcache_t *kv) {
    uint32_t order = 0;
    while (order < FD_MAX_STRETCH_ORDER && kv->planes.plane_bytes << (order + 1) <= FD_TRANSPARENT_BYTES) order++;
    return order;
}

fd_status_t fd_kvcache_init(fd_kvcache_t *kv, const fd_stored_t *layers, uint32_t n_layers, fd_kv_dtype_t dtype,
                            uint32_t n_pages, uint32_t max_pages, uint32_t max_seqs, fd_error_t *error) {
    memset(kv, 0, sizeof *kv);
    kv->stores = malloc(n_layers * sizeof *kv->stores);
    if (!kv->stores) return FD_FAIL(FD_INTERNAL, "no memory to keep track of %u layers", n_layers);
    kv->planes = fd_planes_of(layers, n_layers, dtype, kv->stores);
    for (uint32_t i = 0; i < n_layers; i++) kv->page_chunks += layers[i].heads.n_kv_heads;
    kv->page_chunks = (kv->page_chunks + kv->planes.n_sections - 1) / kv->planes.n_sections;
    kv->n_pages = n_pages;
    kv->max_pages = max_pages;
    kv->max_seqs = max_seqs;
    kv->plane_stride = n_pages * kv->planes.plane_bytes;
    kv->sequences = calloc(max_seqs, sizeof *kv->sequences);
    kv->refs = calloc(max_pages, sizeof *kv->refs);
    kv->pins = calloc(max_pages, sizeof *kv->pins);
    if (fd_pages_init(&kv->free, n_pages, max_pages, stretch_order(kv)) && kv->sequences && kv->refs && kv->pins)
        return FD_OK;
    fd_kvcache_destroy(kv);
    return FD_FAIL(FD_INTERNAL, "no memory to keep track of %u pages and %u sequences", max_pages, max_seqs);
}

void fd_kvcache_destroy(fd_kvcache_t *kv) {
    for (uint32_t i = 0; kv->sequences && i < kv->max_seqs; i++) free(kv->sequences[i].pages);
    free(kv->sequences);
    free(kv->refs);
    free(kv->pins);
    free(kv->stores);
    fd_pages_destroy(&kv->free);
    if (kv->arena) fd_memory_unmap(kv->arena, kv->arena_bytes);
    memset(kv, 0, sizeof *kv);
}

void fd_kvcache_grow(fd_kvcache_t *kv, uint32_t n_pages) {
    fd_pages_grow(&kv->free, n_pages);
    __atomic_store_n(&kv->n_pages, n_pages, __ATOMIC_RELEASE);
}

static bool reserve_list(const fd_kvcache_t *kv, fd_sequence_t *s, uint32_t n_blocks) {
    if (n_blocks <= s->capacity) return true;
    uint64_t capacity = s->capacity ? s->capacity : 4;
    while (capacity < n_blocks) capacity *= 2;
    uint32_t *pages = realloc(s->pages, capacity * kv->planes.n_sections * sizeof *pages);
    if (!pages) return false;
    s->pages = pages;
    s->capacity = (uint32_t)capacity;
    return true;
}

/* The place of a sequence's page in its list. */
static uint32_t *page_at(const fd_kvcache_t *kv, const fd_sequence_t *s, uint32_t block, uint32_t section) {
    return s->pages + (size_t)block * kv->planes.n_sections + section;
}

/* Takes a free page for a block and section of the sequence. The caller has made sure that a page is free. */
static uint32_t take_page(fd_kvcache_t *kv, const fd_sequence_t *s, uint32_t block, uint32_t section) {
    const uint32_t page = fd_pages_take(&kv->free, block ? *page_at(kv, s, block - 1, section) : FD_NO_PAGE);
    kv->refs[page] = 1;
    return page;
}

/* Takes free pages so that the sequence has `n_blocks` blocks. */
static void take_blocks(fd_kvcache_t *kv, fd_sequence_t *s, uint32_t n_blocks) {
    for (; s->n_blocks < n_blocks; s->n_blocks++)
        for (uint32_t section = 0; section < kv->planes.n_sections; section++)
            *page_at(kv, s, s->n_blocks, section) = take_page(kv, s, s->n_blocks, section);
}

static void drop_page(fd_kvcache_t *kv, uint32_t page) {
    if (--kv->refs[page]) kv->shared_refs--;
    else if (!kv->pins[page]) fd_pages_put(&kv->free, page);
}

/* The sequence, which holds no pages, is empty. */
static void forget_list(fd_kvcache_t *kv, fd_sequence_t *s) {
    free(s->pages);
    s->pages = NULL;
    s->capacity = s->floor = s->dropped = 0;
    kv->n_seqs--;
}

/* Drops the last page first, so that the first page's stretch is the next to be taken. */
static void shrink(fd_kvcache_t *kv, fd_sequence_t *s, uint32_t length) {
    const uint32_t keep = fd_pages_for(length);
    for (; s->n_blocks > keep; s->n_blocks--)
        for (uint32_t i = kv->planes.n_sections; i--;) {
            const uint32_t page = *page_at(kv, s, s->n_blocks - 1, i);
            if (page == FD_NO_PAGE) kv->n_given_back--;
            else drop_page(kv, page);
        }
    s->length = length;
    if (!length) forget_list(kv, s);
}

static void give_page_back(fd_kvcache_t *kv, const fd_sequence_t *s, uint32_t block, uint32_t section) {
    uint32_t *page = page_at(kv, s, block, section);
    drop_page(kv, *page);
    *page = FD_NO_PAGE;
    kv->n_given_back++;
}

/* Raises the floor of a sequence and gives back the pages that no row from it on sees. */
static void slide(fd_kvcache_t *kv, fd_sequence_t *s, uint32_t floor) {
    const uint32_t reach = kv->planes.reach, end = fd_first_block(floor, reach);
    for (uint32_t block = fd_first_block(s->floor, reach); block < end; block++)
        for (uint32_t i = 0; i < kv->planes.n_limited; i++) give_page_back(kv, s, block, i);
    s->floor = floor;
}

/* Whether rows may come at position `pos` of the sequence. */
static bool is_gone(const fd_sequence_t *s, uint32_t pos) { return pos < s->floor; }

static fd_status_t find(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, fd_sequence_t **out, fd_error_t *error) {
    if (seq_index >= kv->max_seqs)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u is outside the lease of %u", seq_index, kv->max_seqs);
    fd_sequence_t *s = &kv->sequences[seq_index];
    if (s->length && s->tag != tag)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has tag %u, not %u", seq_index, s->tag, tag);
    *out = s;
    return FD_OK;
}

fd_status_t fd_kvcache_free(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, fd_error_t *error) {
    fd_sequence_t *s;
    fd_status_t status = find(kv, seq_index, tag, &s, error);
    if (status == FD_OK && s->length) shrink(kv, s, 0);
    return status;
}

/* Begins to mark sequences with a number that none has. */
static void new_mark(fd_kvcache_t *kv) {
    if (++kv->mark) return;
    /* The counter wrapped around: old marks could pass for the new one. */
    for (uint32_t i = 0; i < kv->max_seqs; i++) kv->sequences[i].mark = 0;
    kv->mark = 1;
}

void fd_kvcache_free_others(fd_kvcache_t *kv, const uint32_t *kept, uint32_t n_kept) {
    new_mark(kv);
    for (uint32_t i = 0; i < n_kept; i++)
        if (kept[i] < kv->max_seqs) kv->sequences[kept[i]].mark = kv->mark;
    for (uint32_t i = 0; i < kv->max_seqs; i++) {
        fd_sequence_t *s = &kv->sequences[i];
        if (s->length && s->mark != kv->mark) shrink(kv, s, 0);
    }
}

fd_status_t fd_kvcache_trim(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error) {
    fd_sequence_t *s;
    fd_status_t status = find(kv, seq_index, tag, &s, error);
    if (status != FD_OK) return status;
    if (length > s->length)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has %u tokens and cannot be trimmed to %u", seq_index, s->length,
                       length);
    if (length && is_gone(s, length))
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has given back pages and cannot be trimmed below %u tokens",
                       seq_index, s->floor);
    if (s->length) shrink(kv, s, length);
    return FD_OK;
}

fd_status_t fd_kvcache_fork(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                            uint32_t length, fd_error_t *error) {
    fd_sequence_t *from, *to;
    fd_status_t status = find(kv, src, src_tag, &from, error);
    if (status != FD_OK) return status;
    if (dst >= kv->max_seqs)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u is outside the lease of %u", dst, kv->max_seqs);
    to = &kv->sequences[dst];
    if (to->length) return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u is not empty: it has %u tokens", dst, to->length);
    if (length < 1 || length > from->length)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has %u tokens and cannot share %u", src, from->length, length);
    if (is_gone(from, length))
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u has given back pages and cannot share fewer than %u tokens", src,
                       from->floor);
    const uint32_t n_blocks = fd_pages_for(length);
    const uint64_t n = (uint64_t)n_blocks * kv->planes.n_sections;
    if (n > FD_MAX_SHARED_REFS - kv->shared_refs)
        return FD_FAIL(FD_OUT_OF_PAGES, "forks would share pages more than %u times", FD_MAX_SHARED_REFS);
    const uint64_t gone = (uint64_t)fd_first_block(from->floor, kv->planes.reach) * kv->planes.n_limited;
    if (gone > FD_MAX_GIVEN_BACK - kv->n_given_back)
        return FD_FAIL(FD_OUT_OF_PAGES, "more than %u pages would be given back", FD_MAX_GIVEN_BACK);
    if (!reserve_list(kv, to, n_blocks)) return FD_FAIL(FD_INTERNAL, "no memory for a list of %u blocks", n_blocks);
    for (uint64_t i = 0; i < n; i++) {
        to->pages[i] = from->pages[i];
        if (to->pages[i] == FD_NO_PAGE) {
            kv->n_given_back++;
            continue;
        }
        kv->refs[to->pages[i]]++;
        kv->shared_refs++;
    }
    to->n_blocks = n_blocks;
    to->length = length;
    to->floor = from->floor;
    to->tag = dst_tag;
    kv->n_seqs++;
    return FD_OK;
}

fd_status_t fd_kvcache_receive(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t length, fd_error_t *error) {
    if (seq_index >= kv->max_seqs)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u is outside the lease of %u", seq_index, kv->max_seqs);
    fd_sequence_t *s = &kv->sequences[seq_index];
    if (s->length && (s->tag != tag || s->length % FD_PAGE_TOKENS || s->floor))
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u is not empty: it has %u tokens", seq_index, s->length);
    if (length <= s->length)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u, which has %u tokens, is to receive no tokens", seq_index,
                       s->length);
    const uint32_t n_blocks = fd_pages_for(length), n_sections = kv->planes.n_sections;
    const uint64_t needed = (uint64_t)(n_blocks - s->n_blocks) * n_sections;
    if (needed > kv->free.n_free)
        return FD_FAIL(FD_OUT_OF_PAGES, "%u tokens need %llu pages, but %u of %u are free", length,
                       (unsigned long long)needed, kv->free.n_free, kv->n_pages);
    if (!reserve_list(kv, s, n_blocks)) return FD_FAIL(FD_INTERNAL, "no memory for a list of %u blocks", n_blocks);
    take_blocks(kv, s, n_blocks);
    if (!s->length) kv->n_seqs++;
    s->length = length;
    s->tag = tag;
    return FD_OK;
}

fd_status_t fd_kvcache_drop_blocks(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t n_blocks,
                                   fd_error_t *error) {
    fd_sequence_t *s;
    fd_status_t status = find(kv, seq_index, tag, &s, error);
    if (status != FD_OK) return status;
    if ((uint64_t)n_blocks * FD_PAGE_TOKENS > s->length || kv->planes.n_limited)
        return FD_FAIL(FD_BAD_SEQUENCE, "sequence %u, which has %u tokens, cannot give back %u blocks", seq_index,
                       s->length, n_blocks);
    const uint32_t n_sections = kv->planes.n_sections;
    if (n_blocks > s->dropped && (uint64_t)(n_blocks - s->dropped) * n_sections > FD_MAX_GIVEN_BACK - kv->n_given_back)
        return FD_FAIL(FD_OUT_OF_PAGES, "more than %u pages would be given back", FD_MAX_GIVEN_BACK);
    for (; s->dropped < n_blocks; s->dropped++)
        for (uint32_t i = 0; i < n_sections; i++) give_page_back(kv, s, s->dropped, i);
    s->floor = s->dropped * FD_PAGE_TOKENS;
    return FD_OK;
}

fd_status_t fd_kvcache_restore_blocks(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag,
                                      fd_error_t *error) {
    fd_sequence_t *from, *to;
    fd_status_t status = find(kv, src, src_tag, &from, error);
    if (status == FD_OK) status = find(kv, dst, dst_tag, &to, error);
    if (status != FD_OK) return status;
    if (from == to || !from->length || from->length % FD_PAGE_TOKENS || from->floor || from->n_blocks > to->dropped)
        return FD_FAIL(FD_BAD_SEQUENCE,
                       "sequence %u, which has %u tokens, cannot fill the %u blocks that sequence %u "
                       "has given back",
                       src, from->length, to->dropped, dst);
    const uint32_t n_sections = kv->planes.n_sections, n = from->n_blocks * n_sections;
    to->dropped -= from->n_blocks;
    to->floor = to->dropped * FD_PAGE_TOKENS;
    memcpy(page_at(kv, to, to->dropped, 0), from->pages, n * sizeof *from->pages);
    kv->n_given_back -= n;
    from->n_blocks = from->length = 0;
    forget_list(kv, from);
    return FD_OK;
}

fd_status_t fd_kvcache_pages(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, const uint32_t **pages, uint32_t *n,
                             fd_error_t *error) {
    fd_sequence_t *s;
    fd_status_t status = find(kv, seq_index, tag, &s, error);
    if (status != FD_OK) return status;
    *pages = s->pages;
    *n = s->n_blocks * kv->planes.n_sections;
    return FD_OK;
}

fd_status_t fd_kvcache_length(fd_kvcache_t *kv, uint32_t seq_index, uint32_t tag, uint32_t *length, fd_error_t *error) {
    fd_sequence_t *s;
    fd_status_t status = find(kv, seq_index, tag, &s, error);
    if (status == FD_OK) *length = s->length;
    return status;
}

/* The pages of a sequence after an entry, if its floor is `floor` then. */
static uint64_t fewest_pages(const fd_kvcache_t *kv, const fd_row_t *r, uint32_t floor) {
    const uint64_t n_blocks = fd_pages_for((uint64_t)r->pos + r->n_rows) -
                              (uint64_t)kv->sequences[r->seq_index].dropped;
    return n_blocks * kv->planes.n_sections - (uint64_t)fd_first_block(floor, kv->planes.reach) * kv->planes.n_limited;
}

static fd_status_t check_entry(fd_kvcache_t *kv, const fd_row_t *r, uint32_t i, fd_error_t *error) {
    if (r->seq_index >= kv->max_seqs)
        return FD_FAIL(FD_BAD_TABLE, "entry %u: sequence %u is outside the lease of %u", i, r->seq_index, kv->max_seqs);
    fd_sequence_t *s = &kv->sequences[r->seq_index];
    if (s->mark == kv->mark) return FD_FAIL(FD_BAD_TABLE, "entry %u: sequence %u is named twice", i, r->seq_index);
    s->mark = kv->mark;
    if (s->length && r->tag != s->tag)
        return FD_FAIL(FD_BAD_SEQUENCE, "entry %u: sequence %u has tag %u, not %u", i, r->seq_index, s->tag, r->tag);
    if (r->flags & FD_ROW_TRIM ? r->pos > s->length : r->pos != s->length)
        return FD_FAIL(FD_BAD_SEQUENCE, "entry %u: sequence %u has %u tokens, not %u", i, r->seq_index, s->length,
                       r->pos);
    if ((uint64_t)r->pos + r->n_rows > UINT32_MAX)
        return FD_FAIL(FD_BAD_TABLE, "entry %u: sequence %u would have %llu tokens, a length has 32 bits", i,
                       r->seq_index, (unsigned long long)r->pos + r->n_rows);
    if (is_gone(s, r->pos))
        return FD_FAIL(FD_BAD_SEQUENCE, "entry %u: sequence %u has given back pages that a row at %u sees", i,
                       r->seq_index, r->pos);
    const uint64_t held = fewest_pages(kv, r, r->flags & FD_ROW_SLIDE ? r->pos : s->floor);
    if (held > kv->n_pages)
        return FD_FAIL(FD_OUT_OF_PAGES, "entry %u: sequence %u would hold %llu pages, but the lease has %u", i,
                       r->seq_index, (unsigned long long)held, kv->n_pages);
    return FD_OK;
}

/* The page of a section that receives the token at `pos`, if another sequence shares it; else NULL. */
static uint32_t *shared_end(const fd_kvcache_t *kv, const fd_sequence_t *s, uint32_t pos, uint32_t section) {
    if (pos % FD_PAGE_TOKENS == 0) return NULL;
    uint32_t *page = page_at(kv, s, pos / FD_PAGE_TOKENS, section);
    return kv->refs[*page] > 1 ? page : NULL;
}

/* Whether dropping a page of the sequence makes it free now. */
static bool frees(const fd_kvcache_t *kv, const fd_sequence_t *s, uint32_t block, uint32_t section) {
    const uint32_t page = *page_at(kv, s, block, section);
    return page != FD_NO_PAGE && kv->refs[page] == 1 && !kv->pins[page];
}

/* The pages that an entry takes, less the pages that become free when its sequence is first cut to `pos` and slides. */
static int64_t pages_taken(const fd_kvcache_t *kv, const fd_sequence_t *s, const fd_row_t *r) {
    const uint32_t keep = fd_pages_for(r->pos), n_sections = kv->planes.n_sections, reach = kv->planes.reach;
    int64_t taken = (int64_t)(fd_pages_for((uint64_t)r->pos + r->n_rows) - keep) * n_sections;
    for (uint32_t block = keep; block < s->n_blocks; block++)
        for (uint32_t i = 0; i < n_sections; i++) taken -= frees(kv, s, block, i);
    if (!(r->flags & FD_ROW_SLIDE)) return taken;
    for (uint32_t block = fd_first_block(s->floor, reach); block < fd_first_block(r->pos, reach); block++)
        for (uint32_t i = 0; i < kv->planes.n_limited; i++) taken -= frees(kv, s, block, i);
    return taken;
}

fd_status_t fd_kvcache_check(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, fd_error_t *error) {
    new_mark(kv);
    fd_status_t status = FD_OK;
    int64_t needed = 0;
    uint64_t gone = kv->n_given_back;
    uint32_t checked = 0;
    for (; checked < n_entries; checked++) {
        status = check_entry(kv, &table[checked], checked, error);
        if (status != FD_OK) break;
        fd_sequence_t *s = &kv->sequences[table[checked].seq_index];
        needed += pages_taken(kv, s, &table[checked]);
        if (table[checked].flags & FD_ROW_SLIDE)
            gone += (uint64_t)(fd_first_block(table[checked].pos, kv->planes.reach) -
                               fd_first_block(s->floor, kv->planes.reach)) *
                    kv->planes.n_limited;
        s->copies = 0;
        for (uint32_t i = 0; table[checked].n_rows && i < kv->planes.n_sections; i++) {
            uint32_t *page = shared_end(kv, s, table[checked].pos, i);
            if (!page) continue;
            s->copies |= 1u << i;
            needed++;
            kv->refs[*page]--; /* so that the last of the entries that share the page needs no copy */
        }
    }
    while (checked--) {
        const fd_sequence_t *s = &kv->sequences[table[checked].seq_index];
        for (uint32_t i = 0; i < kv->planes.n_sections; i++)
            if (s->copies >> i & 1) kv->refs[*page_at(kv, s, table[checked].pos / FD_PAGE_TOKENS, i)]++;
    }
    if (status == FD_OK && gone > FD_MAX_GIVEN_BACK)
        return FD_FAIL(FD_OUT_OF_PAGES, "more than %u pages would be given back", FD_MAX_GIVEN_BACK);
    if (status == FD_OK && needed > (int64_t)kv->free.n_free)
        return FD_FAIL(FD_OUT_OF_PAGES, "the step needs %lld pages, but %u of %u are free", (long long)needed,
                       kv->free.n_free, kv->n_pages);
    return status;
}

fd_status_t fd_kvcache_append(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, fd_page_copy_t *copies,
                              uint32_t *n_copies, fd_error_t *error) {
    const uint32_t n_sections = kv->planes.n_sections;
    *n_copies = 0;
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_sequence_t *s = &kv->sequences[table[i].seq_index];
        if (!reserve_list(kv, s, fd_pages_for((uint64_t)table[i].pos + table[i].n_rows)))
            return FD_FAIL(FD_INTERNAL, "no memory for the page list of sequence %u", table[i].seq_index);
    }
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_sequence_t *s = &kv->sequences[table[i].seq_index];
        if (s->length > table[i].pos) shrink(kv, s, table[i].pos);
        /* A part of a sequence (engine/parts.h) may be cut to nothing, and that has freed its list. */
        if (!table[i].pos && !reserve_list(kv, s, fd_pages_for(table[i].n_rows)))
            return FD_FAIL(FD_INTERNAL, "no memory for the page list of sequence %u", table[i].seq_index);
        if (table[i].flags & FD_ROW_SLIDE) slide(kv, s, table[i].pos);
    }
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_sequence_t *s = &kv->sequences[table[i].seq_index];
        if (!table[i].n_rows) continue; /* another R-node keeps the entry's tokens (engine/parts.h) */
        for (uint32_t section = 0; section < n_sections; section++) {
            uint32_t *page = shared_end(kv, s, s->length, section);
            if (!page) continue;
            const uint32_t own = take_page(kv, s, s->n_blocks - 1, section);
            copies[(*n_copies)++] = (fd_page_copy_t){*page, own};
            kv->pins[*page]++;
            kv->pins[own]++;
            drop_page(kv, *page);
            *page = own;
        }
        if (!s->length) {
            s->tag = table[i].tag;
            kv->n_seqs++;
        }
        s->length += table[i].n_rows;
        take_blocks(kv, s, fd_pages_for(s->length));
    }
    return FD_OK;
}

static void unpin(fd_kvcache_t *kv, uint32_t page) {
    if (!--kv->pins[page] && !kv->refs[page]) fd_pages_put(&kv->free, page);
}

void fd_kvcache_end_copies(fd_kvcache_t *kv, const fd_page_copy_t *copies, uint32_t n_copies) {
    for (uint32_t i = 0; i < n_copies; i++) {
        unpin(kv, copies[i].src);
        unpin(kv, copies[i].dst);
    }
}
