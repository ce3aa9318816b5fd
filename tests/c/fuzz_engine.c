/* Sends mutated steps, row tables, layer words and control operations to an R-engine that also serves a well-behaved
 * link, whose replies must stay correct.
 *
 * fuzz.h says what an input is, hostile_link what it does. The R-engine must answer every arm bell, whatever the step
 * behind it, and no sanitizer may report an error. The first byte of an input chooses the instruction set; later bytes
 * choose the geometry and the KV format.
 */
#include <math.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/engine.h"
#include "fuzz.h"
#include "s_side.h"

static fd_error_t error;
static uint64_t answers[FD_OUT_OF_PAGES + 1]; /* number of verdicts on hostile steps, by status */
static uint64_t inputs;

/* ---- an engine and its well-behaved link: one sequence, one KV head, checked in double precision ---- */

enum { HEAD = 8, GROUP = 2, MAX_TOKENS = 300 };
static const fd_geometry_t good_geometry = {1, 4, 1, GROUP, 1, HEAD, FD_ACT_FP32, HEAD, 0, 0, 0, 0};

typedef struct {
    fd_engine_t *engine;
    fd_link_t *link;
    void *region;
    uint64_t number; /* of the last step */
    uint32_t length, noise;
    float k[MAX_TOKENS][HEAD], v[MAX_TOKENS][HEAD];
} target_t;

static target_t targets[FD_ISAS];

/* The target of an instruction set, with 1 to 3 threads. The first input that needs it starts it. */
static target_t *target_of(uint32_t isa) {
    target_t *t = &targets[isa];
    if (t->engine) return t;
    fd_engine_config_t config = {1 + isa % 3,  NULL,     fd_isa_supported(isa) ? isa : FD_ISA_SCALAR,
                                 20,           64 << 20, FD_HUGE_MADVISE,
                                 isa % 3 == 2, 0,        -1};
    t->engine = fd_engine_new(&config, &error);
    REQUIRE(t->engine);
    const fd_layer_t layer = {.heads = fd_geometry_heads(&good_geometry)};
    fd_lease_t lease = {FD_KV_FP32, 6, 2, 0.25f, &layer, 0, {0, 1}, NULL};
    t->region = new_region(&good_geometry);
    t->link = fd_engine_add_link(t->engine, t->region, &good_geometry, &lease, NULL, &error);
    REQUIRE(t->link);
    return t;
}

static float next_noise(target_t *t) {
    t->noise = t->noise * 1664525u + 1013904223u;
    return (float)(int32_t)t->noise * 0x1p-30f;
}

static void check_row(const target_t *good, const float *q, const float *o, uint32_t visible) {
    for (uint32_t h = 0; h < GROUP; h++, q += HEAD, o += HEAD) {
        double sum = 0, want[HEAD] = {0};
        for (uint32_t t = 0; t < visible; t++) {
            double score = 0;
            for (uint32_t d = 0; d < HEAD; d++) score += 0.25 * q[d] * good->k[t][d];
            sum += exp(score);
            for (uint32_t d = 0; d < HEAD; d++) want[d] += exp(score) * good->v[t][d];
        }
        for (uint32_t d = 0; d < HEAD; d++) REQUIRE(fabs(want[d] / sum - o[d]) < 1e-4);
    }
}

static void good_call(target_t *good) {
    const fd_layout_t y = fd_region_layout(&good_geometry);
    fd_slot_t *slot = fd_slot_at(good->region, &y, 0);
    uint32_t n = 1 + (uint32_t)good->number % good_geometry.max_rows;
    if (good->length + n > MAX_TOKENS) {
        good->length = 100;
        REQUIRE(fd_link_trim(good->link, 1, 7, good->length, &error) == 0);
    }
    float *q = (float *)((uint8_t *)slot + y.q), *kv = (float *)((uint8_t *)slot + y.kv);
    for (uint32_t i = 0; i < n * GROUP * HEAD; i++) q[i] = next_noise(good);
    for (uint32_t i = 0; i < n * 2 * HEAD; i++) kv[i] = next_noise(good);
    for (uint32_t j = 0; j < n; j++) {
        memcpy(good->k[good->length + j], kv + j * 2 * HEAD, sizeof good->k[0]);
        memcpy(good->v[good->length + j], kv + j * 2 * HEAD + HEAD, sizeof good->v[0]);
    }
    *(fd_row_t *)((uint8_t *)slot + y.table) = (fd_row_t){1, 7, good->length, n, FD_ROW_ATTEND, 0};
    slot->arm = (fd_arm_t){.number = ++good->number, .n_entries = 1, .n_rows = n, .n_attend_rows = n, .n_layers = 1};
    s_side_ring_arm(good->link, good->region, slot, good->number);
    REQUIRE(s_side_verdict(slot, good->number)->status == FD_OK);
    s_side_ask(good->link, good->region, slot, 1);
    REQUIRE(s_side_replied(slot, 1) && slot->report.status == FD_OK && slot->report.n_layers == 1);
    for (uint32_t j = 0; j < n; j++)
        check_row(good, q + j * GROUP * HEAD, (float *)((uint8_t *)slot + y.o) + j * GROUP * HEAD,
                  good->length + j + 1);
    good->length += n;
}

/* ---- the hostile link ---- */

enum { SEQUENCES = 6, MAX_PAGES = 30 };

typedef struct {
    fd_geometry_t g;
    fd_layout_t y;
    fd_link_t *link;
    void *region;
    struct {
        uint32_t tag, length;
    } sequences[SEQUENCES]; /* tag and cached tokens as far as we know, so that most calls are valid */
    struct {
        uint64_t bell;   /* of the last step */
        bool armed;      /* a step is in progress */
        uint32_t layers; /* that it runs */
        uint32_t served; /* its layers that are answered */
    } slots[2];
} hostile_t;

static void *slot_part(hostile_t *h, uint32_t slot, size_t offset) {
    return (uint8_t *)fd_slot_at(h->region, &h->y, slot) + offset;
}

/* Heads of a layer, which the geometry may have room for. */
static fd_heads_t some_heads(input_t *in, bool v_in_k) {
    const uint32_t n_kv_heads = (uint32_t)take(in, 1) % 4;
    return (fd_heads_t){n_kv_heads * ((uint32_t)take(in, 1) % 4), n_kv_heads, edgy(in, 4) * 8, edgy(in, 4) * 8, v_in_k};
}

static void open_hostile(hostile_t *h, fd_engine_t *engine, input_t *in) {
    static const fd_geometry_t geometries[] = {
        {2, 40, 2, 4, 2, 16, FD_ACT_FP16, 16, 0, 0, 0, 0},  {1, 200, 1, 1, 1, 8, FD_ACT_FP32, 8, 0, 0, 0, 0},
        {2, 70, 3, 96, 1, 24, FD_ACT_BF16, 16, 0, 0, 0, 0}, {2, 1, 1, 6, 3, 256, FD_ACT_FP32, 512, 0, 0, 0, 0},
        {2, 70, 2, 20, 1, 48, FD_ACT_BF16, 40, 1, 0, 0, 0}, {2, 70, 3, 20, 1, 48, FD_ACT_FP16, 40, 1, 5, 16, 33},
        {2, 70, 3, 3, 1, 24, FD_ACT_FP32, 24, 1, 70, 8, 1},
    };
    enum { N_GEOMETRIES = sizeof geometries / sizeof *geometries };
    memset(h, 0, sizeof *h);
    h->g = geometries[take(in, 1) % N_GEOMETRIES];
    h->y = fd_region_layout(&h->g);
    fd_layer_t layers[3];
    memset(layers, 0, sizeof layers);
    float per_head[96]; /* slopes and sinks of every layer */
    const bool masks = take(in, 1) % 2;
    for (uint32_t i = 0; i < 96; i++) per_head[i] = i % 3 || !masks ? 100 - (float)i : -INFINITY;
    for (uint32_t i = 0; i < 3; i++) {
        const uint64_t options = take(in, 1);
        layers[i].window = options & 1 ? 0 : edgy(in, 100);
        layers[i].segment = options & 2 ? 0 : edgy(in, 100);
        layers[i].softcap = options & 4 ? 0 : (float)(take(in, 1) % 8) - 1;
        layers[i].sinks = options & 8 ? NULL : per_head;
        layers[i].slopes = options & 48 ? NULL : per_head;
        layers[i].kv_layer = options & 64 ? i : (uint32_t)take(in, 1) % 4;
        layers[i].selection = h->g.index_topk ? (uint32_t)take(in, 1) % 3 : options == 255 ? edgy(in, 2) : 0;
        layers[i].heads = options & 128 ? fd_geometry_heads(&h->g) : some_heads(in, h->g.v_in_k);
    }
    const uint32_t dtypes = h->g.v_in_k ? FD_KV_INT8_INT4 : FD_KV_DTYPES; /* which cannot store V in K */
    fd_lease_t lease = {take(in, 1) % dtypes, 1 + take(in, 1) % 24, SEQUENCES, 0.3f, layers, MAX_PAGES, {0, 1}, NULL};
    h->region = new_region(&h->g);
    h->link = fd_engine_add_link(engine, h->region, &h->g, &lease, NULL, &error);
    if (!h->link) { /* one of the layers is not valid */
        for (uint32_t i = 0; i < 3; i++)
            layers[i] = (fd_layer_t){.heads = fd_geometry_heads(&h->g),
                                     .window = h->g.index_topk ? 0 : layers[i].window,
                                     .kv_layer = i,
                                     .selection = h->g.index_topk ? (i == 1 ? FD_SELECT_SHARED : FD_SELECT_OWN) : 0};
        h->link = fd_engine_add_link(engine, h->region, &h->g, &lease, NULL, &error);
    }
    REQUIRE(h->link);
}

/* Makes a valid row table, which the engine serves if there is room, and a step header for it. */
static void good_step(hostile_t *h, input_t *in, fd_row_t *table, fd_arm_t *header) {
    uint32_t n = 1 + take(in, 1) % SEQUENCES, first = take(in, 1), attending = take(in, 1) % (n + 1), rows = 0;
    for (uint32_t i = 0; i < n && rows < h->g.max_rows; i++) {
        uint32_t seq_index = (first + i) % SEQUENCES, want = 1 + take(in, 1) % h->g.max_rows;
        if (want > h->g.max_rows - rows) want = h->g.max_rows - rows;
        if (!h->sequences[seq_index].length) h->sequences[seq_index].tag = take(in, 1);
        const uint32_t flags = (i < attending ? FD_ROW_ATTEND : 0) | (take(in, 1) % 4 ? 0 : FD_ROW_SLIDE);
        table[i] = (fd_row_t){seq_index, h->sequences[seq_index].tag, h->sequences[seq_index].length, want, flags, 0};
        rows += want;
        header->n_entries++;
        if (i < attending) header->n_attend_rows += want;
    }
    header->n_rows = rows;
}

static void mutate_row(input_t *in, fd_row_t *r, uint32_t max_rows) {
    switch (take(in, 1) % 6) {
    case 0: r->seq_index = edgy(in, SEQUENCES); break;
    case 1: r->tag ^= take(in, 1); break;
    case 2: r->pos = edgy(in, 64); break;
    case 3: r->n_rows = edgy(in, max_rows); break;
    case 4: r->flags = edgy(in, 6); break;
    default: r->reserved = take(in, 1);
    }
}

static void mutate_header(input_t *in, fd_arm_t *header, const fd_geometry_t *g) {
    switch (take(in, 1) % 6) {
    case 0: header->number += edgy(in, 2); break;
    case 1: header->n_entries = edgy(in, g->max_rows); break;
    case 2: header->n_rows = edgy(in, g->max_rows); break;
    case 3: header->n_attend_rows = edgy(in, g->max_rows); break;
    case 4: header->n_layers = edgy(in, g->n_layers); break;
    default: header->reserved[take(in, 1) % 10] = take(in, 1);
    }
}

/* Overwrites bytes of the region, as a peer may do while the engine works on its step. */
static void scribble(hostile_t *h, input_t *in, uint32_t slot) {
#ifndef __SANITIZE_THREAD__ /* these data races are intended */
    uint8_t *base = slot_part(h, slot, sizeof(uint64_t));
    size_t span = h->y.slot_bytes - sizeof(uint64_t);
    for (uint32_t n = take(in, 1) % 16; n; n--) {
        size_t at = take(in, 1) % 2 ? take(in, 2) % 1024 : take(in, 3);
        uint8_t *byte = base + at % span;
        /* The peer may write the R side's words as well, but this program waits for them. */
        if (byte >= (uint8_t *)slot_part(h, slot, offsetof(fd_slot_t, armed_bell)) &&
            byte < (uint8_t *)slot_part(h, slot, h->y.table))
            continue;
        *(volatile uint8_t *)byte = (uint8_t)take(in, 1);
    }
    if (take(in, 1) % 8 == 0)
        __atomic_store_n(&((fd_region_header_t *)h->region)->engine_asleep, take(in, 1), __ATOMIC_RELAXED);
#endif
}

static void note_armed(hostile_t *h, const fd_row_t *table, const fd_arm_t *header) {
    for (uint32_t i = 0; i < header->n_entries; i++) {
        REQUIRE(table[i].seq_index < SEQUENCES); /* the engine must refuse other indexes */
        h->sequences[table[i].seq_index].length = table[i].pos + table[i].n_rows;
        h->sequences[table[i].seq_index].tag = table[i].tag;
    }
}

/* Sends pages of a sequence to a sequence of the same lease, over a socket, in ranges that may be wrong. */
static fd_status_t transfer(hostile_t *h, input_t *in, uint32_t from, uint32_t from_tag, uint32_t to, uint32_t n) {
    const uint32_t to_tag = take(in, 1) % 8 && to < SEQUENCES ? h->sequences[to].tag : take(in, 4);
    const uint32_t first = edgy(in, 4), into = take(in, 1) % 2 ? first : edgy(in, 4);
    const uint64_t start = take(in, 1) % 8 ? 0 : take(in, 4);
    fd_page_range_t source = {from, from_tag, first, n, start}, target = {to, to_tag, into, n, start};
    int sockets[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    fd_status_t status = FD_OK;
    for (uint32_t i = 0; i < 64 && status == FD_OK; i++) {
        uint64_t done;
        status = fd_link_send_pages(h->link, sockets[0], &source, &done, &error);
        if (status != FD_OK) break;
        source.offset += done;
        status = fd_link_receive_pages(h->link, sockets[1], &target, &done, &error);
        if (status == FD_OK) target.offset += done;
    }
    close(sockets[0]);
    close(sockets[1]);
    REQUIRE(status != FD_LINK_CLOSED);
    return status;
}

static void control(hostile_t *h, input_t *in) {
    uint32_t a = edgy(in, SEQUENCES), b = edgy(in, SEQUENCES), length = edgy(in, 128);
    uint32_t tag = take(in, 1) % 8 && a < SEQUENCES ? h->sequences[a].tag : take(in, 4);
    fd_status_t rc;
    switch (take(in, 1) % 6) {
    case 0:
        rc = fd_link_free(h->link, a, tag, &error);
        if (rc == 0) h->sequences[a].length = 0;
        break;
    case 1:
        rc = fd_link_trim(h->link, a, tag, length, &error);
        if (rc == 0) h->sequences[a].length = length;
        break;
    case 2:
        rc = fd_link_fork(h->link, a, tag, b, length, length, &error);
        if (rc == 0) h->sequences[b].length = h->sequences[b].tag = length;
        break;
    case 3:
        rc = fd_link_receive(h->link, a, tag, length, &error);
        if (rc == 0) h->sequences[a].length = length, h->sequences[a].tag = tag;
        break;
    case 4: rc = transfer(h, in, a, tag, b, length); break;
    default: rc = fd_link_grow(h->link, length, &error); REQUIRE(rc == 0 || length > MAX_PAGES);
    }
    fd_link_stats_t stats;
    fd_link_stats(h->link, &stats);
    REQUIRE(stats.pages_total <= MAX_PAGES);
    REQUIRE(stats.pages_used <= stats.pages_total && stats.seqs <= SEQUENCES);
}

/* Arms a step, valid or not, also in place of one that is in progress. */
static void hostile_arm(hostile_t *h, input_t *in, uint32_t slot) {
    uint32_t mode = take(in, 1) % 8;
    fd_row_t *table = calloc(h->g.max_rows, sizeof *table);
    REQUIRE(table);
    fd_arm_t header = {.n_layers = 1 + take(in, 1) % h->g.n_layers};
    good_step(h, in, table, &header);
    uint64_t bell = h->slots[slot].bell + 1;
    header.number = bell;
    const bool racing = mode == 3;
    if (mode < 2)
        for (uint32_t n = 1 + take(in, 1) % 3; n && header.n_entries; n--)
            mutate_row(in, &table[take(in, 1) % header.n_entries], h->g.max_rows);
    if (mode == 1 || mode == 2) mutate_header(in, &header, &h->g);
    if (take(in, 1) == 0) bell += edgy(in, 3) | (uint64_t)take(in, 4) << 32;
    if (bell == h->slots[slot].bell) bell++; /* the same number again would not be a ring */
    fd_slot_t *s = fd_slot_at(h->region, &h->y, slot);
    memcpy(slot_part(h, slot, h->y.table), table, h->g.max_rows * sizeof *table);
    s->arm = header;
    s_side_ring_arm(h->link, h->region, s, bell);
    if (racing) scribble(h, in, slot);
    const fd_report_t report = *s_side_verdict(s, bell);
    h->slots[slot].bell = bell;
    REQUIRE(report.number == bell && report.status <= FD_OUT_OF_PAGES);
    REQUIRE(memchr(report.message, 0, sizeof report.message) && (report.status == FD_OK) == !report.message[0]);
    answers[report.status]++;
    h->slots[slot].armed = report.status == FD_OK && !racing; /* after a race nothing is known of the step */
    h->slots[slot].served = 0;
    h->slots[slot].layers = header.n_layers;
    if (report.status == FD_OK) note_armed(h, table, &header); /* after a race this is only likely */
    free(table);
}

/* Asks for layers of the step in progress, with a valid word or not. */
static void hostile_layer(hostile_t *h, input_t *in, uint32_t slot) {
    fd_slot_t *s = fd_slot_at(h->region, &h->y, slot);
    uint8_t *rows = slot_part(h, slot, h->y.q);
    for (uint32_t n = take(in, 1) % 16; n; n--) rows[take(in, 2) % (h->y.o - h->y.q)] = (uint8_t)take(in, 1);
    const uint32_t layers = h->slots[slot].layers, served = h->slots[slot].served, what = take(in, 1) % 8;
    const uint32_t word = what ? served + 1 : take(in, 1) % 2 ? edgy(in, layers) : take(in, 4);
    s_side_ask(h->link, h->region, s, word);
    if (what == 2) control(h, in); /* while the engine works on the layer */
    if (what == 1) {               /* whether the word is seen before it is overwritten is not known */
        scribble(h, in, slot);
        h->slots[slot].armed = false;
        return;
    }
    if (word <= served) return; /* asks for nothing */
    const bool good = s_side_replied(s, word <= layers ? word : FD_POISON) && word <= layers;
    REQUIRE(good == (word <= layers));
    if (!good || word == layers) {
        REQUIRE(s->report.number == h->slots[slot].bell && s->report.status == (good ? FD_OK : FD_BAD_CALL));
        h->slots[slot].armed = false;
    }
    h->slots[slot].served = word;
}

static void hostile_call(hostile_t *h, input_t *in) {
    const uint32_t slot = take(in, 1) % h->g.n_slots;
    if (h->slots[slot].armed && take(in, 1) % 8) hostile_layer(h, in, slot);
    else hostile_arm(h, in, slot);
}

/* What an R-node does to the link of an S-node that is lost: other links copy its sequences, and their pages go. */
static void retire(target_t *target, hostile_t *h, input_t *in) {
    uint32_t kept[SEQUENCES];
    const uint32_t n_kept = take(in, 1) % SEQUENCES;
    for (uint32_t i = 0; i < n_kept; i++) kept[i] = edgy(in, SEQUENCES);
    fd_engine_retire_link(target->engine, h->link, kept, n_kept);
    const uint64_t before = fd_engine_kv_free(target->engine);
    for (uint32_t n = take(in, 1) % 8; n; n--) {
        const uint32_t a = edgy(in, SEQUENCES), tag = take(in, 1) % 8 && a < SEQUENCES ? h->sequences[a].tag : 0;
        const fd_page_range_t source = {a, tag, edgy(in, 4), edgy(in, 4), take(in, 1) % 8 ? 0 : take(in, 4)};
        fd_page_range_t to = source;
        to.seq_index = take(in, 1) % SEQUENCES;
        to.tag = h->sequences[to.seq_index].tag;
        uint64_t done;
        uint32_t length = 0;
        fd_link_copy_pages(h->link, &source, h->link, &to, &done, &error);
        const fd_status_t known = fd_link_length(h->link, a, tag, &length, &error);
        if (known == FD_OK) REQUIRE(fd_link_free(h->link, a, tag, &error) == FD_OK);
        fd_link_shrink(h->link);
        REQUIRE(fd_engine_kv_free(target->engine) >= before);
    }
}

static void hostile_link(target_t *target, input_t *in) {
    hostile_t h;
    open_hostile(&h, target->engine, in);
    while (in->at < in->end) {
        if (take(in, 1) % 4) hostile_call(&h, in);
        else control(&h, in);
    }
    good_call(target);
    if (take(in, 1) % 4 == 0) retire(target, &h, in);
    for (uint32_t i = 0; i < SEQUENCES; i++) /* all pages become free, whatever has happened */
        for (uint32_t tag = 0; fd_link_free(h.link, i, h.sequences[i].tag, &error) && tag < 256; tag++)
            h.sequences[i].tag = tag;
    fd_engine_remove_link(target->engine, h.link);
    free(h.region);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    input_t in = {data, data + size};
    hostile_link(target_of(take(&in, 1) % FD_ISAS), &in);
    inputs++;
}

static void fuzz_end(void) {
    uint64_t calls = 0;
    for (target_t *t = targets; t < targets + FD_ISAS; t++) {
        if (!t->engine) continue;
        fd_link_stats_t stats;
        fd_link_stats(t->link, &stats);
        REQUIRE(stats.refused == 0);
        calls += stats.calls;
        fd_engine_remove_link(t->engine, t->link);
        free(t->region);
        REQUIRE(fd_engine_kv_free(t->engine) == 64 << 20);
        fd_engine_free(t->engine);
    }
    REQUIRE(calls == inputs);
    for (int status = FD_OK; status <= FD_OUT_OF_PAGES; status++)
        printf("%llu hostile calls answered with status %d\n", (unsigned long long)answers[status], status);
}
