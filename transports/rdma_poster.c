#define _GNU_SOURCE
#include "rdma_poster.h"

#include <stdlib.h>
#include <sys/uio.h>

enum { CALL, TABLE, Q, KV, S_BELL, MAX_PARTS }; /* the parts of a call's chain, in order */
enum { O, REPLY, R_BELL };                      /* the parts of a reply's chain, in order */

/* One contiguous range of a slot's half: the work requests [first, first + count) of the chain, enough for its greatest
 * length. */
typedef struct {
    uint32_t first, count;
} fd_part_t;

typedef struct {
    fd_ibv_send_wr_t *wr; /* [chain_max] */
    fd_ibv_sge_t *sge;    /* [chain_max], one for each work request */
    fd_call_t call;       /* the inline work requests send these two copies */
    uint64_t bell;
} fd_chain_t;

struct fd_poster {
    fd_side_t side;
    fd_geometry_t geometry;
    fd_layout_t layout;
    uint8_t *region;
    fd_down_t *down;

    pthread_mutex_t lock; /* guards everything below */
    bool started, stopped;
    fd_verbs_t verbs;
    fd_part_t parts[MAX_PARTS];
    uint32_t n_parts, chain_max;
    fd_chain_t chains[FD_MAX_SLOTS];
    uint64_t posted;              /* work requests posted so far */
    uint64_t retired;             /* of these, requests known to be done */
    uint64_t signalled;           /* of these, requests up to the last one that asked for a completion */
    uint32_t queue[FD_MAX_SLOTS]; /* slots to send, oldest first */
    uint32_t queued;
};

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

/* Sets the most bytes of each part and its offset in the slot. Returns the number of parts. */
static uint32_t list_parts(const fd_poster_t *p, size_t most[MAX_PARTS], size_t at[MAX_PARTS]) {
    const fd_layout_t *y = &p->layout;
    size_t rows = p->geometry.max_rows;
    if (p->side == FD_SIDE_S) {
        most[CALL] = sizeof(fd_call_t), at[CALL] = offsetof(fd_slot_t, call);
        most[TABLE] = rows * sizeof(fd_row_t), at[TABLE] = y->table;
        most[Q] = rows * y->q_row_bytes, at[Q] = y->q;
        most[KV] = rows * y->kv_row_bytes, at[KV] = y->kv;
        most[S_BELL] = sizeof(uint64_t), at[S_BELL] = offsetof(fd_slot_t, request_bell);
        return S_BELL + 1;
    }
    most[O] = rows * y->q_row_bytes, at[O] = y->o;
    most[REPLY] = sizeof(fd_reply_t), at[REPLY] = offsetof(fd_slot_t, reply);
    most[R_BELL] = sizeof(uint64_t), at[R_BELL] = offsetof(fd_slot_t, reply_bell);
    return R_BELL + 1;
}

/* The copy that an inline part sends instead of bytes of the region; NULL for other parts. */
static void *inlined(fd_poster_t *p, fd_chain_t *chain, uint32_t part) {
    if (part == p->n_parts - 1) return &chain->bell;
    return p->side == FD_SIDE_S && part == CALL ? &chain->call : NULL;
}

static bool build_chain(fd_poster_t *p, uint32_t slot, const size_t most[MAX_PARTS], const size_t at[MAX_PARTS]) {
    fd_chain_t *chain = &p->chains[slot];
    chain->wr = calloc(p->chain_max, sizeof *chain->wr);
    chain->sge = calloc(p->chain_max, sizeof *chain->sge);
    if (!chain->wr || !chain->sge) return false;
    const fd_verbs_t *v = &p->verbs;
    for (uint32_t part = 0; part < p->n_parts; part++)
        for (uint32_t i = 0; i < p->parts[part].count; i++) {
            size_t offset = (size_t)((uint8_t *)fd_slot_at(p->region, &p->layout, slot) - p->region) + at[part] +
                            i * v->max_message;
            void *copy = inlined(p, chain, part);
            uint32_t k = p->parts[part].first + i;
            chain->sge[k] =
                (fd_ibv_sge_t){.addr = copy ? (uintptr_t)copy : (uintptr_t)(p->region + offset), .lkey = v->lkey};
            if (copy) chain->sge[k].length = (uint32_t)most[part];
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
    fd_down_stop_link(p->down, p->side, p->region, &p->geometry, reason);
}

/* Copies the header of the slot's call or reply and sets how many bytes of each part it uses. Returns NULL, or why it
 * cannot be sent: the peer can write the region and may have overwritten the header. */
static const char *used_bytes(fd_poster_t *p, uint32_t index, size_t used[MAX_PARTS]) {
    const fd_layout_t *y = &p->layout;
    const fd_slot_t *slot = fd_slot_at(p->region, y, index);
    fd_chain_t *chain = &p->chains[index];
    if (p->side == FD_SIDE_S) {
        fd_call_t *c = &chain->call;
        fd_copy_out(c, &slot->call, sizeof *c);
        const char *error = fd_call_error(&p->geometry, c);
        if (error) return error;
        chain->bell = c->number;
        used[CALL] = sizeof *c;
        used[TABLE] = c->flags & FD_CALL_NEW_STEP ? c->n_entries * sizeof(fd_row_t) : 0;
        used[Q] = c->n_attend_rows * y->q_row_bytes;
        used[KV] = c->n_rows * y->kv_row_bytes;
        used[S_BELL] = sizeof chain->bell;
        return NULL;
    }
    fd_reply_t r;
    fd_copy_out(&r, &slot->reply, offsetof(fd_reply_t, message));
    if (r.n_attend_rows > p->geometry.max_rows) return "the peer has overwritten a reply";
    chain->bell = r.number;
    used[O] = r.n_attend_rows * y->q_row_bytes;
    used[REPLY] = sizeof r;
    used[R_BELL] = sizeof chain->bell;
    return NULL;
}

/* Sets the lengths and links of the work requests for the used bytes. Returns the number of requests. */
static uint32_t link_chain(fd_poster_t *p, fd_chain_t *chain, const size_t used[MAX_PARTS], fd_ibv_send_wr_t **first) {
    uint32_t n = 0;
    fd_ibv_send_wr_t **link = first;
    for (uint32_t part = 0; part < p->n_parts; part++) {
        size_t left = used[part];
        for (uint32_t k = p->parts[part].first; left; k++, n++) {
            size_t take = left < p->verbs.max_message ? left : p->verbs.max_message;
            chain->sge[k].length = (uint32_t)take;
            left -= take;
            *link = &chain->wr[k];
            link = &chain->wr[k].next;
        }
    }
    *link = NULL;
    return n;
}

/* Takes the completions that have arrived. A completion with an error takes the link down. */
static void reap(fd_poster_t *p) {
    fd_ibv_cq_t *cq = p->verbs.qp->send_cq;
    fd_ibv_wc_t wc[16];
    int n;
    while ((n = p->verbs.qp->context->poll_cq(cq, 16, wc)) > 0)
        for (int i = 0; i < n; i++) {
            char text[160];
            const char *cause;
            switch (wc[i].status) {
            case FD_IBV_WC_SUCCESS: p->retired = wc[i].wr_id; continue;
            case FD_IBV_WC_LOC_LEN_ERR: cause = "local length error"; break;
            case FD_IBV_WC_LOC_QP_OP_ERR:
                cause = "local queue pair operation error: the device or its link is down";
                break;
            case FD_IBV_WC_LOC_PROT_ERR: cause = "local protection error"; break;
            case FD_IBV_WC_WR_FLUSH_ERR:
                cause = "work request flushed: the queue pair has failed, or its link is down";
                break;
            case FD_IBV_WC_REM_INV_REQ_ERR: cause = "remote invalid request"; break;
            case FD_IBV_WC_REM_ACCESS_ERR:
                cause = "remote access error: the peer's device refused a write to its region";
                break;
            case FD_IBV_WC_REM_OP_ERR: cause = "remote operation error"; break;
            case FD_IBV_WC_RETRY_EXC_ERR: cause = "retry exceeded: the peer's device does not answer"; break;
            case FD_IBV_WC_RNR_RETRY_EXC_ERR: cause = "receiver-not-ready retry exceeded"; break;
            case FD_IBV_WC_FATAL_ERR: cause = "fatal device error"; break;
            default: cause = "work request failed";
            }
            snprintf(text, sizeof text, "RDMA %s (completion status %d, vendor %u)", cause, wc[i].status,
                     wc[i].vendor_err);
            fail(p, text);
        }
    if (n < 0) fail(p, "the RDMA completion queue cannot be read");
}

static fd_ibv_send_wr_t *bell_of(const fd_poster_t *p, const fd_chain_t *chain) { return &chain->wr[p->chain_max - 1]; }

/* Posts `n` linked work requests of a chain, from `first` to the bell. */
static bool post(fd_poster_t *p, const fd_chain_t *chain, fd_ibv_send_wr_t *first, uint32_t n, bool signalled) {
    fd_ibv_send_wr_t *bell = bell_of(p, chain), *bad;
    bell->wr_id = p->posted + n;
    bell->send_flags = signalled ? FD_IBV_SEND_INLINE | FD_IBV_SEND_SIGNALED : FD_IBV_SEND_INLINE;
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
    while (p->queued && !fd_is_down(p->down)) {
        fd_chain_t *chain = &p->chains[p->queue[0]];
        size_t used[MAX_PARTS];
        const char *error = used_bytes(p, p->queue[0], used);
        if (error) {
            fail(p, error);
            return;
        }
        fd_ibv_send_wr_t *first;
        uint32_t n = link_chain(p, chain, used, &first);
        if (p->posted - p->retired + n > p->verbs.depth) reap(p);
        if (fd_is_down(p->down) || p->posted - p->retired + n > p->verbs.depth) return;
        if (!post(p, chain, first, n, p->posted + n - p->signalled >= p->verbs.depth / 4)) return;
        memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
    }
}

void fd_poster_send(void *poster, uint32_t index) {
    fd_poster_t *p = poster;
    pthread_mutex_lock(&p->lock);
    if (p->started && !p->stopped && index < p->geometry.n_slots && p->queued < FD_MAX_SLOTS) {
        p->queue[p->queued++] = index;
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

void fd_poster_ring_again(fd_poster_t *p, uint32_t index) {
    pthread_mutex_lock(&p->lock);
    if (p->started && !p->stopped && index < p->geometry.n_slots) reap(p);
    if (p->started && !p->stopped && index < p->geometry.n_slots && !p->queued && !fd_is_down(p->down) &&
        p->posted - p->retired < p->verbs.depth)
        post(p, &p->chains[index], bell_of(p, &p->chains[index]), 1, true);
    pthread_mutex_unlock(&p->lock);
}

/* ---- life ---- */

fd_poster_t *fd_poster_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_down_t *down) {
    fd_poster_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->side = side;
    p->geometry = *g;
    p->layout = fd_region_layout(g);
    p->region = region;
    p->down = down;
    pthread_mutex_init(&p->lock, NULL);
    if (side == FD_SIDE_R) ((fd_region_header_t *)region)->no_wakeup = 1;
    return p;
}

static int start(fd_poster_t *p, const fd_verbs_t *verbs) {
    if (p->started || p->stopped) return EALREADY;
    p->verbs = *verbs;
    size_t most[MAX_PARTS], at[MAX_PARTS], n = 0;
    p->n_parts = list_parts(p, most, at);
    for (uint32_t part = 0; part < p->n_parts; part++) {
        size_t count = (most[part] + verbs->max_message - 1) / verbs->max_message;
        p->parts[part] = (fd_part_t){(uint32_t)n, (uint32_t)count};
        n += count;
        if (n > verbs->depth / 2) return EMSGSIZE;
    }
    p->chain_max = (uint32_t)n;
    for (uint32_t slot = 0; slot < p->geometry.n_slots; slot++)
        if (!build_chain(p, slot, most, at)) return ENOMEM;
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
    for (uint32_t slot = 0; slot < FD_MAX_SLOTS; slot++) {
        free(p->chains[slot].wr);
        free(p->chains[slot].sge);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
}
