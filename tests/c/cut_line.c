/* Cuts random steps into items for any number of threads, without doing them: every item lies within the work, and
 * together they are all of it, each part once.
 *
 * Usage: cut_line ROUNDS SEED. Prints the number of steps that were cut. */
#include "engine/plan.c"

/* The cache's only use of the kernels, which need not be linked for this. */
size_t fd_kv_chunk_bytes(fd_kv_dtype_t dtype, uint32_t head_size, uint32_t v_size, bool v_in_k) {
    (void)dtype, (void)v_in_k;
    return head_size;
}

static uint64_t state = 1;

/* A pseudo-random number below `bound` (xorshift64). */
static uint64_t below(uint64_t bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 16) % bound;
}

enum { MAX_ENTRIES = 300, ITEMS_A_THREAD = 8 };

static void check(bool good, const char *what, uint32_t threads) {
    if (good) return;
    fprintf(stderr, "%s (%u threads)\n", what, threads);
    exit(1);
}

/* A point is the end of the line, or lies in an entry, at a boundary of its spans, at a page where a span may be cut.
 */
static void check_point(const fd_plan_t *plan, const fd_plan_shape_t *shape, fd_point_t p, uint32_t threads) {
    if (p.entry == plan->n_entries) {
        check(!p.head && !p.page, "a point behind the last entry", threads);
        return;
    }
    check(p.entry < plan->n_entries, "an entry that the step does not have", threads);
    const fd_entry_t *e = &plan->entries[p.entry];
    check(p.head < shape->n_kv_heads && p.head % e->heads == 0, "a head at which no span begins", threads);
    const span_t s = span_of(e, shape);
    check(!p.page || (p.page > s.first && p.page <= s.last), "a page at which the span is not cut", threads);
}

static bool before(fd_point_t a, fd_point_t b) {
    if (a.entry != b.entry) return a.entry < b.entry;
    return a.head != b.head ? a.head < b.head : a.page < b.page;
}

static void check_items(const fd_plan_t *plan, const fd_plan_shape_t *shape, uint32_t threads) {
    fd_point_t at = {0, 0, 0};
    check(plan->n_items >= 1 && plan->n_items <= shape->max_items, "a number of items out of bounds", threads);
    for (uint32_t i = 0; i < plan->n_items; i++) {
        const fd_item_t *item = &plan->items[i];
        check(fd_same_span(item->begin, at) && item->begin.page == at.page, "an item that leaves a gap", threads);
        check(before(item->begin, item->end), "an item without work", threads);
        check_point(plan, shape, item->end, threads);
        check(item->begin.page ? item->cut < i : item->cut == FD_NO_CUT, "a piece without its span's owner", threads);
        if (item->begin.page)
            check(fd_same_span(plan->items[item->cut].end, item->begin) && plan->items[item->cut].n_pieces > 1,
                  "a piece that its span's owner does not count", threads);
        at = item->end;
    }
    check(at.entry == plan->n_entries, "items that end before the work does", threads);
}

int main(int argc, char **argv) {
    const uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 1000;
    if (argc > 2) state = strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15u | 1;
    for (uint32_t round = 0; round < rounds; round++) {
        static const uint32_t groups[] = {1, 2, 4, 7, 8, 16}, kv_heads[] = {1, 2, 3, 8, 32, 128};
        const uint32_t threads = 1 + round % 512;
        fd_plan_shape_t shape = {.n_kv_heads = kv_heads[below(6)],
                                 .group = groups[below(6)],
                                 .head_size = 128,
                                 .v_size = 128,
                                 .q_block = 1 + (uint32_t)below(16),
                                 .window = below(3) ? 0 : 1 + (uint32_t)below(4096),
                                 .max_items = threads > 1 ? threads * ITEMS_A_THREAD : 1};
        fd_step_t step;
        if (fd_step_init(&step, MAX_ENTRIES, 1, &shape, 1, (fd_part_t){0, 1}) != FD_OK) return 2;
        fd_plan_t *plan = step.plans;
        plan->n_entries = 1 + (uint32_t)below(below(2) ? 4 : MAX_ENTRIES);
        const uint32_t longest = 1u << below(20);
        uint32_t row = 0;
        for (uint32_t i = 0; i < plan->n_entries; i++) {
            fd_row_t r = {.pos = (uint32_t)below(longest),
                          .n_rows = below(4) ? 1 : 1 + (uint32_t)below(600),
                          .flags = below(5) ? FD_ROW_ATTEND : 0};
            plan->entries[i] = (fd_entry_t){.pos = r.pos,
                                            .n_cached = r.pos,
                                            .n_kept = r.n_rows,
                                            .n_rows = r.n_rows,
                                            .row = row,
                                            .attend = r.flags & FD_ROW_ATTEND,
                                            .heads = heads_of_span(&r, &shape)};
            row += r.n_rows;
        }
        cut_line(plan, &shape);
        check_items(plan, &shape, threads);
        fd_step_destroy(&step);
    }
    printf("%u steps cut\n", rounds);
    return 0;
}
