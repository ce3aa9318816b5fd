#define _GNU_SOURCE
#include "tcp_pump.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and the structs are sent as they lie in memory"
#endif

/* The sending thread sends larger frames, because copying one into the socket would delay the calling thread. */
#define INLINE_BYTES (1u << 20)

enum {
    NAP_MS = 50,        /* a waiter checks at least this often whether its link is still up */
    SAFETY_NET_MS = 100 /* S side: the receiving thread checks this often for bytes that no thread receives */
};
enum { HEAD = 0, TABLE = 1, Q = 2, KV = 3, PARTS = 4 }; /* iovecs of a frame; the O rows of a reply are in TABLE */

typedef struct {
    bool busy;       /* a call has been posted (S side) or received (R side) and is not answered yet */
    uint64_t number; /* of that call, or of the slot's last one */
    uint32_t n_attend_rows;
} fd_pump_slot_t;

typedef struct {
    fd_frame_t frame;
    union {
        fd_call_t call;
        fd_reply_t reply;
    };
} fd_head_t;

struct fd_pump {
    fd_side_t side;
    fd_geometry_t geometry;
    fd_layout_t layout;
    uint8_t *region;
    int wake_fd;
    fd_down_t *down;

    int sock; /* -1 before start and after stop; changes only under both mutexes */
    bool started;
    pthread_t rx_thread, tx_thread;

    pthread_mutex_t lock; /* guards everything down to `head`; never held across a call that blocks */
    pthread_cond_t work;  /* wakes the sending thread */
    bool stopping;
    bool rx_thread_receives; /* false: the receiving thread waits only for the end of the connection */
    bool left_to_tx;         /* only the sending thread sends; other threads queue */
    fd_pump_slot_t slots[FD_MAX_SLOTS];
    uint32_t n_busy;              /* busy slots; S side only */
    uint32_t queue[FD_MAX_SLOTS]; /* slots to send, oldest first */
    uint32_t queued;

    /* The frame that is being sent, if `sending`. */
    bool sending;
    struct iovec parts[PARTS];
    fd_head_t head;

    /* The thread that receives holds this mutex: the receiving thread, or a thread that waits for the bytes and
     * receives them itself, because that is faster than being woken. It guards everything below and is locked before
     * `lock`. */
    pthread_mutex_t receive_ownership;
    int epoll;    /* the receiving thread sleeps on this */
    bool polling; /* the R-engine's thread 0 holds `receive_ownership`; only that thread uses the flag */
    struct {
        size_t got;                /* bytes of the current frame that have been received */
        struct iovec parts[PARTS]; /* where the rest of the frame goes; set once its head has been received */
        fd_head_t head;
        const char *error; /* why the connection has ended; NULL while it has not */
    } rx;
};

/* ---- the parts of a frame ---- */

/* Sets iovecs into the slot for the parts that follow a call header. Returns their bytes. */
static size_t call_parts(const fd_pump_t *p, fd_slot_t *slot, const fd_call_t *c, struct iovec *parts) {
    const fd_layout_t *y = &p->layout;
    uint8_t *base = (uint8_t *)slot;
    size_t table = c->flags & FD_CALL_NEW_STEP ? c->n_entries * sizeof(fd_row_t) : 0;
    parts[TABLE] = (struct iovec){base + y->table, table};
    parts[Q] = (struct iovec){base + y->q, c->n_attend_rows * y->q_row_bytes};
    parts[KV] = (struct iovec){base + y->kv, c->n_rows * y->kv_row_bytes};
    return table + parts[Q].iov_len + parts[KV].iov_len;
}

/* Sets iovecs into the slot for the parts that follow a reply header. Returns their bytes. */
static size_t reply_parts(const fd_pump_t *p, fd_slot_t *slot, const fd_reply_t *r, struct iovec *parts) {
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

static size_t bytes_left(const struct iovec *parts) {
    size_t n = 0;
    for (int i = 0; i < PARTS; i++) n += parts[i].iov_len;
    return n;
}

static void consume(struct iovec *parts, size_t n_parts, size_t n) {
    for (size_t i = 0; i < n_parts && n; i++) {
        size_t take = n < parts[i].iov_len ? n : parts[i].iov_len;
        if (!take) continue; /* the base of an empty part may be NULL */
        parts[i].iov_base = (uint8_t *)parts[i].iov_base + take;
        parts[i].iov_len -= take;
        n -= take;
    }
}

/* Sends queued frames until none is left, the socket is full, or a frame is large and `large_frames` is false. In the
 * last two cases the sending thread takes over. The caller holds `lock`. */
static void flush(fd_pump_t *p, bool large_frames) {
    while (p->sock >= 0 && (p->sending || p->queued)) {
        uint32_t index;
        if (!p->sending) {
            index = p->queue[0];
            memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
            begin_frame(p, index);
        }
        index = p->head.frame.slot;
        if (!large_frames && bytes_left(p->parts) > INLINE_BYTES) {
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
                shutdown(p->sock, SHUT_RDWR); /* the receiving thread then reports the end */
                p->queued = 0;
                p->sending = false;
            }
            return;
        }
        consume(p->parts, PARTS, (size_t)n);
        if (bytes_left(p->parts)) continue;
        p->sending = false;
        if (p->side == FD_SIDE_R)
            p->slots[index].busy = false; /* `lock` is still held, so begin_call cannot see the slot busy */
    }
}

/* Makes the receiving thread receive, or only wait for the end of the connection. The caller holds `lock`. */
static void let_rx_thread_receive(fd_pump_t *p, bool on) {
    struct epoll_event event = {.events = EPOLLRDHUP | (on ? EPOLLIN : 0)};
    epoll_ctl(p->epoll, EPOLL_CTL_MOD, p->sock, &event);
    p->rx_thread_receives = on;
}

void fd_pump_send(void *pump, uint32_t index) {
    fd_pump_t *p = pump;
    pthread_mutex_lock(&p->lock);
    if (p->sock >= 0 && !p->stopping && index < p->geometry.n_slots && p->queued < FD_MAX_SLOTS) {
        if (p->side == FD_SIDE_S) {
            const fd_call_t *call = &fd_slot_at(p->region, &p->layout, index)->call;
            p->slots[index] =
                (fd_pump_slot_t){.busy = true, .number = call->number, .n_attend_rows = call->n_attend_rows};
            /* A second call is in flight: a reply may arrive that no thread waits for. */
            if (++p->n_busy > 1 && !p->rx_thread_receives) let_rx_thread_receive(p, true);
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
        poll(&writable, 1, -1); /* the shutdown in fd_pump_stop ends this call */
        pthread_mutex_lock(&p->lock);
        p->left_to_tx = false; /* flush sets it again if the socket is full */
        flush(p, true);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* ---- receiving: on the thread that holds `receive_ownership` ---- */

typedef enum { RX_DRY, RX_FRAME, RX_END } fd_rx_t; /* no more bytes yet; a whole frame; the connection has ended */

/* Why a connection broke, given the errno of recvmsg. */
static const char *break_reason(int error) {
    switch (error) {
    case ETIMEDOUT: return "the peer has fallen silent";
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN: return "the peer can no longer be reached";
    case ECONNRESET: return "the peer reset the data connection";
    default: return "the data connection broke";
    }
}

/* Receives bytes into `parts` and removes the filled room from them. False if no bytes have arrived; if none ever will,
 * p->rx.error says why. */
static bool receive_bytes(fd_pump_t *p, struct iovec *parts, size_t n_parts, int flags) {
    ssize_t n;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = n_parts};
    do n = recvmsg(p->sock, &message, flags);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n < 0) p->rx.error = break_reason(errno);
    else if (n == 0)
        p->rx.error = p->rx.got ? "the data connection ended within a frame" : "the peer closed the data connection";
    if (n <= 0) return false;
    p->rx.got += (size_t)n;
    consume(parts, n_parts, (size_t)n);
    return true;
}

/* Checks a received call and sets rx.parts for its rows. Returns NULL, or why the link must end. */
static const char *begin_call(fd_pump_t *p, const fd_frame_t *frame, const fd_call_t *call) {
    const char *error = fd_call_error(&p->geometry, call);
    if (error) return error;
    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, frame->slot);
    if (frame->length != sizeof *call + call_parts(p, slot, call, p->rx.parts))
        return "a data frame's length does not match its call";

    /* The lock waits for flush: the peer may have sent this call before flush marks the slot of its last reply free. */
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    if (state->busy) error = "a call arrived for a slot whose last call is not answered";
    else if (call->number != state->number + 1) error = "a call is out of order";
    else *state = (fd_pump_slot_t){.busy = true, .number = call->number, .n_attend_rows = call->n_attend_rows};
    pthread_mutex_unlock(&p->lock);
    return error;
}

/* Checks a received reply and sets rx.parts for its rows. Returns NULL, or why the link must end. */
static const char *begin_reply(fd_pump_t *p, const fd_frame_t *frame, fd_reply_t *reply) {
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t state = p->slots[frame->slot];
    pthread_mutex_unlock(&p->lock);
    if (!state.busy || reply->number != state.number) return "a reply arrived that answers no call";
    if (reply->n_attend_rows != (reply->status == FD_OK ? state.n_attend_rows : 0))
        return "a reply's rows do not match its call";
    reply->message[sizeof reply->message - 1] = 0;
    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, frame->slot);
    if (frame->length != sizeof *reply + reply_parts(p, slot, reply, p->rx.parts))
        return "a data frame's length does not match its reply";
    return NULL;
}

static const char *begin_body(fd_pump_t *p) {
    const fd_frame_t *frame = &p->rx.head.frame;
    if (frame->magic != FD_FRAME_MAGIC) return "a data frame does not begin with its magic number";
    if (frame->slot >= p->geometry.n_slots) return "a data frame names a slot beyond the region";
    p->rx.parts[HEAD] = (struct iovec){NULL, 0};
    return p->side == FD_SIDE_R ? begin_call(p, frame, &p->rx.head.call) : begin_reply(p, frame, &p->rx.head.reply);
}

/* Rings the bell of a call or reply whose rows are all in the region. */
static void finish_frame(fd_pump_t *p) {
    uint32_t index = p->rx.head.frame.slot;
    fd_slot_t *slot = fd_slot_at(p->region, &p->layout, index);
    p->rx.got = 0;
    if (p->side == FD_SIDE_R) {
        slot->call = p->rx.head.call;
        fd_ring_request(slot, slot->call.number, &((fd_region_header_t *)p->region)->engine_asleep, p->wake_fd);
    } else {
        pthread_mutex_lock(&p->lock);
        p->slots[index].busy = false;
        p->n_busy--;
        pthread_mutex_unlock(&p->lock);
        slot->reply = p->rx.head.reply;
        fd_ring_reply(slot, slot->reply.number);
    }
}

/* Receives the next bytes of the current frame. If `may_block` and its head has arrived, waits for all of the frame. */
static fd_rx_t advance(fd_pump_t *p, bool may_block) {
    const size_t head = sizeof(fd_frame_t) + (p->side == FD_SIDE_R ? sizeof(fd_call_t) : sizeof(fd_reply_t));
    while (!p->rx.error && p->rx.got < head) {
        struct iovec part = {(uint8_t *)&p->rx.head + p->rx.got, head - p->rx.got};
        if (!receive_bytes(p, &part, 1, MSG_DONTWAIT)) return p->rx.error ? RX_END : RX_DRY;
        if (p->rx.got == head) p->rx.error = begin_body(p);
    }
    while (!p->rx.error && bytes_left(p->rx.parts))
        if (!receive_bytes(p, p->rx.parts, PARTS, may_block ? MSG_WAITALL : MSG_DONTWAIT))
            return p->rx.error ? RX_END : RX_DRY;
    if (p->rx.error) return RX_END;
    finish_frame(p);
    return RX_FRAME;
}

static void end_link(fd_pump_t *p) {
    shutdown(p->sock, SHUT_RDWR); /* so that the other direction ends too */
    fd_down_stop_link(p->down, p->side, p->region, &p->geometry, p->rx.error);
}

static fd_rx_t receive(fd_pump_t *p, bool may_block) {
    if (p->rx.error) return RX_END;
    fd_rx_t rx = advance(p, may_block);
    if (rx == RX_END) end_link(p);
    return rx;
}

/* The calling thread holds `receive_ownership` and receives from now on, instead of the receiving thread. */
static void start_receiving(fd_pump_t *p) {
    pthread_mutex_lock(&p->lock);
    if (p->rx_thread_receives) let_rx_thread_receive(p, false);
    pthread_mutex_unlock(&p->lock);
}

/* The calling thread stops receiving and releases `receive_ownership`. The receiving thread takes over, except on the S
 * side while no call is in flight: no bytes can arrive then, and the thread that posts the next call waits for it. */
static void stop_receiving(fd_pump_t *p) {
    pthread_mutex_lock(&p->lock);
    if (p->side == FD_SIDE_R || p->n_busy) let_rx_thread_receive(p, true);
    pthread_mutex_unlock(&p->lock);
    pthread_mutex_unlock(&p->receive_ownership);
}

static void *rx_main(void *arg) {
    fd_pump_t *p = arg;
    struct epoll_event event;
    for (fd_rx_t rx = RX_DRY; rx != RX_END;) {
        int n = epoll_wait(p->epoll, &event, 1, p->side == FD_SIDE_S ? SAFETY_NET_MS : -1);
        if (n < 0) continue; /* EINTR */
        if (n > 0) pthread_mutex_lock(&p->receive_ownership);
        else if (pthread_mutex_trylock(&p->receive_ownership)) continue;
        rx = receive(p, true);
        pthread_mutex_unlock(&p->receive_ownership);
    }
    return NULL;
}

uint64_t fd_pump_receive(fd_pump_t *p, uint32_t index, uint64_t number, uint64_t spin_ns, uint64_t timeout_ns) {
    const fd_slot_t *slot = fd_slot_at(p->region, &p->layout, index);
    uint64_t start = fd_now_ns(), waited = 0;
    if (fd_bell_read(&slot->reply_bell) == number || pthread_mutex_trylock(&p->receive_ownership)) return 0;
    fd_rx_t rx = p->sock >= 0 ? RX_FRAME : RX_END;
    if (rx != RX_END) start_receiving(p);
    while (rx != RX_END && fd_bell_read(&slot->reply_bell) != number && !fd_is_down(p->down)) {
        rx = receive(p, false);
        if (rx != RX_DRY) continue;
        waited = fd_now_ns() - start;
        if (waited >= timeout_ns) break;
        if (waited >= spin_ns) {
            struct pollfd either[2] = {{.fd = p->sock, .events = POLLIN}, {.fd = p->down->fd, .events = POLLIN}};
            uint64_t left_ms = (timeout_ns - waited) / 1000000 + 1;
            poll(either, 2, left_ms < NAP_MS ? (int)left_ms : NAP_MS);
        } else if (waited >= FD_YIELD_AFTER_NS) {
            sched_yield();
        }
    }
    if (rx == RX_END) pthread_mutex_unlock(&p->receive_ownership);
    else stop_receiving(p);
    return waited;
}

void fd_pump_poll(void *pump, bool go_on) {
    fd_pump_t *p = pump;
    if (go_on && !p->polling) {
        if (pthread_mutex_trylock(&p->receive_ownership)) return;
        if (p->sock < 0 || p->rx.error) {
            pthread_mutex_unlock(&p->receive_ownership);
            return;
        }
        p->polling = true;
        start_receiving(p);
    }
    if (!p->polling || (go_on && receive(p, false) != RX_END)) return;
    p->polling = false;
    stop_receiving(p);
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
    p->epoll = -1;
    pthread_mutex_init(&p->receive_ownership, NULL);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    return p;
}

static int start_threads(fd_pump_t *p) {
    /* The threads block all signals: Python's main thread handles them. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&p->tx_thread, NULL, tx_main, p);
    if (!rc) {
        rc = pthread_create(&p->rx_thread, NULL, rx_main, p);
        if (rc) {
            pthread_mutex_lock(&p->lock);
            p->stopping = true;
            pthread_cond_signal(&p->work);
            pthread_mutex_unlock(&p->lock);
            pthread_join(p->tx_thread, NULL);
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

/* Changes `sock` under both mutexes, so that no other thread is using the socket. */
static void set_socket(fd_pump_t *p, int sock) {
    pthread_mutex_lock(&p->receive_ownership);
    pthread_mutex_lock(&p->lock);
    p->sock = sock;
    pthread_mutex_unlock(&p->lock);
    pthread_mutex_unlock(&p->receive_ownership);
}

int fd_pump_start(fd_pump_t *p, int sock, int wake_fd) {
    struct epoll_event event = {.events = EPOLLRDHUP | (p->side == FD_SIDE_R ? EPOLLIN : 0)};
    int flags = fcntl(sock, F_GETFL), rc = 0;
    if (p->started || p->stopping) rc = EALREADY;
    else if (flags < 0 || fcntl(sock, F_SETFL, flags & ~O_NONBLOCK) < 0) rc = errno;
    else if ((p->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0 || epoll_ctl(p->epoll, EPOLL_CTL_ADD, sock, &event))
        rc = errno;
    if (!rc) {
        p->wake_fd = wake_fd;
        p->rx_thread_receives = p->side == FD_SIDE_R;
        set_socket(p, sock);
        rc = start_threads(p);
        if (rc) set_socket(p, -1);
    }
    if (rc) {
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
    pthread_join(p->rx_thread, NULL);
    pthread_join(p->tx_thread, NULL);
    int sock = p->sock;
    set_socket(p, -1); /* waits for a thread that is still receiving; it notices the end */
    close(sock);
    close(p->epoll);
    p->epoll = -1;
    p->started = false;
}

void fd_pump_free(fd_pump_t *p) {
    if (p->epoll >= 0) close(p->epoll);
    pthread_mutex_destroy(&p->receive_ownership);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
