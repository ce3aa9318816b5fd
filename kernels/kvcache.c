#include "kvcache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define FAIL(status, ...) (snprintf(err, err_len, __VA_ARGS__), (status))

fd_status_t fd_kvcache_init(fd_kvcache_t *kv, const fd_geometry_t *g, fd_kv_dtype_t dtype, uint32_t n_pages, uint32_t max_seqs,
                            char *err, size_t err_len) {
    memset(kv, 0, sizeof *kv);
    kv->n_layers = g->n_layers;
    kv->n_kv_heads = g->n_kv_heads;
    kv->n_pages = n_pages;
    kv->max_seqs = max_seqs;
    kv->chunk_bytes = fd_kv_chunk_bytes(dtype, g->head_size);
    kv->arena_bytes = (size_t)n_pages * g->n_layers * g->n_kv_heads * kv->chunk_bytes;
    void *arena = mmap(NULL, kv->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) return FAIL(FD_INTERNAL, "cannot map %zu bytes for the KV-cache", kv->arena_bytes);
    madvise(arena, kv->arena_bytes, MADV_HUGEPAGE); /* where it is not to be had, small pages do */
    kv->arena = arena;
    kv->seqs = calloc(max_seqs, sizeof *kv->seqs);
    kv->refs = calloc(n_pages, sizeof *kv->refs);
    kv->free_pages = malloc(n_pages * sizeof *kv->free_pages);
    if (!kv->seqs || !kv->refs || !kv->free_pages) {
        fd_kvcache_destroy(kv);
        return FAIL(FD_INTERNAL, "no memory for the books of %u pages and %u sequences", n_pages, max_seqs);
    }
    for (uint32_t i = 0; i < n_pages; i++) kv->free_pages[i] = n_pages - 1 - i; /* page 0 comes off first */
    kv->n_free = n_pages;
    return FD_OK;
}

void fd_kvcache_destroy(fd_kvcache_t *kv) {
    for (uint32_t i = 0; kv->seqs && i < kv->max_seqs; i++) free(kv->seqs[i].pages);
    free(kv->seqs);
    free(kv->refs);
    free(kv->free_pages);
    if (kv->arena) munmap(kv->arena, kv->arena_bytes);
    memset(kv, 0, sizeof *kv);
}

static bool reserve_list(fd_seq_t *s, uint32_t n_pages) {
    if (n_pages <= s->capacity) return true;
    uint32_t capacity = s->capacity ? s->capacity : 4;
    while (capacity < n_pages) capacity *= 2;
    uint32_t *pages = realloc(s->pages, capacity * sizeof *pages);
    if (!pages) return false;
    s->pages = pages;
    s->capacity = capacity;
    return true;
}

/* The caller has made sure that there is one. */
static uint32_t take_page(fd_kvcache_t *kv) {
    uint32_t page = kv->free_pages[--kv->n_free];
    kv->refs[page] = 1;
    return page;
}

static void drop_page(fd_kvcache_t *kv, uint32_t page) {
    if (--kv->refs[page])
        kv->shared_refs--;
    else
        kv->free_pages[kv->n_free++] = page;
}

/* Drops pages from the end, so that they come off the free list again in the sequence's order. */
static void shrink(fd_kvcache_t *kv, fd_seq_t *s, uint32_t length) {
    uint32_t keep = fd_pages_for(length);
    while (s->n_pages > keep) drop_page(kv, s->pages[--s->n_pages]);
    s->length = length;
    if (!length) {
        free(s->pages);
        s->pages = NULL;
        s->capacity = 0;
        kv->n_seqs--;
    }
}

static void copy_page(fd_kvcache_t *kv, uint32_t dst, uint32_t src) {
    for (uint32_t layer = 0; layer < kv->n_layers; layer++)
        memcpy(fd_kv_chunk(kv, layer, dst, 0), fd_kv_chunk(kv, layer, src, 0), kv->n_kv_heads * kv->chunk_bytes);
}

static fd_status_t find(fd_kvcache_t *kv, uint32_t seq, uint32_t tag, fd_seq_t **out, char *err, size_t err_len) {
    if (seq >= kv->max_seqs) return FAIL(FD_BAD_SEQUENCE, "sequence %u is outside the lease of %u", seq, kv->max_seqs);
    fd_seq_t *s = &kv->seqs[seq];
    if (s->length && s->tag != tag)
        return FAIL(FD_BAD_SEQUENCE, "sequence %u has tag %u, not %u", seq, s->tag, tag);
    *out = s;
    return FD_OK;
}

fd_status_t fd_kvcache_free(fd_kvcache_t *kv, uint32_t seq, uint32_t tag, char *err, size_t err_len) {
    fd_seq_t *s;
    fd_status_t status = find(kv, seq, tag, &s, err, err_len);
    if (status == FD_OK && s->length) shrink(kv, s, 0);
    return status;
}

fd_status_t fd_kvcache_trim(fd_kvcache_t *kv, uint32_t seq, uint32_t tag, uint32_t length, char *err, size_t err_len) {
    fd_seq_t *s;
    fd_status_t status = find(kv, seq, tag, &s, err, err_len);
    if (status != FD_OK) return status;
    if (length > s->length)
        return FAIL(FD_BAD_SEQUENCE, "sequence %u has %u tokens, cannot be trimmed to %u", seq, s->length, length);
    if (s->length) shrink(kv, s, length);
    return FD_OK;
}

fd_status_t fd_kvcache_fork(fd_kvcache_t *kv, uint32_t src, uint32_t src_tag, uint32_t dst, uint32_t dst_tag, uint32_t length,
                            char *err, size_t err_len) {
    fd_seq_t *from, *to;
    fd_status_t status = find(kv, src, src_tag, &from, err, err_len);
    if (status != FD_OK) return status;
    if (dst >= kv->max_seqs) return FAIL(FD_BAD_SEQUENCE, "sequence %u is outside the lease of %u", dst, kv->max_seqs);
    to = &kv->seqs[dst];
    if (to->length) return FAIL(FD_BAD_SEQUENCE, "sequence %u is not empty, it has %u tokens", dst, to->length);
    if (length < 1 || length > from->length)
        return FAIL(FD_BAD_SEQUENCE, "sequence %u has %u tokens, cannot share %u", src, from->length, length);
    uint32_t whole = length / FD_PAGE_TOKENS;
    bool cut = length % FD_PAGE_TOKENS != 0;
    if (cut && !kv->n_free) return FAIL(FD_OUT_OF_PAGES, "no free page of %u for the page that a fork cuts", kv->n_pages);
    if (whole > FD_MAX_SHARED_REFS - kv->shared_refs)
        return FAIL(FD_OUT_OF_PAGES, "forks would share pages more than %u times", FD_MAX_SHARED_REFS);
    if (!reserve_list(to, whole + cut)) return FAIL(FD_INTERNAL, "no memory for a list of %u pages", whole + cut);
    for (uint32_t i = 0; i < whole; i++) {
        to->pages[i] = from->pages[i];
        kv->refs[to->pages[i]]++;
    }
    kv->shared_refs += whole;
    if (cut) {
        to->pages[whole] = take_page(kv);
        copy_page(kv, to->pages[whole], from->pages[whole]);
    }
    to->n_pages = whole + cut;
    to->length = length;
    to->tag = dst_tag;
    kv->n_seqs++;
    return FD_OK;
}

static fd_status_t check_entry(fd_kvcache_t *kv, const fd_row_t *r, uint32_t i, char *err, size_t err_len) {
    if (r->seq >= kv->max_seqs)
        return FAIL(FD_BAD_TABLE, "entry %u: sequence %u is outside the lease of %u", i, r->seq, kv->max_seqs);
    fd_seq_t *s = &kv->seqs[r->seq];
    if (s->mark == kv->mark) return FAIL(FD_BAD_TABLE, "entry %u: sequence %u is named twice", i, r->seq);
    s->mark = kv->mark;
    if (s->length && r->tag != s->tag)
        return FAIL(FD_BAD_SEQUENCE, "entry %u: sequence %u has tag %u, not %u", i, r->seq, s->tag, r->tag);
    if (r->pos != s->length)
        return FAIL(FD_BAD_SEQUENCE, "entry %u: sequence %u has %u tokens, not %u", i, r->seq, s->length, r->pos);
    if ((uint64_t)r->pos + r->n_rows > (uint64_t)kv->n_pages * FD_PAGE_TOKENS)
        return FAIL(FD_OUT_OF_PAGES, "entry %u: sequence %u would have %llu tokens, the lease holds %llu", i, r->seq,
                    (unsigned long long)r->pos + r->n_rows, (unsigned long long)kv->n_pages * FD_PAGE_TOKENS);
    return FD_OK;
}

/* The page that receives the first new row, if the sequence shares it and must have a copy of its own. */
static bool appends_to_shared(const fd_kvcache_t *kv, const fd_seq_t *s) {
    return s->length % FD_PAGE_TOKENS && kv->refs[s->pages[s->length / FD_PAGE_TOKENS]] > 1;
}

fd_status_t fd_kvcache_check(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, char *err, size_t err_len) {
    if (!++kv->mark) { /* once in 2^32 steps old marks could be taken for new ones */
        for (uint32_t i = 0; i < kv->max_seqs; i++) kv->seqs[i].mark = 0;
        kv->mark = 1;
    }
    uint64_t needed = 0;
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_status_t status = check_entry(kv, &table[i], i, err, err_len);
        if (status != FD_OK) return status;
        const fd_seq_t *s = &kv->seqs[table[i].seq];
        /* Two sequences of a step that share the page both get a copy; that is one more than needed, and rare. */
        needed += fd_pages_for((uint64_t)s->length + table[i].n_rows) - s->n_pages + appends_to_shared(kv, s);
    }
    if (needed > kv->n_free)
        return FAIL(FD_OUT_OF_PAGES, "the step needs %llu pages, %u of %u are free", (unsigned long long)needed, kv->n_free,
                    kv->n_pages);
    return FD_OK;
}

fd_status_t fd_kvcache_append(fd_kvcache_t *kv, const fd_row_t *table, uint32_t n_entries, char *err, size_t err_len) {
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_seq_t *s = &kv->seqs[table[i].seq];
        if (!reserve_list(s, fd_pages_for((uint64_t)s->length + table[i].n_rows)))
            return FAIL(FD_INTERNAL, "no memory for the page list of sequence %u", table[i].seq);
    }
    for (uint32_t i = 0; i < n_entries; i++) {
        fd_seq_t *s = &kv->seqs[table[i].seq];
        if (appends_to_shared(kv, s)) {
            uint32_t *page = &s->pages[s->length / FD_PAGE_TOKENS], own = take_page(kv);
            copy_page(kv, own, *page);
            drop_page(kv, *page);
            *page = own;
        }
        if (!s->length) {
            s->tag = table[i].tag;
            kv->n_seqs++;
        }
        s->length += table[i].n_rows;
        while (s->n_pages < fd_pages_for(s->length)) s->pages[s->n_pages++] = take_page(kv);
    }
    return FD_OK;
}
