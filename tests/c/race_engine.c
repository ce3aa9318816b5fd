/* Several S-nodes load an R-engine from threads of their own, for ThreadSanitizer to watch (tests/c/test_races.py).
 *
 * Each link has a thread that sends calls in two slots, short ones and long ones that must be interrupted, and a thread
 * that forks, trims, frees, lists and counts meanwhile. It forks the sequences that the calls append to, so these copy
 * pages; it frees only sequences of its own, because what a call reads of a sequence that is freed meanwhile is
 * undefined. Two of the three threads that send calls stand in for the R-engine's thread 0 while they wait; another
 * does so while the R-engine ends. Links come and go, some with calls in flight, and some are retired first. Every call
 * that a link waits for must be answered, and the sum of the O rows of a sequence whose V is 1 everywhere must be the
 * number of their elements.
 *
 * Usage: race_engine THREADS SECONDS. Goes on for these seconds, and until it has done enough of everything. Prints the
 * numbers of calls, control operations and links.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"
#include "require.h"
#include "s_side.h"
#include "scalar_only.h"

enum { HEAD = 16, GROUP = 4, KV_HEADS = 2, MAX_ROWS = 512, SLOTS = 2, LAYERS = 2, PAGES = 64, S_NODES = 3 };
enum { PER_SLOT = 4, OWN = 8, SEQUENCES = SLOTS * PER_SLOT + OWN }; /* OWN: sequences of the controlling thread */

static const fd_geometry_t geometry = {SLOTS, MAX_ROWS, LAYERS, GROUP * KV_HEADS, KV_HEADS, HEAD, FD_ACT_FP32, HEAD, 0,
                                       0,     0,        0};
static fd_engine_t *engine;
static fd_stand_in_t stand_in;
static time_t end;
static bool ended;                            /* atomic: the R-engine has ended */
static uint64_t n_calls, n_controls, n_links; /* atomic */

/* However slow the machine is, a run does enough to be worth watching. */
static bool over(void) {
    return time(NULL) >= end && __atomic_load_n(&n_calls, __ATOMIC_RELAXED) > 200 &&
           __atomic_load_n(&n_controls, __ATOMIC_RELAXED) > 1000 && __atomic_load_n(&n_links, __ATOMIC_RELAXED) > 5;
}

static uint32_t below(uint64_t *state, uint32_t bound) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return (uint32_t)((*state >> 16) % bound);
}

typedef struct {
    fd_link_t *link;
    void *region;
    uint64_t state, control_state; /* of each thread's pseudo-random numbers */
    uint32_t stop;                 /* atomic */
    uint32_t lengths[SLOTS * PER_SLOT];
    uint64_t numbers[SLOTS];
} s_node_t;

/* ---- calls ---- */

typedef struct {
    uint32_t n_entries, n_rows, n_attend_rows;
    uint32_t taken[PER_SLOT]; /* new rows of each sequence */
} step_t;

static fd_slot_t *slot_of(s_node_t *s, uint32_t slot) {
    const fd_layout_t y = fd_region_layout(&geometry);
    return fd_slot_at(s->region, &y, slot);
}

static void begin_step(s_node_t *s, uint32_t slot, step_t *step) {
    const fd_layout_t y = fd_region_layout(&geometry);
    fd_row_t *table = (fd_row_t *)((uint8_t *)slot_of(s, slot) + y.table);
    const uint32_t n = 1 + below(&s->state, PER_SLOT), attending = below(&s->state, n + 1);
    *step = (step_t){.n_entries = n};
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t seq = slot * PER_SLOT + i;
        uint32_t rows = below(&s->state, 4) ? 1 : 1 + below(&s->state, MAX_ROWS / n);
        if (s->lengths[seq] + rows > 3 * FD_PAGE_TOKENS) {
            fd_error_t error;
            REQUIRE(fd_link_free(s->link, seq, 1, &error) == 0);
            s->lengths[seq] = 0;
        }
        table[i] = (fd_row_t){seq, 1, s->lengths[seq], rows, i < attending ? FD_ROW_ATTEND : 0, 0};
        step->taken[i] = rows;
        step->n_rows += rows;
        if (i < attending) step->n_attend_rows += rows;
    }
    float *kv = (float *)((uint8_t *)slot_of(s, slot) + y.kv), *q = (float *)((uint8_t *)slot_of(s, slot) + y.q);
    for (uint32_t i = 0; i < step->n_attend_rows * GROUP * KV_HEADS * HEAD; i++) q[i] = (float)below(&s->state, 9) - 4;
    for (uint32_t i = 0; i < step->n_rows * 2 * KV_HEADS * HEAD; i++)
        kv[i] = i / (KV_HEADS * HEAD) % 2 ? 1 : (float)below(&s->state, 9) - 4;
}

static void arm(s_node_t *s, uint32_t slot, const step_t *step) {
    fd_slot_t *at = slot_of(s, slot);
    at->arm = (fd_arm_t){.number = ++s->numbers[slot],
                         .n_entries = step->n_entries,
                         .n_rows = step->n_rows,
                         .n_attend_rows = step->n_attend_rows,
                         .n_layers = LAYERS};
    s_side_ring_arm(s->link, s->region, at, s->numbers[slot]);
}

/* Waits for the verdict. Returns false if the step was refused for want of pages, which forks cause. */
static bool armed(s_node_t *s, uint32_t slot) {
    const fd_report_t *verdict = s_side_verdict(slot_of(s, slot), s->numbers[slot]);
    REQUIRE(verdict->status == FD_OK || verdict->status == FD_OUT_OF_PAGES);
    return verdict->status == FD_OK;
}

static void finish(s_node_t *s, uint32_t slot, const step_t *step, uint32_t layer) {
    fd_slot_t *at = slot_of(s, slot);
    const fd_layout_t y = fd_region_layout(&geometry);
    REQUIRE(s_side_replied(at, layer + 1));
    __atomic_fetch_add(&n_calls, 1, __ATOMIC_RELAXED);
    const float *o = (float *)((uint8_t *)at + y.o);
    for (uint32_t i = 0; i < step->n_attend_rows * GROUP * KV_HEADS * HEAD; i++) REQUIRE(fabsf(o[i] - 1) < 1e-3f);
    REQUIRE(layer + 1 < LAYERS || (at->report.status == FD_OK && at->report.n_layers == LAYERS));
}

/* A step in each slot, layer by layer, both slots at once. */
static void steps(s_node_t *s) {
    step_t step[SLOTS];
    bool served[SLOTS];
    for (uint32_t slot = 0; slot < SLOTS; slot++) begin_step(s, slot, &step[slot]);
    for (uint32_t slot = 0; slot < SLOTS; slot++) arm(s, slot, &step[slot]);
    for (uint32_t slot = 0; slot < SLOTS; slot++) served[slot] = armed(s, slot);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t slot = 0; slot < SLOTS; slot++)
            if (served[slot]) s_side_ask(s->link, s->region, slot_of(s, slot), layer + 1);
        for (uint32_t slot = 0; slot < SLOTS; slot++)
            if (served[slot]) finish(s, slot, &step[slot], layer);
    }
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        for (uint32_t i = 0; i < step[slot].n_entries && served[slot]; i++)
            s->lengths[slot * PER_SLOT + i] += step[slot].taken[i];
}

/* ---- control operations, on a thread of their own ---- */

static void *control(void *arg) {
    s_node_t *s = arg;
    uint64_t state = s->control_state;
    fd_error_t error;
    while (!__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE)) {
        const uint32_t own = SLOTS * PER_SLOT + below(&state, OWN), any = below(&state, SEQUENCES);
        uint32_t *pages, n;
        fd_link_stats_t stats;
        switch (below(&state, 6)) { /* most of these may be refused */
        case 0:
        case 1: fd_link_fork(s->link, any, 1, own, 1, 1 + below(&state, 200), &error); break;
        case 2: fd_link_trim(s->link, own, 1, below(&state, 100), &error); break;
        case 3: fd_link_free(s->link, own, 1, &error); break;
        case 4:
            if (fd_link_pages(s->link, any, 1, &pages, &n, &error) == 0) free(pages);
            break;
        default: fd_link_stats(s->link, &stats); REQUIRE(stats.pages_used <= PAGES && stats.seqs <= SEQUENCES);
        }
        __atomic_fetch_add(&n_controls, 1, __ATOMIC_RELAXED);
        fd_engine_kv_free(engine);
        usleep(below(&state, 100)); /* without a pause this thread would seldom leave the link's mutex to the engine */
    }
    return NULL;
}

/* Retires a link whose controlling thread goes on, and copies what it keeps. */
static void retire(s_node_t *s) {
    fd_error_t error;
    const uint32_t kept[] = {0, PER_SLOT, SLOTS * PER_SLOT};
    fd_engine_retire_link(engine, s->link, kept, sizeof kept / sizeof *kept);
    for (uint32_t i = 0; i < 20; i++) {
        const fd_page_range_t source = {kept[i % 3], 1, 0, 1, 0},
                              target = {SLOTS * PER_SLOT + below(&s->state, OWN), 1, 0, 1, 0};
        uint64_t done;
        uint32_t length;
        fd_link_copy_pages(s->link, &source, s->link, &target, &done, &error);
        fd_link_length(s->link, kept[i % 3], 1, &length, &error);
        fd_link_shrink(s->link);
    }
}

static void *s_node_main(void *arg) {
    uint64_t seed = (uintptr_t)arg + 1;
    if (seed > 1) s_side_stand_in = &stand_in;
    fd_error_t error;
    for (; !over(); seed++) {
        s_node_t s = {.state = seed * 0x9e3779b97f4a7c15u | 1, .control_state = seed * 0xd1342543de82ef95u | 1};
        const fd_heads_t heads = fd_geometry_heads(&geometry);
        const fd_layer_t layers[LAYERS] = {{.heads = heads, .window = 0, .kv_layer = 0},
                                           {.heads = heads, .window = 100, .kv_layer = 1}};
        const fd_lease_t lease = {FD_KV_FP32, PAGES, SEQUENCES, 0.1f, layers, PAGES, {0, 1}, NULL};
        const size_t bytes = fd_region_layout(&geometry).region_bytes;
        fd_region_header_t *region = aligned_alloc(FD_REGION_PAGE, bytes);
        REQUIRE(region);
        memset(region, 0, bytes);
        *region = (fd_region_header_t){.magic = FD_REGION_MAGIC, .version = FD_PROTOCOL_VERSION, .geometry = geometry};
        s.region = region;
        s.link = fd_engine_add_link(engine, region, &geometry, &lease, NULL, &error);
        REQUIRE(s.link);
        __atomic_fetch_add(&n_links, 1, __ATOMIC_RELAXED);
        pthread_t controller;
        REQUIRE(pthread_create(&controller, NULL, control, &s) == 0);
        for (uint32_t n = 5 + below(&s.state, 40); n && !over(); n--) steps(&s);
        if (below(&s.state, 2)) { /* leave a step in flight */
            step_t step;
            begin_step(&s, 0, &step);
            arm(&s, 0, &step);
            if (below(&s.state, 2) && armed(&s, 0)) s_side_ask(s.link, s.region, slot_of(&s, 0), 1);
        }
        if (below(&s.state, 2)) retire(&s);
        __atomic_store_n(&s.stop, 1, __ATOMIC_RELEASE);
        pthread_join(controller, NULL);
        fd_engine_remove_link(engine, s.link);
        free(region);
    }
    return NULL;
}

/* Stands in while the R-engine ends, and afterwards. */
static void *stand_in_to_the_end(void *unused) {
    while (!__atomic_load_n(&ended, __ATOMIC_ACQUIRE)) {
        stand_in.serve(stand_in.self);
        stand_in.leave(stand_in.self);
    }
    REQUIRE(stand_in.serve(stand_in.self) == FD_STAND_IN_IDLE);
    return unused;
}

int main(int argc, char **argv) {
    const uint32_t threads = argc > 1 ? (uint32_t)atoi(argv[1]) : 3;
    end = time(NULL) + (argc > 2 ? atoi(argv[2]) : 5);
    fd_error_t error;
    const fd_engine_config_t config = {threads, NULL, FD_ISA_SCALAR, 20, 256u << 20, FD_HUGE_OFF, false, 1000, -1};
    engine = fd_engine_new(&config, &error);
    REQUIRE(engine);
    fd_engine_begin_stand_in(engine, &stand_in);
    pthread_t s_nodes[S_NODES];
    for (uintptr_t i = 0; i < S_NODES; i++)
        REQUIRE(pthread_create(&s_nodes[i], NULL, s_node_main, (void *)(i * 1000)) == 0);
    for (uint32_t i = 0; i < S_NODES; i++) pthread_join(s_nodes[i], NULL);
    REQUIRE(fd_engine_kv_free(engine) == 256u << 20);
    pthread_t late;
    REQUIRE(pthread_create(&late, NULL, stand_in_to_the_end, NULL) == 0);
    fd_engine_free(engine);
    __atomic_store_n(&ended, true, __ATOMIC_RELEASE);
    pthread_join(late, NULL);
    fd_engine_end_stand_in(&stand_in);
    printf("%llu calls, %llu controls, %llu links\n", (unsigned long long)n_calls, (unsigned long long)n_controls,
           (unsigned long long)n_links);
    return 0;
}
