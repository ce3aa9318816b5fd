#define _GNU_SOURCE
#include "tcp_pump.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian and sent as it lies in memory"
#endif

/* A larger frame is left to the sending thread: copying it into the socket would keep the caller too long. */
#define INLINE_BYTES (128u << 10)

enum { HEAD = 0, TABLE = 1, Q = 2, KV = 3, PARTS = 4 }; /* iovecs of a frame; O rows take TABLE's place */

typedef struct {
    bool busy;             /* S: posted and not yet answered. R: received and not yet answered. */
    uint64_t seq;          /* of the call the slot is busy with, or of its last one */
    uint32_t n_attend_rows;
} fd_pump_slot_t;

struct fd_pump {
    fd_side_t side;
    fd_geometry_t geometry;
    fd_layout_t layout;
    uint8_t *region;
    int wake_fd;
    fd_down_t *down;

    int sock; /* -1 before start and after stop; changes under `lock` */
    bool started;
    pthread_t rx, tx;

    pthread_mutex_t lock; /* guards all below; never held across a call that blocks */
    pthread_cond_t work;
    bool stopping;
    bool left_to_tx;      /* the sending thread has the socket: others only queue */
    fd_pump_slot_t slots[FD_MAX_SLOTS];
    uint32_t queue[FD_MAX_SLOTS]; /* slots to send, oldest first */
    uint32_t queued;

    /* The frame under way. */
    bool sending;
    struct iovec parts[PARTS];
    struct {
        fd_frame_t frame;
        union {
            fd_call_t call;
            fd_reply_t reply;
        };
    } head;
};

/* ---- what a frame consists of ---- */

/* Bytes after the call header, as iovecs into the slot. */
static size_t call_parts(const fd_pump_t *p, fd_slot_t *slot, const fd_call_t *c, struct iovec parts[PARTS]) {
    const fd_layout_t *y = &p->layout;
    uint8_t *base = (uint8_t *)slot;
    size_t table = c->flags & FD_CALL_NEW_STEP ? c->n_entries * sizeof(fd_row_t) : 0;
    parts[TABLE] = (struct iovec){base + y->table, table};
    parts[Q] = (struct iovec){base + y->q, c->n_attend_rows * y->q_row_bytes};
    parts[KV] = (struct iovec){base + y->kv, c->n_rows * y->kv_row_bytes};
    return table + parts[Q].iov_len + parts[KV].iov_len;
}

static size_t reply_parts(const fd_pump_t *p, fd_slot_t *slot, const fd_reply_t *r, struct iovec parts[PARTS]) {
    parts[TABLE] = (struct iovec){(uint8_t *)slot + p->layout.o, r->n_attend_rows * p->layout.q_row_bytes};
    parts[Q] = parts[KV] = (struct iovec){NULL, 0};
    return parts[TABLE].iov_len;
}

/* ---- sending ---- */

static void begin_frame(fd_pump_t *p, uint32_t index) {
    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, index);
    size_t header, rest;
    if (p->side == FD_SIDE_S) {
        p->head.call = slot->call;
        header = sizeof(fd_call_t);
        rest = call_parts(p, slot, &p->head.call, p->parts);
    } else {
        p->head.reply = slot->reply;
        header = sizeof(fd_reply_t);
        rest = reply_parts(p, slot, &p->head.reply, p->parts);
    }
    p->head.frame = (fd_frame_t){.magic = FD_FRAME_MAGIC, .slot = index, .length = header + rest};
    p->parts[HEAD] = (struct iovec){&p->head, sizeof(fd_frame_t) + header};
    p->sending = true;
}

static size_t bytes_left(const fd_pump_t *p) {
    size_t n = 0;
    for (int i = 0; i < PARTS; i++) n += p->parts[i].iov_len;
    return n;
}

static void consume(struct iovec parts[PARTS], size_t n) {
    for (int i = 0; i < PARTS && n; i++) {
        size_t take = n < parts[i].iov_len ? n : parts[i].iov_len;
        parts[i].iov_base = (uint8_t *)parts[i].iov_base + take;
        parts[i].iov_len -= take;
        n -= take;
    }
}

/* Sends queued frames until nothing is left, the socket is full, or (unless `patient`) a frame is large; in the two last
 * cases the sending thread takes over. Lock held. */
static void flush(fd_pump_t *p, bool patient) {
    while (p->sock >= 0 && (p->sending || p->queued)) {
        uint32_t index;
        if (!p->sending) {
            index = p->queue[0];
            memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
            begin_frame(p, index);
        }
        index = p->head.frame.slot;
        if (!patient && bytes_left(p) > INLINE_BYTES) {
            p->left_to_tx = true;
            pthread_cond_signal(&p->work);
            return;
        }
        struct msghdr message = {.msg_iov = p->parts, .msg_iovlen = PARTS};
        ssize_t n = sendmsg(p->sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                p->left_to_tx = true;
                pthread_cond_signal(&p->work);
            } else {
                shutdown(p->sock, SHUT_RDWR); /* the receiving thread sees the end and says so */
                p->queued = 0;
                p->sending = false;
            }
            return;
        }
        consume(p->parts, (size_t)n);
        if (bytes_left(p)) continue;
        p->sending = false;
        if (p->side == FD_SIDE_R) p->slots[index].busy = false; /* before the lock, and so the peer's next call, gets in */
    }
}

void fd_pump_send(void *pump, uint32_t index) {
    fd_pump_t *p = pump;
    pthread_mutex_lock(&p->lock);
    if (p->sock >= 0 && !p->stopping && index < p->geometry.n_slots && p->queued < FD_MAX_SLOTS) {
        if (p->side == FD_SIDE_S) {
            const fd_call_t *call = &fd_slot_at(p->region, &p->layout, index)->call;
            p->slots[index] = (fd_pump_slot_t){.busy = true, .seq = call->seq, .n_attend_rows = call->n_attend_rows};
        }
        p->queue[p->queued++] = index;
        if (!p->left_to_tx) flush(p, false);
    }
    pthread_mutex_unlock(&p->lock);
}

static void *tx_main(void *arg) {
    fd_pump_t *p = arg;
    pthread_mutex_lock(&p->lock);
    while (!p->stopping) {
        if (!p->left_to_tx) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        struct pollfd writable = {.fd = p->sock, .events = POLLOUT};
        pthread_mutex_unlock(&p->lock);
        poll(&writable, 1, -1); /* fd_pump_stop's shutdown ends it */
        pthread_mutex_lock(&p->lock);
        p->left_to_tx = false; /* flush sets it again if the socket is full */
        flush(p, true);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* ---- receiving; these return NULL or why the link ends ---- */

static const char *receive(fd_pump_t *p, struct iovec *parts, int n_parts, bool at_boundary) {
    bool first = at_boundary;
    for (;;) {
        while (n_parts && !parts->iov_len) parts++, n_parts--;
        if (!n_parts) return NULL;
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)n_parts};
        ssize_t n = recvmsg(p->sock, &message, MSG_WAITALL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == ETIMEDOUT ? "the peer has fallen silent" : "the data connection broke";
        if (n == 0) return first ? "the peer closed the data connection" : "the data connection ended within a frame";
        first = false;
        size_t left = (size_t)n;
        for (int i = 0; left; i++) {
            size_t take = left < parts[i].iov_len ? left : parts[i].iov_len;
            parts[i].iov_base = (uint8_t *)parts[i].iov_base + take;
            parts[i].iov_len -= take;
            left -= take;
        }
    }
}

static const char *receive_call(fd_pump_t *p, const fd_frame_t *frame, const fd_call_t *call) {
    const char *error = fd_call_error(&p->geometry, call);
    if (error) return error;
    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, frame->slot);
    struct iovec parts[PARTS];
    if (frame->length != sizeof *call + call_parts(p, slot, call, parts)) return "a data frame's length does not match its call";

    /* Under the lock, because a reply's last byte may reach the peer before its sender has marked the slot free. */
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    if (state->busy) error = "a call came for a slot whose last call is not answered";
    else if (call->seq != state->seq + 1) error = "a call is out of order";
    else *state = (fd_pump_slot_t){.busy = true, .seq = call->seq, .n_attend_rows = call->n_attend_rows};
    pthread_mutex_unlock(&p->lock);
    if (error) return error;

    error = receive(p, parts + TABLE, PARTS - TABLE, false);
    if (error) return error;
    slot->call = *call;
    fd_ring_request(slot, call->seq, &((fd_region_header_t *)p->region)->engine_asleep, p->wake_fd);
    return NULL;
}

static const char *receive_reply(fd_pump_t *p, const fd_frame_t *frame, fd_reply_t *reply) {
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t state = p->slots[frame->slot];
    pthread_mutex_unlock(&p->lock);
    if (!state.busy || reply->seq != state.seq) return "a reply came that answers no call";
    if (reply->n_attend_rows != (reply->status == FD_OK ? state.n_attend_rows : 0)) return "a reply's rows do not match its call";
    reply->message[sizeof reply->message - 1] = 0;

    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, frame->slot);
    struct iovec parts[PARTS];
    if (frame->length != sizeof *reply + reply_parts(p, slot, reply, parts)) return "a data frame's length does not match its reply";
    const char *error = receive(p, parts + TABLE, PARTS - TABLE, false);
    if (error) return error;
    pthread_mutex_lock(&p->lock);
    p->slots[frame->slot].busy = false;
    pthread_mutex_unlock(&p->lock);
    slot->reply = *reply;
    fd_ring_reply(slot, reply->seq);
    return NULL;
}

static void *rx_main(void *arg) {
    fd_pump_t *p = arg;
    struct {
        fd_frame_t frame;
        union {
            fd_call_t call;
            fd_reply_t reply;
        };
    } head;
    size_t header = p->side == FD_SIDE_R ? sizeof head.call : sizeof head.reply;
    const char *error = NULL;
    while (!error) {
        struct iovec part = {&head, sizeof head.frame + header};
        error = receive(p, &part, 1, true);
        if (error) break;
        if (head.frame.magic != FD_FRAME_MAGIC) error = "a data frame does not begin with its magic number";
        else if (head.frame.slot >= p->geometry.n_slots) error = "a data frame names a slot beyond the region";
        else if (p->side == FD_SIDE_R) error = receive_call(p, &head.frame, &head.call);
        else error = receive_reply(p, &head.frame, &head.reply);
    }
    shutdown(p->sock, SHUT_RDWR); /* no half-dead link: whatever ended one direction ends the other */
    fd_down_set(p->down, error);
    if (p->side == FD_SIDE_S) /* nobody will ring these bells any more */
        for (uint32_t i = 0; i < p->geometry.n_slots; i++) fd_stop_waiters(fd_slot_at(p->region, &p->layout, i), &p->down->flag);
    return NULL;
}

/* ---- life ---- */

fd_pump_t *fd_pump_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_down_t *down) {
    fd_pump_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->side = side;
    p->geometry = *g;
    p->layout = fd_region_layout(g);
    p->region = region;
    p->wake_fd = -1;
    p->down = down;
    p->sock = -1;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    return p;
}

int fd_pump_start(fd_pump_t *p, int sock, int wake_fd) {
    int flags = fcntl(sock, F_GETFL), rc;
    if (p->started || p->stopping) errno = EALREADY, flags = -1;
    if (flags < 0 || fcntl(sock, F_SETFL, flags & ~O_NONBLOCK) < 0) {
        rc = errno;
        close(sock);
        errno = rc;
        return -1;
    }
    p->sock = sock;
    p->wake_fd = wake_fd;
    /* Signals are for Python's main thread. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    rc = pthread_create(&p->tx, NULL, tx_main, p);
    if (!rc) {
        rc = pthread_create(&p->rx, NULL, rx_main, p);
        if (rc) {
            pthread_mutex_lock(&p->lock);
            p->stopping = true;
            pthread_cond_signal(&p->work);
            pthread_mutex_unlock(&p->lock);
            pthread_join(p->tx, NULL);
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) {
        p->sock = -1;
        close(sock);
        errno = rc;
        return -1;
    }
    p->started = true;
    return 0;
}

void fd_pump_stop(fd_pump_t *p) {
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    if (p->started) shutdown(p->sock, SHUT_RDWR);
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
    if (!p->started) return;
    pthread_join(p->rx, NULL);
    pthread_join(p->tx, NULL);
    pthread_mutex_lock(&p->lock);
    close(p->sock);
    p->sock = -1;
    pthread_mutex_unlock(&p->lock);
    p->started = false;
}

void fd_pump_free(fd_pump_t *p) {
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
