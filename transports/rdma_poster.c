#define _GNU_SOURCE
#include "rdma_poster.h"

#include <stdlib.h>
#include <sys/uio.h>

/* A message is a chain of work requests, in order: its header inline, if it has one; two parts of the region; its word,
 * inline. */
enum { HEADER, FIRST, SECOND, WORD, PARTS };

/* One contiguous range of a slot: the work requests [first, first + count) of the chain, enough for its greatest
 * length. */
typedef struct {
    uint32_t first, count;
} fd_requests_t;

/* The parts of an end's two kinds of message: where they lie in a slot and how long they are at most. */
typedef struct {
    size_t at[PARTS], most[PARTS];
    fd_requests_t parts[PARTS];
    uint32_t n; /* work requests of the whole chain */
} fd_shape_t;

typedef struct {
    fd_ibv_send_wr_t *wr; /* [n of its shape] */
    fd_ibv_sge_t *sge;    /* [n], one for each work request */
    fd_arm_t header;      /* the inline work requests send these two copies */
    uint64_t word;
} fd_chain_t;

struct fd_poster {
    fd_side_t side;
    fd_geometry_t geometry;
    fd_layout_t layout;
    uint8_t *region;
    fd_link_state_t *link;

    pthread_mutex_t lock; /* guards everything below */
    bool started, stopped;
    fd_verbs_t verbs;
    fd_shape_t shapes[2];               /* of ARM and LAYER, or of VERDICT and REPLY */
    fd_chain_t chains[FD_MAX_SLOTS][2]; /* like `shapes` */
    fd_arm_t arms[FD_MAX_SLOTS];        /* sizes of each slot's step */
    fd_message_t last[FD_MAX_SLOTS];    /* the last message of each slot */
    uint64_t posted;                    /* work requests posted so far */
    uint64_t retired;                   /* of these, requests known to be done */
    uint64_t signalled;                 /* of these, requests up to the last one that asked for a completion */
    struct {
        uint32_t slot;
        fd_message_t message;
    } queue[FD_MAX_SLOTS]; /* to send, oldest first */
    uint32_t queued;
};

/* Index of a message among the two that its side sends. */
static uint32_t kind_of(fd_message_t message) { return message == FD_LAYER || message == FD_REPLY; }

/* ---- checking a queue pair ---- */

/* Reads memory that may not be mapped. False if it is not. */
static bool read_memory(uint64_t address, void *out, size_t n) {
    struct iovec local = {out, n}, remote = {(void *)(uintptr_t)address, n};
    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == (ssize_t)n;
}

/* True if the file of descriptor `fd` has a name with this prefix. */
static bool fd_is(int fd, const char *prefix) {
    char name[64], target[64] = {0};
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return readlink(name, target, sizeof target - 1) > 0 && !strncmp(target, prefix, strlen(prefix));
}

const char *fd_verbs_error(uint64_t address, uint32_t qp_num) {
    fd_ibv_qp_t qp;
    fd_ibv_context_t context;
    fd_ibv_cq_t cq;
    fd_ibv_comp_channel_t channel;
    if (!read_memory(address, &qp, sizeof qp)) return "its address is not readable";
    if (qp.qp_num != qp_num) return "its memory does not hold that queue pair's number";
    if (qp.qp_type != FD_IBV_QPT_RC) return "its type is not reliable connection";
    if (!read_memory((uintptr_t)qp.context, &context, sizeof context)) return "its context is not readable";
    if (!fd_is(context.cmd_fd, "/dev/infiniband/uverbs")) return "its context does not refer to an open device";
    if (!context.poll_cq || !context.post_send) return "its context lacks the functions to post and to poll";
    if (!read_memory((uintptr_t)qp.send_cq, &cq, sizeof cq) || cq.context != qp.context)
        return "its completion queue is not readable";
    if (!read_memory((uintptr_t)cq.channel, &channel, sizeof channel) || channel.context != qp.context)
        return "its completion channel is not readable";
    return NULL;
}

/* ---- building ---- */

/* Sets where the parts of a message lie and the most bytes of each. */
static void lay_out(const fd_poster_t *p, fd_message_t message, fd_shape_t *shape) {
    const fd_layout_t *y = &p->layout;
    const size_t rows = p->geometry.max_rows;
    memset(shape, 0, sizeof *shape);
    switch (message) {
    case FD_ARM:
        shape->most[HEADER] = sizeof(fd_arm_t), shape->at[HEADER] = offsetof(fd_slot_t, arm);
        shape->most[FIRST] = rows * sizeof(fd_row_t), shape->at[FIRST] = y->table;
        shape->most[WORD] = sizeof(uint64_t), shape->at[WORD] = offsetof(fd_slot_t, arm_bell);
        break;
    case FD_LAYER:
        shape->most[FIRST] = rows * y->q_row_bytes, shape->at[FIRST] = y->q;
        shape->most[SECOND] = rows * y->kv_row_bytes, shape->at[SECOND] = y->kv;
        shape->most[WORD] = sizeof(uint32_t), shape->at[WORD] = offsetof(fd_slot_t, layer_request);
        break;
    case FD_VERDICT:
        shape->most[FIRST] = sizeof(fd_report_t), shape->at[FIRST] = offsetof(fd_slot_t, report);
        shape->most[WORD] = sizeof(uint64_t), shape->at[WORD] = offsetof(fd_slot_t, armed_bell);
        break;
    case FD_REPLY:
        shape->most[FIRST] = rows * y->o_row_bytes, shape->at[FIRST] = y->o;
        shape->most[SECOND] = sizeof(fd_report_t), shape->at[SECOND] = offsetof(fd_slot_t, report);
        shape->most[WORD] = sizeof(uint32_t), shape->at[WORD] = offsetof(fd_slot_t, layer_reply);
        break;
    }
    for (uint32_t part = 0; part < PARTS; part++) {
        const size_t count = (shape->most[part] + p->verbs.max_message - 1) / p->verbs.max_message;
        shape->parts[part] = (fd_requests_t){shape->n, (uint32_t)count};
        shape->n += (uint32_t)count;
    }
}

static bool build_chain(fd_poster_t *p, uint32_t slot, const fd_shape_t *shape, fd_chain_t *chain) {
    chain->wr = calloc(shape->n, sizeof *chain->wr);
    chain->sge = calloc(shape->n, sizeof *chain->sge);
    if (!chain->wr || !chain->sge) return false;
    const fd_verbs_t *v = &p->verbs;
    void *const copies[PARTS] = {[HEADER] = &chain->header, [WORD] = &chain->word};
    for (uint32_t part = 0; part < PARTS; part++)
        for (uint32_t i = 0; i < shape->parts[part].count; i++) {
            size_t offset = (size_t)((uint8_t *)fd_slot_at(p->region, &p->layout, slot) - p->region) + shape->at[part] +
                            i * v->max_message;
            void *copy = copies[part];
            uint32_t k = shape->parts[part].first + i;
            chain->sge[k] =
                (fd_ibv_sge_t){.addr = copy ? (uintptr_t)copy : (uintptr_t)(p->region + offset), .lkey = v->lkey};
            if (copy) chain->sge[k].length = (uint32_t)shape->most[part];
            chain->wr[k] = (fd_ibv_send_wr_t){.sg_list = &chain->sge[k],
                                              .num_sge = 1,
                                              .opcode = FD_IBV_WR_RDMA_WRITE,
                                              .send_flags = copy ? FD_IBV_SEND_INLINE : 0,
                                              .remote_addr = v->peer + offset,
                                              .rkey = v->rkey};
        }
    return true;
}

/* ---- sending; the caller holds `lock` ---- */

static void fail(fd_poster_t *p, const char *reason) {
    p->queued = 0;
    fd_link_stop(p->link, p->side, p->region, &p->geometry, reason);
}

/* Sets how many bytes of each part of a message are used, and its inline copies. Returns NULL, or why it cannot be
 * sent: the peer can write the region and may have overwritten a header. */
static const char *used_bytes(fd_poster_t *p, uint32_t index, fd_message_t message, size_t used[PARTS]) {
    const fd_layout_t *y = &p->layout;
    const fd_slot_t *slot = fd_slot_at(p->region, y, index);
    fd_chain_t *chain = &p->chains[index][kind_of(message)];
    fd_arm_t *arm = &p->arms[index];
    memset(used, 0, PARTS * sizeof *used);
    switch (message) {
    case FD_ARM:
        fd_copy_out(arm, &slot->arm, sizeof *arm);
        if (fd_arm_error(&p->geometry, arm)) return fd_arm_error(&p->geometry, arm);
        chain->header = *arm;
        chain->word = arm->number;
        used[HEADER] = sizeof *arm;
        used[FIRST] = arm->n_entries * sizeof(fd_row_t);
        break;
    case FD_LAYER:
        chain->word = fd_word_read(&slot->layer_request);
        used[FIRST] = arm->n_attend_rows * y->q_row_bytes;
        used[SECOND] = arm->n_rows * y->kv_row_bytes;
        break;
    case FD_VERDICT: /* a step with a bad header is refused, so no reply will use its counts */
        fd_copy_out(arm, &slot->arm, sizeof *arm);
        if (fd_arm_error(&p->geometry, arm)) arm->n_attend_rows = 0;
        chain->word = fd_bell_read(&slot->armed_bell);
        used[FIRST] = sizeof(fd_report_t);
        break;
    case FD_REPLY:
        chain->word = fd_word_read(&slot->layer_reply);
        if (chain->word != FD_POISON) used[FIRST] = arm->n_attend_rows * y->o_row_bytes;
        if (chain->word == FD_POISON || chain->word == arm->n_layers) used[SECOND] = sizeof(fd_report_t);
        break;
    }
    used[WORD] = p->shapes[kind_of(message)].most[WORD];
    return NULL;
}

/* Sets the lengths and links of the work requests for the used bytes. Returns the number of requests. */
static uint32_t link_chain(fd_poster_t *p, const fd_shape_t *shape, fd_chain_t *chain, const size_t used[PARTS],
                           fd_ibv_send_wr_t **first) {
    uint32_t n = 0;
    fd_ibv_send_wr_t **link = first;
    for (uint32_t part = 0; part < PARTS; part++) {
        size_t left = used[part];
        for (uint32_t k = shape->parts[part].first; left; k++, n++) {
            const size_t take = fd_min(left, p->verbs.max_message);
            chain->sge[k].length = (uint32_t)take;
            left -= take;
            *link = &chain->wr[k];
            link = &chain->wr[k].next;
        }
    }
    *link = NULL;
    return n;
}

/* Why a work request failed, given the status of its completion. */
static const char *cause_of(int status) {
    switch (status) {
    case FD_IBV_WC_LOC_LEN_ERR: return "local length error";
    case FD_IBV_WC_LOC_QP_OP_ERR: return "local queue pair operation error: the device or its link is down";
    case FD_IBV_WC_LOC_PROT_ERR: return "local protection error";
    case FD_IBV_WC_WR_FLUSH_ERR: return "work request flushed: the queue pair has failed, or its link is down";
    case FD_IBV_WC_REM_INV_REQ_ERR: return "remote invalid request";
    case FD_IBV_WC_REM_ACCESS_ERR: return "remote access error: the peer's device refused a write to its region";
    case FD_IBV_WC_REM_OP_ERR: return "remote operation error";
    case FD_IBV_WC_RETRY_EXC_ERR: return "retry exceeded: the peer's device does not answer";
    case FD_IBV_WC_RNR_RETRY_EXC_ERR: return "receiver-not-ready retry exceeded";
    case FD_IBV_WC_FATAL_ERR: return "fatal device error";
    default: return "work request failed";
    }
}

/* Takes the completions that have arrived. A completion with an error takes the link down. */
static void reap(fd_poster_t *p) {
    fd_ibv_cq_t *cq = p->verbs.qp->send_cq;
    fd_ibv_wc_t wc[16];
    char text[160];
    int n;
    while ((n = p->verbs.qp->context->poll_cq(cq, 16, wc)) > 0)
        for (int i = 0; i < n; i++) {
            if (wc[i].status == FD_IBV_WC_SUCCESS) {
                p->retired = wc[i].wr_id;
                continue;
            }
            snprintf(text, sizeof text, "RDMA %s (completion status %d, vendor %u)", cause_of(wc[i].status),
                     wc[i].status, wc[i].vendor_err);
            fail(p, text);
        }
    if (n < 0) fail(p, "the RDMA completion queue cannot be read");
}

/* The work request of a chain that writes its word: the last one. */
static fd_ibv_send_wr_t *word_of(const fd_poster_t *p, uint32_t slot, fd_message_t message) {
    return &p->chains[slot][kind_of(message)].wr[p->shapes[kind_of(message)].n - 1];
}

/* Posts `n` linked work requests of a chain, from `first` to the word's. */
static bool post(fd_poster_t *p, fd_ibv_send_wr_t *first, fd_ibv_send_wr_t *word, uint32_t n, bool signalled) {
    fd_ibv_send_wr_t *bad;
    word->wr_id = p->posted + n;
    word->send_flags = signalled ? FD_IBV_SEND_INLINE | FD_IBV_SEND_SIGNALED : FD_IBV_SEND_INLINE;
    int rc = p->verbs.qp->context->post_send(p->verbs.qp, first, &bad);
    if (rc) {
        char text[160];
        snprintf(text, sizeof text, "the RDMA device refused a work request: %s", strerror(rc));
        fail(p, text);
        return false;
    }
    p->posted += n;
    if (signalled) p->signalled = p->posted;
    return true;
}

/* Posts the queued chains that fit in the send queue; completions make room for the others later. They will come,
 * because a request that asks for a completion covers more than half of the requests in a full send queue. */
static void flush(fd_poster_t *p) {
    while (p->queued && !fd_link_is_down(p->link)) {
        const uint32_t slot = p->queue[0].slot;
        const fd_message_t message = p->queue[0].message;
        size_t used[PARTS];
        const char *error = used_bytes(p, slot, message, used);
        if (error) {
            fail(p, error);
            return;
        }
        fd_ibv_send_wr_t *first;
        uint32_t n = link_chain(p, &p->shapes[kind_of(message)], &p->chains[slot][kind_of(message)], used, &first);
        if (p->posted - p->retired + n > p->verbs.depth) reap(p);
        if (fd_link_is_down(p->link) || p->posted - p->retired + n > p->verbs.depth) return;
        if (!post(p, first, word_of(p, slot, message), n, p->posted + n - p->signalled >= p->verbs.depth / 4)) return;
        p->last[slot] = message;
        memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
    }
}

/* Whether the slot's messages may be sent now. */
static bool may_send(const fd_poster_t *p, uint32_t index) {
    return p->started && !p->stopped && index < p->geometry.n_slots;
}

static void poster_send(void *poster, uint32_t index, fd_message_t message) {
    fd_poster_t *p = poster;
    pthread_mutex_lock(&p->lock);
    if (may_send(p, index) && p->queued < FD_MAX_SLOTS) {
        p->queue[p->queued].slot = index;
        p->queue[p->queued++].message = message;
        flush(p);
    }
    pthread_mutex_unlock(&p->lock);
}

void fd_poster_reap(fd_poster_t *p) {
    pthread_mutex_lock(&p->lock);
    if (p->started && !p->stopped) {
        reap(p);
        flush(p);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Writes the slot's last word again and asks for a completion. The peer learns nothing new from that, but the device
 * reports an error within a second if it gets no acknowledgement. Nothing else would report a host that died after it
 * had acknowledged a whole message. */
static void ring_again(fd_poster_t *p, uint32_t index) {
    pthread_mutex_lock(&p->lock);
    if (may_send(p, index)) {
        reap(p);
        fd_ibv_send_wr_t *word = word_of(p, index, p->last[index]);
        if (!p->queued && !fd_link_is_down(p->link) && p->posted - p->retired < p->verbs.depth)
            post(p, word, word, 1, true);
    }
    pthread_mutex_unlock(&p->lock);
}

void fd_poster_probe(fd_poster_t *p) { ring_again(p, 0); }

static void poster_probe(void *poster, uint32_t index, bool harder) {
    if (harder) ring_again(poster, index);
    else fd_poster_reap(poster);
}

/* A WRITE interrupts no thread at the other end. */
const fd_carrier_ops_t fd_poster_ops = {.send = poster_send, .probe = poster_probe, .wakes = false};

/* ---- life ---- */

fd_poster_t *fd_poster_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link) {
    fd_poster_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->side = side;
    p->geometry = *g;
    p->layout = fd_region_layout(g);
    p->region = region;
    p->link = link;
    pthread_mutex_init(&p->lock, NULL);
    for (uint32_t slot = 0; slot < FD_MAX_SLOTS; slot++) p->last[slot] = side == FD_SIDE_S ? FD_ARM : FD_VERDICT;
    return p;
}

static int start(fd_poster_t *p, const fd_verbs_t *verbs) {
    if (p->started || p->stopped) return EALREADY;
    p->verbs = *verbs;
    const fd_message_t first = p->side == FD_SIDE_S ? FD_ARM : FD_VERDICT;
    for (uint32_t kind = 0; kind < 2; kind++) {
        lay_out(p, (fd_message_t)(first + kind), &p->shapes[kind]);
        if (p->shapes[kind].n > verbs->depth / 2) return EMSGSIZE;
        for (uint32_t slot = 0; slot < p->geometry.n_slots; slot++)
            if (!build_chain(p, slot, &p->shapes[kind], &p->chains[slot][kind])) return ENOMEM;
    }
    p->started = true;
    return 0;
}

int fd_poster_start(fd_poster_t *p, const fd_verbs_t *verbs) {
    pthread_mutex_lock(&p->lock);
    int rc = start(p, verbs);
    pthread_mutex_unlock(&p->lock);
    errno = rc;
    return rc ? -1 : 0;
}

void fd_poster_stop(fd_poster_t *p) {
    pthread_mutex_lock(&p->lock);
    p->stopped = true;
    p->queued = 0;
    pthread_mutex_unlock(&p->lock);
}

void fd_poster_free(fd_poster_t *p) {
    for (uint32_t slot = 0; slot < FD_MAX_SLOTS; slot++)
        for (uint32_t kind = 0; kind < 2; kind++) {
            free(p->chains[slot][kind].wr);
            free(p->chains[slot][kind].sge);
        }
    pthread_mutex_destroy(&p->lock);
    free(p);
}
