/* Does random steps twice, on caches of their own: once item by item, and once in random order, with a stop after every
 * unit and another thread at every turn. The O rows of both must be the same, bit for bit, and equal attention in
 * double precision. Units are made small, so that short sequences have many. Some sequences begin as forks, so that
 * steps copy pages. Of a layer that selects tokens only the bits are compared.
 *
 * Usage: stops STEPS. Prints the number of steps, whether a block has been merged of several units, whether pages have
 * been copied, and the number of stops. */
#define UNIT_BYTES ((size_t)2048)
#define UNIT_WORK (1ull << 30)
#define FD_INDEX_PAGES 2u
#include "engine/plan.c"
#include "engine/selection.c"
#include "engine/work.c"
#include "engine/work_init.c"

#include "cache/arena.h"
#include "require.h"
#include "scalar_only.h"

enum { HEAD = 8, GROUP = 4, KV_HEADS = 2, SEQUENCES = 6, MAX_TOKENS = 1500, MAX_ROWS = 256, THREADS = 3, PAGES = 80 };
static const fd_geometry_t dense = {1, MAX_ROWS, 1, GROUP * KV_HEADS, KV_HEADS, HEAD, FD_ACT_FP32, HEAD, 0, 0, 0, 0},
                           sparse = {1, MAX_ROWS, 1, GROUP, 1, HEAD, FD_ACT_FP32, HEAD, 1, 3, 16, 100};
static uint64_t state = 1, n_stops, n_merged, n_copied;
static fd_error_t error;

/* A pseudo-random number below `bound` (xorshift64). */
static uint32_t below(uint32_t bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 16) % bound);
}

typedef struct {
    fd_kvcache_t kv;
    fd_work_t work;
    fd_step_t step;
    uint8_t *slot;
} side_t;

static void open_side(side_t *side, const fd_geometry_t *g, uint32_t window, uint32_t threads) {
    const fd_layer_t layer = {.heads = fd_geometry_heads(g), .window = window, .selection = g->index_topk > 0};
    const fd_stored_t stored = {layer.heads, window, g->index_size};
    REQUIRE(fd_kvcache_init(&side->kv, &stored, 1, FD_KV_FP32, PAGES, PAGES, SEQUENCES, &error) == FD_OK &&
            fd_arena_map(&side->kv, FD_HUGE_OFF, &error) == FD_OK);
    REQUIRE(fd_work_init(&side->work, g, &side->kv, FD_KV_FP32, FD_ISA_SCALAR, 0.3f, &layer, (fd_part_t){0, 1},
                         threads) == FD_OK);
    REQUIRE(fd_step_init(&side->step, MAX_ROWS, side->kv.planes.n_sections, side->work.shapes, 1, (fd_part_t){0, 1}) ==
            FD_OK);
    side->slot = aligned_alloc(FD_REGION_PAGE, side->work.layout.slot_bytes);
    REQUIRE(side->slot);
}

static void close_side(side_t *side) {
    fd_step_destroy(&side->step);
    fd_work_destroy(&side->work);
    fd_kvcache_destroy(&side->kv);
    free(side->slot);
}

static void plan(side_t *side, const fd_row_t *table, uint32_t n, uint32_t rows, uint32_t attending) {
    side->step.n_entries = n;
    side->step.n_rows = rows;
    side->step.n_attend_rows = attending;
    memcpy(side->step.table, table, n * sizeof *table);
    REQUIRE(fd_step_plan(&side->step, &side->kv, side->work.shapes, &error) == FD_OK);
}

/* Does the copies of the step, cut into `n_items`, each with or without stops. A sequence is freed meanwhile, if it is
 * not FD_NO_PAGE; its pages that are being copied are not free before all copies are done. */
static void copy_pages(side_t *side, uint32_t n_items, bool stops, uint32_t freed) {
    const uint64_t word = 1;
    const fd_stop_t stop = {stops ? &word : NULL, 2, 0};
    fd_kvcache_t *kv = &side->kv;
    for (uint32_t i = 0; side->step.n_copies && i < n_items; i++) {
        fd_work_begin(&side->step, i);
        while (!fd_work_copy(&side->work, &side->step, i, n_items, &stop)) n_stops++;
    }
    n_copied += side->step.n_copies;
    if (freed != FD_NO_PAGE) REQUIRE(fd_kvcache_free(kv, freed, 7, &error) == FD_OK);
    for (uint32_t i = 0; i < side->step.n_copies; i++) {
        const fd_page_copy_t c = side->step.copies[i];
        REQUIRE(!(kv->free.stretches[c.src >> kv->free.order].free >> (c.src & ((1u << kv->free.order) - 1)) & 1));
    }
    fd_kvcache_end_copies(kv, side->step.copies, side->step.n_copies);
    uint32_t held = 0;
    for (uint32_t page = 0; page < PAGES; page++) held += kv->refs[page] != 0;
    REQUIRE(held + kv->free.n_free == PAGES);
}

static uint64_t do_in_one_go(side_t *side) {
    const fd_stop_t never = {NULL, 0, 0};
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < side->step.plan->n_items; i++) {
        fd_work_begin(&side->step, i);
        REQUIRE(fd_work_advance(&side->work, &side->step, side->slot, 0, i, 0, &never, &bytes));
    }
    return bytes;
}

static uint64_t do_with_stops(side_t *side) {
    const uint64_t word = 1;
    const fd_stop_t at_once = {&word, 2, 0};
    uint32_t left = side->step.plan->n_items, *items = malloc(left * sizeof *items);
    uint64_t bytes = 0;
    REQUIRE(items);
    for (uint32_t i = 0; i < left; i++) {
        items[i] = i;
        fd_work_begin(&side->step, i);
    }
    while (left) {
        const uint32_t i = below(left);
        if (fd_work_advance(&side->work, &side->step, side->slot, 0, items[i], below(THREADS), &at_once, &bytes))
            items[i] = items[--left];
        else n_stops++;
    }
    free(items);
    return bytes;
}

/* Everything that has been cached, to attend to it in double precision. */
static float cached[2][SEQUENCES][MAX_TOKENS][KV_HEADS][HEAD];

static void check_row(const float *q, const float *o, uint32_t seq, uint32_t pos, uint32_t window) {
    for (uint32_t h = 0; h < GROUP * KV_HEADS; h++, q += HEAD, o += HEAD) {
        double sum = 0, want[HEAD] = {0};
        for (uint32_t t = window && pos >= window ? pos - window + 1 : 0; t <= pos; t++) {
            double score = 0;
            for (uint32_t d = 0; d < HEAD; d++) score += (double)0.3f * q[d] * cached[0][seq][t][h / GROUP][d];
            sum += exp(score);
            for (uint32_t d = 0; d < HEAD; d++) want[d] += exp(score) * cached[1][seq][t][h / GROUP][d];
        }
        for (uint32_t d = 0; d < HEAD; d++) REQUIRE(fabs(want[d] / sum - o[d]) < 1e-4);
    }
}

static void random_step(side_t *a, side_t *b, uint32_t *lengths, uint32_t *floors, uint32_t window) {
    fd_row_t table[SEQUENCES];
    const uint32_t first = below(SEQUENCES), n = 1 + below(SEQUENCES), attending = below(n + 1);
    uint32_t rows = 0, attend_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t seq = (first + i) % SEQUENCES, most = (MAX_ROWS - rows) / (n - i);
        uint32_t take = 1 + (below(2) ? below(most) : 0);
        if (lengths[seq] + take > MAX_TOKENS || !below(6)) {
            const uint32_t other = (seq + 1) % SEQUENCES, room = MAX_TOKENS - take,
                           most_kept = lengths[other] < room ? lengths[other] : room;
            uint32_t keep = below(most_kept + 1);
            if (keep < floors[other]) keep = floors[other] <= most_kept ? floors[other] : 0;
            floors[seq] = keep ? floors[other] : 0;
            for (side_t *side = a; side; side = side == a ? b : NULL) {
                REQUIRE(fd_kvcache_free(&side->kv, seq, 7, &error) == FD_OK);
                REQUIRE(!keep || fd_kvcache_fork(&side->kv, other, 7, seq, 7, keep, &error) == FD_OK);
            }
            for (uint32_t k = 0; k < 2; k++) memcpy(cached[k][seq], cached[k][other], sizeof cached[k][seq]);
            lengths[seq] = keep;
        }
        const uint32_t slides = below(3) ? 0 : FD_ROW_SLIDE;
        if (slides) floors[seq] = lengths[seq];
        table[i] = (fd_row_t){seq, 7, lengths[seq], take, slides | (i < attending ? FD_ROW_ATTEND : 0), 0};
        rows += take;
        if (i < attending) attend_rows += take;
    }
    const fd_layout_t *y = &a->work.layout;
    float *q = (float *)(a->slot + y->q), *kv = (float *)(a->slot + y->kv);
    for (size_t i = 0; i < attend_rows * y->q_row_bytes / sizeof *q; i++) q[i] = (float)below(2001) / 1000 - 1;
    for (size_t i = 0; i < rows * y->kv_row_bytes / sizeof *kv; i++) kv[i] = (float)below(2001) / 1000 - 1;
    memcpy(b->slot, a->slot, y->slot_bytes);
    plan(a, table, n, rows, attend_rows);
    plan(b, table, n, rows, attend_rows);
    const uint32_t absent = n < SEQUENCES && !below(4) ? (first + n) % SEQUENCES : FD_NO_PAGE;
    copy_pages(a, 1, false, absent);
    copy_pages(b, 1 + below(3), true, absent);
    if (absent != FD_NO_PAGE) lengths[absent] = floors[absent] = 0;
    REQUIRE(do_in_one_go(a) == do_with_stops(b));
    const float *oa = (float *)(a->slot + y->o), *ob = (float *)(b->slot + y->o);
    REQUIRE(!memcmp(oa, ob, attend_rows * y->o_row_bytes));
    for (uint32_t i = 0, row = 0; i < n && !a->work.g.index_topk; i++)
        for (uint32_t j = 0; j < table[i].n_rows; j++, row++) {
            const uint32_t pos = table[i].pos + j, seq = table[i].seq_index;
            for (uint32_t k = 0; k < 2; k++)
                memcpy(cached[k][seq][pos], kv + (2 * row + k) * KV_HEADS * HEAD, sizeof cached[k][seq][pos]);
            if (i < attending)
                check_row(q + row * GROUP * KV_HEADS * HEAD, oa + row * GROUP * KV_HEADS * HEAD, seq, pos, window);
            if (i < attending && fd_pages_for(pos + 1u) > a->step.plan->entries[i].unit) n_merged++;
        }
    for (uint32_t i = 0; i < n; i++) lengths[table[i].seq_index] += table[i].n_rows;
}

int main(int argc, char **argv) {
    const uint32_t steps = argc > 1 ? (uint32_t)atoi(argv[1]) : 100;
    static const uint32_t windows[] = {0, 0, 300}, threads[] = {1, 2, THREADS};
    for (uint32_t done = 0; done < steps;) {
        const fd_geometry_t *g = below(2) ? &dense : &sparse;
        const uint32_t window = g == &dense ? windows[below(3)] : 0, n_threads = threads[below(3)];
        static side_t a, b;
        uint32_t lengths[SEQUENCES] = {0}, floors[SEQUENCES] = {0};
        open_side(&a, g, window, n_threads);
        open_side(&b, g, window, THREADS);
        b.work.shapes[0].max_items = a.work.shapes[0].max_items; /* so that both are cut alike */
        for (uint32_t i = 0; i < 40 && done < steps; i++, done++) random_step(&a, &b, lengths, floors, window);
        close_side(&a);
        close_side(&b);
    }
    printf("%u steps, %d, %d, %llu stops\n", steps, n_merged > 0, n_copied > 0, (unsigned long long)n_stops);
    return 0;
}
