/* Two RDMA posters, connected by an imitated device whose WRITEs are memcpy.
 *
 * The program checks that exactly the used bytes of each message arrive, word last; that a send queue which is too
 * short for all posted calls loses none; that errors are named; and that a peer that overwrites a region harms only its
 * own link. It aborts if a check fails.
 */
#include <stdio.h>
#include <stdlib.h>

#include "transports/rdma_poster.h"
#include "require.h"

enum { MAX_CQES = 4096 };

/* ---- the device ---- */

typedef struct {
    fd_ibv_qp_t qp; /* the first field, so that post_send can find the device */
    fd_ibv_cq_t cq;
    fd_ibv_context_t context;
    uint8_t *local, *remote;
    size_t region_bytes, slot0, slot_bytes;
    uint32_t lkey, rkey, max_message, depth;
    uint32_t unfinished; /* work requests that are posted and not yet known to be done */
    uint64_t posts, requests, signalled;
    fd_ibv_wc_t done[MAX_CQES];
    uint32_t covers[MAX_CQES]; /* number of requests that each completion reports as done */
    uint32_t n_done, since_signal;
    bool withhold;   /* poll_cq returns no completions */
    int next_status; /* if not 0, the next request fails with this completion status */
    int refuse;      /* if not 0, the next post fails with this errno */
} device_t;

static int post_send(fd_ibv_qp_t *qp, fd_ibv_send_wr_t *wr, fd_ibv_send_wr_t **bad) {
    device_t *d = (device_t *)qp;
    *bad = wr;
    if (d->refuse) return d->refuse;
    d->posts++;
    for (; wr; wr = wr->next) {
        REQUIRE(++d->unfinished <= d->depth);
        REQUIRE(wr->opcode == FD_IBV_WR_RDMA_WRITE && wr->num_sge == 1 && wr->rkey == d->rkey);
        const fd_ibv_sge_t *sge = wr->sg_list;
        REQUIRE(sge->length > 0 && sge->length <= d->max_message);
        uint64_t to = wr->remote_addr - (uintptr_t)d->remote;
        REQUIRE(to < d->region_bytes && sge->length <= d->region_bytes - to);
        if (!(wr->send_flags & FD_IBV_SEND_INLINE)) {
            /* The bytes come from the registered region, at the offset that they go to. */
            REQUIRE(sge->lkey == d->lkey && sge->addr - (uintptr_t)d->local == to);
        } else {
            REQUIRE(sge->length <= FD_INLINE_BYTES);
        }
        d->since_signal++;
        d->requests++;
        if (d->next_status) {
            REQUIRE(d->n_done < MAX_CQES);
            d->done[d->n_done++] = (fd_ibv_wc_t){.wr_id = wr->wr_id, .status = d->next_status, .vendor_err = 129};
            return 0;
        }
        /* The last request of a chain writes the word. */
        size_t in_slot = (to - d->slot0) % d->slot_bytes;
        bool word = in_slot == offsetof(fd_slot_t, arm_bell) || in_slot == offsetof(fd_slot_t, armed_bell) ||
                    in_slot == offsetof(fd_slot_t, layer_request) || in_slot == offsetof(fd_slot_t, layer_reply);
        REQUIRE(word == (wr->next == NULL));
        memcpy(d->remote + to, (void *)(uintptr_t)sge->addr, sge->length);
        if (wr->send_flags & FD_IBV_SEND_SIGNALED) {
            REQUIRE(d->n_done < MAX_CQES);
            d->covers[d->n_done] = d->since_signal;
            d->since_signal = 0;
            d->signalled++;
            d->done[d->n_done++] = (fd_ibv_wc_t){.wr_id = wr->wr_id, .status = FD_IBV_WC_SUCCESS};
        }
    }
    return 0;
}

static int poll_cq(fd_ibv_cq_t *cq, int n, fd_ibv_wc_t *wc) {
    device_t *d = (device_t *)((uint8_t *)cq - offsetof(device_t, cq));
    if (d->withhold) return 0;
    int k = 0;
    for (; k < n && d->n_done; k++) {
        wc[k] = d->done[0];
        d->unfinished -= d->covers[0];
        d->n_done--;
        memmove(d->done, d->done + 1, d->n_done * sizeof *d->done);
        memmove(d->covers, d->covers + 1, d->n_done * sizeof *d->covers);
    }
    return k;
}

/* ---- two ends ---- */

typedef struct {
    uint8_t *region;
    fd_link_state_t link;
    fd_poster_t *poster;
    device_t device;
} end_t;

typedef struct {
    fd_geometry_t g;
    fd_layout_t y;
    end_t s, r;
} pair_t;

static void open_end(pair_t *p, end_t *e, end_t *other, fd_side_t side, uint32_t max_message, uint32_t depth) {
    device_t *d = &e->device;
    memset(d, 0, sizeof *d);
    d->qp.context = &d->context;
    d->qp.send_cq = &d->cq;
    d->cq.context = &d->context;
    d->context.post_send = post_send;
    d->context.poll_cq = poll_cq;
    d->local = e->region;
    d->remote = other->region;
    d->region_bytes = p->y.region_bytes;
    d->slot0 = p->y.slot0;
    d->slot_bytes = p->y.slot_bytes;
    d->lkey = 0x11;
    d->rkey = 0x22;
    d->max_message = max_message;
    d->depth = depth;
    REQUIRE(fd_link_state_init(&e->link) == 0);
    e->poster = fd_poster_new(side, e->region, &p->g, &e->link);
    REQUIRE(e->poster);
    fd_poster_ops.send(e->poster, 0, FD_ARM); /* does nothing before the start */
    fd_verbs_t verbs = {&d->qp, d->lkey, d->rkey, (uintptr_t)other->region, max_message, depth};
    REQUIRE(fd_poster_start(e->poster, &verbs) == 0);
    REQUIRE(fd_poster_start(e->poster, &verbs) == -1 && errno == EALREADY);
}

static void open_pair(pair_t *p, uint32_t max_message, uint32_t depth) {
    p->g = (fd_geometry_t){.n_slots = 3,
                           .max_rows = 40,
                           .n_layers = 2,
                           .n_q_heads = 4,
                           .n_kv_heads = 2,
                           .head_size = 64,
                           .act_dtype = FD_ACT_FP32,
                           .v_size = 24};
    p->y = fd_region_layout(&p->g);
    p->s.region = aligned_alloc(FD_REGION_PAGE, p->y.region_bytes);
    p->r.region = aligned_alloc(FD_REGION_PAGE, p->y.region_bytes);
    REQUIRE(p->s.region && p->r.region);
    memset(p->s.region, 0, p->y.region_bytes);
    memset(p->r.region, 0, p->y.region_bytes);
    open_end(p, &p->s, &p->r, FD_SIDE_S, max_message, depth);
    open_end(p, &p->r, &p->s, FD_SIDE_R, max_message, depth);
}

static void close_end(end_t *e) {
    fd_poster_stop(e->poster);
    uint64_t posts = e->device.posts;
    fd_poster_ops.send(e->poster, 0, FD_ARM);
    fd_poster_reap(e->poster);
    REQUIRE(e->device.posts == posts);
    fd_poster_free(e->poster);
    fd_link_state_close_fd(&e->link);
    free(e->region);
}

static void close_pair(pair_t *p) {
    close_end(&p->s);
    close_end(&p->r);
}

static void fill(uint8_t *at, size_t n) {
    while (n--) *at++ = (uint8_t)rand();
}

static fd_slot_t *slot_of(pair_t *p, end_t *e, uint32_t slot) { return fd_slot_at(e->region, &p->y, slot); }

/* Writes a step with random sizes and rows into the S side's slot. */
static void put_step(pair_t *p, uint32_t slot, uint64_t number) {
    fd_slot_t *s = slot_of(p, &p->s, slot);
    uint32_t rows = 1 + (uint32_t)rand() % p->g.max_rows;
    s->arm = (fd_arm_t){.number = number,
                        .n_entries = 1 + (uint32_t)rand() % rows,
                        .n_rows = rows,
                        .n_attend_rows = (uint32_t)rand() % (rows + 1),
                        .n_layers = 1 + (uint32_t)rand() % p->g.n_layers};
    s->arm_bell = number;
    fill((uint8_t *)s + p->y.table, p->y.slot_bytes - p->y.table);
}

static void send_arm(pair_t *p, uint32_t slot, uint64_t number) {
    put_step(p, slot, number);
    fd_poster_ops.send(p->s.poster, slot, FD_ARM);
}

/* Checks the slot's bytes [at, end) at end `to`: the first `used` bytes are those of end `from`, the others are
 * unchanged from `before`. */
static void arrived(pair_t *p, end_t *from, end_t *to, const uint8_t *before, uint32_t slot, size_t at, size_t used,
                    size_t end) {
    const uint8_t *sent = (uint8_t *)slot_of(p, from, slot), *got = (uint8_t *)slot_of(p, to, slot);
    REQUIRE(!memcmp(sent + at, got + at, used));
    REQUIRE(!memcmp(before + at + used, got + at + used, end - at - used));
}

static void step(pair_t *p, uint32_t slot, uint64_t number) {
    const fd_layout_t *y = &p->y;
    uint8_t *before = malloc(y->slot_bytes);
    REQUIRE(before);
    fd_slot_t *s = slot_of(p, &p->s, slot), *r = slot_of(p, &p->r, slot);
    const size_t rows_at = y->q, rows_bytes = y->slot_bytes - y->q;

    memcpy(before, r, y->slot_bytes);
    send_arm(p, slot, number);
    const fd_arm_t *a = &s->arm;
    REQUIRE(r->arm_bell == number && !memcmp(&r->arm, a, sizeof *a));
    arrived(p, &p->s, &p->r, before, slot, y->table, a->n_entries * sizeof(fd_row_t), y->q);
    REQUIRE(!memcmp(before + rows_at, (uint8_t *)r + rows_at, rows_bytes) && r->armed_bell == number - 1);

    r->report = (fd_report_t){.number = number, .busy_ns = 5, .message = "a message"};
    r->armed_bell = number;
    memcpy(before, s, y->slot_bytes);
    fd_poster_ops.send(p->r.poster, slot, FD_VERDICT);
    REQUIRE(s->armed_bell == number && !memcmp(&s->report, &r->report, sizeof s->report));
    REQUIRE(!memcmp(before + y->table, (uint8_t *)s + y->table, y->slot_bytes - y->table));

    for (uint32_t word = 1; word <= s->arm.n_layers; word++) {
        memcpy(before, r, y->slot_bytes);
        fill((uint8_t *)s + y->q, y->o - y->q);
        s->layer_request = word;
        fd_poster_ops.send(p->s.poster, slot, FD_LAYER);
        REQUIRE(r->layer_request == word);
        arrived(p, &p->s, &p->r, before, slot, y->q, a->n_attend_rows * y->q_row_bytes, y->kv);
        arrived(p, &p->s, &p->r, before, slot, y->kv, a->n_rows * y->kv_row_bytes, y->o);
        REQUIRE(!memcmp(before + y->o, (uint8_t *)r + y->o, y->slot_bytes - y->o));

        const bool poisoned = number % 7 == 0;
        fill((uint8_t *)r + y->o, y->slot_bytes - y->o);
        r->layer_reply = poisoned ? FD_POISON : word;
        r->report.busy_ns++;
        memcpy(before, s, y->slot_bytes);
        fd_poster_ops.send(p->r.poster, slot, FD_REPLY);
        REQUIRE(s->layer_reply == r->layer_reply);
        REQUIRE((s->report.busy_ns == r->report.busy_ns) == (poisoned || word == s->arm.n_layers));
        arrived(p, &p->r, &p->s, before, slot, y->o, poisoned ? 0 : a->n_attend_rows * y->o_row_bytes, y->slot_bytes);
        REQUIRE(!memcmp(before + y->table, (uint8_t *)s + y->table, y->o - y->table));
        if (poisoned) break;
    }
    free(before);
}

static void steps_arrive_whole(uint32_t max_message, uint32_t depth, int steps) {
    pair_t p;
    open_pair(&p, max_message, depth);
    for (int i = 0; i < steps; i++) step(&p, (uint32_t)i % p.g.n_slots, 1 + (uint64_t)i / p.g.n_slots);
    REQUIRE(!fd_link_is_down(&p.s.link) && !fd_link_is_down(&p.r.link));
    REQUIRE(p.s.device.signalled > 0 && p.s.device.signalled <= p.s.device.requests * 4 / depth);
    close_pair(&p);
}

/* Withholds completions until the queue is full; the chains that wait for room are sent once completions arrive. */
static void full_queue_loses_nothing(void) {
    pair_t p;
    open_pair(&p, 1u << 20, 16);
    p.s.device.withhold = true;
    uint64_t number[3] = {0}, sent = 0;
    while (p.s.device.unfinished + 3 <= 16) {
        const uint32_t slot = sent++ % 3;
        send_arm(&p, slot, ++number[slot]);
    }
    for (uint32_t slot = 0; slot < 3; slot++) send_arm(&p, slot, ++number[slot]);
    REQUIRE(slot_of(&p, &p.r, 2)->arm_bell == number[2] - 1);
    p.s.device.withhold = false;
    for (int i = 0; i < 3; i++) fd_poster_reap(p.s.poster);
    for (uint32_t slot = 0; slot < 3; slot++) REQUIRE(slot_of(&p, &p.r, slot)->arm_bell == number[slot]);
    close_pair(&p);
}

static void error_is_named(int status, int refuse, const char *name) {
    pair_t p;
    open_pair(&p, 1u << 20, 64);
    step(&p, 0, 1);
    p.s.device.next_status = status;
    p.s.device.refuse = refuse;
    send_arm(&p, 1, 1);
    fd_poster_reap(p.s.poster);
    char reason[256];
    fd_link_down_reason(&p.s.link, reason);
    REQUIRE(fd_link_is_down(&p.s.link));
    if (!strstr(reason, name)) fprintf(stderr, "%s\n", reason), exit(1);
    uint64_t posts = p.s.device.posts;
    fd_poster_ops.send(p.s.poster, 0, FD_LAYER);
    REQUIRE(p.s.device.posts == posts && !fd_link_is_down(&p.r.link));
    close_pair(&p);
}

/* Ringing again detects a peer that died after it had acknowledged a message; a live peer sees nothing new. */
static void ringing_again_finds_the_dead(void) {
    pair_t p;
    open_pair(&p, 1u << 20, 64);
    for (uint64_t number = 1; number <= 200; number++) {
        send_arm(&p, 0, number);
        uint8_t before[sizeof(fd_slot_t)];
        memcpy(before, slot_of(&p, &p.r, 0), sizeof before);
        fd_poster_ops.probe(p.s.poster, 0, true);
        REQUIRE(!memcmp(before, slot_of(&p, &p.r, 0), sizeof before) && slot_of(&p, &p.r, 0)->arm_bell == number);
    }
    REQUIRE(!fd_link_is_down(&p.s.link) && p.s.device.signalled >= 200);
    p.s.device.next_status = FD_IBV_WC_RETRY_EXC_ERR;
    fd_poster_ops.probe(p.s.poster, 0, true);
    fd_poster_reap(p.s.poster);
    REQUIRE(fd_link_is_down(&p.s.link));
    close_pair(&p);
}

/* A peer may write the region that a poster reads: the poster sends nothing for a header with too many rows. */
static void meddling_is_noticed(void) {
    pair_t p;
    open_pair(&p, 1u << 20, 64);
    fd_slot_t *r = slot_of(&p, &p.r, 0);
    r->arm = (fd_arm_t){.number = 1, .n_entries = 1, .n_rows = 1, .n_attend_rows = 0xffffffff, .n_layers = 2};
    r->armed_bell = 1;
    fd_poster_ops.send(p.r.poster, 0, FD_VERDICT); /* a refusal, which goes out */
    r->layer_reply = 1;
    fd_poster_ops.send(p.r.poster, 0, FD_REPLY);
    REQUIRE(!fd_link_is_down(&p.r.link) && slot_of(&p, &p.s, 0)->layer_reply == 1);
    const uint64_t requests = p.r.device.requests;
    r->arm.n_attend_rows = 1; /* too late: the counts of the verdict hold */
    fd_poster_ops.send(p.r.poster, 0, FD_REPLY);
    REQUIRE(p.r.device.requests == requests + 1);
    put_step(&p, 0, 1);
    slot_of(&p, &p.s, 0)->arm.n_rows = 0xffffffff;
    fd_poster_ops.send(p.s.poster, 0, FD_ARM);
    REQUIRE(fd_link_is_down(&p.s.link) && p.s.device.posts == 0);
    close_pair(&p);
}

static void queue_too_short_for_a_message(void) {
    pair_t p;
    open_pair(&p, 1u << 20, 64);
    fd_poster_t *poster = fd_poster_new(FD_SIDE_S, p.s.region, &p.g, &p.s.link);
    fd_verbs_t verbs = {&p.s.device.qp, 0x11, 0x22, (uintptr_t)p.r.region, 4096, 16};
    REQUIRE(poster && fd_poster_start(poster, &verbs) == -1 && errno == EMSGSIZE);
    fd_poster_stop(poster);
    fd_poster_free(poster);
    close_pair(&p);
}

int main(void) {
    srand(1);
    steps_arrive_whole(1u << 30, 512, 600);
    steps_arrive_whole(1u << 30, 16, 600);
    steps_arrive_whole(4096, 128, 600); /* rows in several messages each */
    full_queue_loses_nothing();
    error_is_named(FD_IBV_WC_REM_ACCESS_ERR, 0, "remote access error");
    error_is_named(FD_IBV_WC_RETRY_EXC_ERR, 0, "retry exceeded");
    error_is_named(FD_IBV_WC_WR_FLUSH_ERR, 0, "flushed");
    error_is_named(22, 0, "work request failed (completion status 22, vendor 129)");
    error_is_named(0, ENOMEM, "refused a work request: Cannot allocate memory");
    ringing_again_finds_the_dead();
    meddling_is_noticed();
    queue_too_short_for_a_message();
    return 0;
}
