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
/* Most bytes that one call of `poll` receives, so that one link's long frame does not hold up the others. */
#define POLL_BYTES (1u << 20)

/* S side: the receiving thread checks this often for bytes that no thread receives. */
enum { SAFETY_NET_MS = 100 };
enum { HEAD = 0, FIRST = 1, SECOND = 2, PARTS = 3 }; /* iovecs of a frame */

/* A peer that keeps to the protocol sends nothing for a slot before it has the slot's last answer. Its next message may
 * arrive just before the sender notes that the answer is sent, so there may be two of them, and no more. */
enum { MAX_UNSENT = 2 };

/* What a slot has in flight. The peers of a link that keeps to the protocol agree on it. */
typedef enum { IDLE, ARMING, ARMED, ASKED } phase_t;

typedef struct {
    phase_t phase;
    uint32_t asked;  /* layers that have been asked for */
    uint32_t unsent; /* messages that are queued or being sent */
    fd_arm_t arm;    /* of the last step; its number is the last one used */
} fd_pump_slot_t;

typedef struct {
    fd_frame_t frame;
    union {
        fd_arm_t arm;       /* follows the frame's head of ARM */
        fd_report_t report; /* of VERDICT and of the last REPLY: follows the O rows there */
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

    pthread_mutex_t lock; /* guards everything down to `n_busy`; never held across a system call that moves data */
    pthread_cond_t work;  /* wakes the sending thread */
    bool stopping;
    bool rx_thread_receives; /* false: the receiving thread waits only for the end of the connection */
    bool left_to_tx;         /* only the sending thread sends; other threads queue */
    bool sending;            /* a thread is in `flush` and sends what is queued */
    fd_pump_slot_t slots[FD_MAX_SLOTS];
    struct {
        uint32_t slot, word;
        fd_message_t kind;
    } queue[MAX_UNSENT * FD_MAX_SLOTS]; /* to send, oldest first */
    uint32_t queued;
    uint32_t n_busy; /* S side: slots in phase ARMING or ASKED */

    /* The frame that the thread with `sending` sends, if any bytes of it are left. */
    struct {
        struct iovec parts[PARTS];
        fd_head_t head;
    } tx;

    /* The thread that receives holds this mutex: the receiving thread, or a thread that waits for the bytes and
     * receives them itself, because that is faster than being woken. It guards everything below and is locked before
     * `lock`. */
    pthread_mutex_t receive_ownership;
    int epoll;          /* the receiving thread sleeps on this */
    const char *poller; /* atomic: `thread_mark` of the thread that holds `receive_ownership` between calls of `poll` */
    struct {
        size_t got;                /* bytes of the current frame that have been received */
        size_t budget;             /* bytes that this call may still receive */
        struct iovec parts[PARTS]; /* where the rest of the frame goes; set once its head has been received */
        fd_head_t head;
        const char *error; /* why the connection has ended; NULL while it has not */
    } rx;
};

static __thread char thread_mark; /* its address names the thread */

/* ---- the parts of a frame ---- */

static fd_slot_t *slot_of(const fd_pump_t *p, uint32_t index) { return fd_slot_at(p->region, &p->layout, index); }

/* Bytes of a frame's header: its fixed part, received before anything of the region is written. */
static size_t header_bytes(const fd_frame_t *frame) {
    return sizeof *frame + (frame->kind == FD_ARM ? sizeof(fd_arm_t) : 0);
}

/* Sets iovecs for the parts that follow the header. `report` is where the report of the frame lies. Returns the bytes
 * of the whole frame after its fd_frame_t. */
static size_t body_parts(const fd_pump_t *p, const fd_frame_t *frame, const fd_arm_t *arm, fd_report_t *report,
                         struct iovec *parts) {
    const fd_layout_t *y = &p->layout;
    uint8_t *base = (uint8_t *)slot_of(p, frame->slot);
    parts[HEAD] = parts[FIRST] = parts[SECOND] = (struct iovec){NULL, 0};
    switch ((fd_message_t)frame->kind) {
    case FD_ARM: parts[FIRST] = (struct iovec){base + y->table, arm->n_entries * sizeof(fd_row_t)}; break;
    case FD_LAYER:
        parts[FIRST] = (struct iovec){base + y->q, arm->n_attend_rows * y->q_row_bytes};
        parts[SECOND] = (struct iovec){base + y->kv, arm->n_rows * y->kv_row_bytes};
        break;
    case FD_VERDICT: parts[FIRST] = (struct iovec){report, sizeof *report}; break;
    case FD_REPLY:
        if (frame->word != FD_POISON) parts[FIRST] = (struct iovec){base + y->o, arm->n_attend_rows * y->q_row_bytes};
        if (frame->word == FD_POISON || frame->word == p->geometry.n_layers)
            parts[SECOND] = (struct iovec){report, sizeof *report};
        break;
    }
    return header_bytes(frame) - sizeof *frame + parts[FIRST].iov_len + parts[SECOND].iov_len;
}

/* ---- sending ---- */

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

/* Takes the oldest message from the queue and builds its frame. The caller holds `lock`, and `sending` is its own. */
static void begin_frame(fd_pump_t *p) {
    const uint32_t index = p->queue[0].slot;
    fd_slot_t *slot = slot_of(p, index);
    fd_pump_slot_t *state = &p->slots[index];
    fd_head_t *head = &p->tx.head;
    head->frame = (fd_frame_t){
        .magic = FD_FRAME_MAGIC, .kind = (uint16_t)p->queue[0].kind, .slot = (uint16_t)index, .word = p->queue[0].word};
    memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
    if (head->frame.kind == FD_ARM) head->arm = state->arm;
    else if (head->frame.kind != FD_LAYER) head->report = slot->report;
    head->frame.length = body_parts(p, &head->frame, &state->arm, &head->report, p->tx.parts);
    p->tx.parts[HEAD] = (struct iovec){head, header_bytes(&head->frame)};
}

/* Sends queued frames until none is left, the socket is full, or a frame is large and `large_frames` is false. In the
 * last two cases the sending thread takes over. The caller holds `lock`, which is released while bytes move. */
static void flush(fd_pump_t *p, bool large_frames) {
    if (p->sending) return; /* the thread that sends will see what has been queued */
    p->sending = true;
    while (p->sock >= 0 && (bytes_left(p->tx.parts) || p->queued)) {
        if (!bytes_left(p->tx.parts)) begin_frame(p);
        ssize_t n = -1;
        int error = EAGAIN;
        if (large_frames || bytes_left(p->tx.parts) <= INLINE_BYTES) {
            const int sock = p->sock;
            pthread_mutex_unlock(&p->lock);
            struct msghdr message = {.msg_iov = p->tx.parts, .msg_iovlen = PARTS};
            do n = sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            while (n < 0 && errno == EINTR);
            error = errno;
            pthread_mutex_lock(&p->lock);
        }
        if (n >= 0) {
            consume(p->tx.parts, PARTS, (size_t)n);
            if (!bytes_left(p->tx.parts)) p->slots[p->tx.head.frame.slot].unsent--;
        } else if (error == EAGAIN || error == EWOULDBLOCK) {
            p->left_to_tx = true;
            pthread_cond_signal(&p->work);
            break;
        } else {
            if (p->sock >= 0) shutdown(p->sock, SHUT_RDWR); /* the receiving thread then reports the end */
            p->queued = 0;
            consume(p->tx.parts, PARTS, bytes_left(p->tx.parts));
        }
    }
    p->sending = false;
    if (p->stopping) pthread_cond_broadcast(&p->work); /* set_socket waits for the end of a send */
}

/* Makes the receiving thread receive, or only wait for the end of the connection. The caller holds `lock`. */
static void let_rx_thread_receive(fd_pump_t *p, bool on) {
    struct epoll_event event = {.events = EPOLLRDHUP | (on ? EPOLLIN : 0)};
    epoll_ctl(p->epoll, EPOLL_CTL_MOD, p->sock, &event);
    p->rx_thread_receives = on;
}

/* Notes that the slot's message is about to be sent. False if the slot may not send it now: its peer has broken the
 * protocol, and the receiving thread ends the link. */
static bool note_sent(fd_pump_t *p, uint32_t index, fd_message_t kind, uint32_t *word) {
    fd_pump_slot_t *state = &p->slots[index];
    fd_slot_t *slot = slot_of(p, index);
    *word = 0;
    switch (kind) {
    case FD_ARM:
        state->phase = ARMING;
        state->asked = 0;
        state->arm = slot->arm;
        break;
    case FD_LAYER:
        state->phase = ASKED;
        *word = state->asked = slot->layer_request;
        break;
    case FD_VERDICT:
        if (state->phase != ARMING) return false;
        state->phase = slot->report.status == FD_OK ? ARMED : IDLE;
        break;
    case FD_REPLY:
        if (state->phase != ASKED) return false;
        *word = slot->layer_reply;
        state->phase = *word == FD_POISON ? IDLE : ARMED;
        break;
    }
    state->unsent++;
    /* A second message is in flight: its answer may arrive when no thread waits for it. */
    if (p->side == FD_SIDE_S && ++p->n_busy > 1 && !p->rx_thread_receives) let_rx_thread_receive(p, true);
    return true;
}

static void pump_send(void *pump, uint32_t index, fd_message_t kind) {
    fd_pump_t *p = pump;
    uint32_t word;
    pthread_mutex_lock(&p->lock);
    if (p->sock >= 0 && !p->stopping && index < p->geometry.n_slots && p->slots[index].unsent < MAX_UNSENT &&
        note_sent(p, index, kind, &word)) {
        p->queue[p->queued].slot = index;
        p->queue[p->queued].kind = kind;
        p->queue[p->queued++].word = word;
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

/* No more bytes yet; the budget is used up; a whole frame; the connection has ended. */
typedef enum { RX_DRY, RX_MORE, RX_FRAME, RX_END } fd_rx_t;

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
static bool receive_bytes(fd_pump_t *p, struct iovec *parts, size_t n_parts) {
    ssize_t n;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = n_parts};
    do n = recvmsg(p->sock, &message, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n < 0) p->rx.error = break_reason(errno);
    else if (n == 0)
        p->rx.error = p->rx.got ? "the data connection ended within a frame" : "the peer closed the data connection";
    if (n <= 0) return false;
    p->rx.got += (size_t)n;
    p->rx.budget -= p->rx.budget < (size_t)n ? p->rx.budget : (size_t)n;
    consume(parts, n_parts, (size_t)n);
    return true;
}

/* Checks that the peer may send this frame now. Returns NULL, or why the link must end. */
static const char *check_phase(const fd_pump_t *p, const fd_frame_t *frame, const fd_pump_slot_t *state,
                               const fd_arm_t *arm) {
    const char *error;
    switch ((fd_message_t)frame->kind) {
    case FD_ARM:
        if (state->phase == ARMING || state->phase == ASKED)
            return "a step was armed in a slot whose last message is not answered";
        if (arm->number != state->arm.number + 1) return "a step is out of order";
        error = fd_arm_error(&p->geometry, arm);
        break;
    case FD_LAYER:
        error = state->phase == ASKED   ? "a layer was asked for in a slot whose last layer is not answered"
                : state->phase != ARMED ? "a layer was asked for in a slot that has no step"
                : frame->word != state->asked + 1 || frame->word > p->geometry.n_layers ? "a layer is out of order"
                                                                                        : NULL;
        return error;
    case FD_VERDICT: error = state->phase == ARMING ? NULL : "a verdict arrived that answers nothing"; break;
    case FD_REPLY:
        error = state->phase == ASKED && (frame->word == state->asked || frame->word == FD_POISON)
                    ? NULL
                    : "a reply arrived that answers nothing";
        return error;
    default: return "a data frame is of an unknown kind";
    }
    return error ? error : frame->word ? "a data frame rings a layer that it does not carry" : NULL;
}

/* Checks a received header and sets rx.parts for what follows. Returns NULL, or why the link must end. */
static const char *begin_body(fd_pump_t *p) {
    const fd_frame_t *frame = &p->rx.head.frame;
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    const fd_arm_t *arm = frame->kind == FD_ARM ? &p->rx.head.arm : &state->arm;
    const char *error = check_phase(p, frame, state, arm);
    if (!error && frame->length != body_parts(p, frame, arm, &p->rx.head.report, p->rx.parts))
        error = "a data frame's length does not match its step";
    if (!error && p->side == FD_SIDE_R && state->unsent >= MAX_UNSENT)
        error = "the peer goes on without reading its answers";
    if (!error && frame->kind == FD_ARM) state->phase = ARMING, state->asked = 0, state->arm = *arm;
    if (!error && frame->kind == FD_LAYER) state->phase = ASKED, state->asked = frame->word;
    pthread_mutex_unlock(&p->lock);
    return error;
}

/* Checks what can be checked of the first bytes, so that the length of the header is known. */
static const char *check_frame(const fd_pump_t *p, const fd_frame_t *frame) {
    if (frame->magic != FD_FRAME_MAGIC) return "a data frame does not begin with its magic number";
    if (frame->slot >= p->geometry.n_slots) return "a data frame names a slot beyond the region";
    if (frame->kind > FD_REPLY || (frame->kind <= FD_LAYER) != (p->side == FD_SIDE_R))
        return "a data frame is of an unknown kind";
    return frame->reserved ? "a data frame's reserved field is not zero" : NULL;
}

/* S side: the report of a frame must name its step, and must be a refusal exactly where the words say so. */
static const char *check_report(const fd_frame_t *frame, const fd_pump_slot_t *state, const fd_report_t *report) {
    if (report->number != state->arm.number) return "a report does not carry its step's number";
    if (frame->kind == FD_REPLY && (frame->word == FD_POISON) != (report->status != FD_OK))
        return "a report's status does not match its words";
    return NULL;
}

/* Stores the word of a frame whose bytes are all in the region. Returns NULL, or why the link must end. */
static const char *finish_frame(fd_pump_t *p) {
    const fd_frame_t *frame = &p->rx.head.frame;
    fd_slot_t *slot = slot_of(p, frame->slot);
    p->rx.got = 0;
    if (p->side == FD_SIDE_R) {
        if (frame->kind == FD_ARM) {
            slot->arm = p->rx.head.arm;
            fd_bell_store(&slot->arm_bell, slot->arm.number);
        } else {
            fd_word_store(&slot->layer_request, frame->word);
        }
        fd_wake_engine(&((fd_region_header_t *)p->region)->engine_asleep, p->wake_fd);
        return NULL;
    }
    const bool reported = frame->kind == FD_VERDICT || frame->word == FD_POISON || frame->word == p->geometry.n_layers;
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    const char *error = reported ? check_report(frame, state, &p->rx.head.report) : NULL;
    const uint64_t number = state->arm.number;
    const bool failed = reported && p->rx.head.report.status != FD_OK;
    if (!error) state->phase = failed ? IDLE : ARMED, p->n_busy--;
    pthread_mutex_unlock(&p->lock);
    if (error) return error;
    if (reported) slot->report = p->rx.head.report;
    if (frame->kind == FD_VERDICT) fd_bell_store(&slot->armed_bell, number);
    else fd_word_store(&slot->layer_reply, frame->word);
    fd_wake_waiters(slot);
    return NULL;
}

/* Receives the next bytes of the current frame, as long as the budget lasts. */
static fd_rx_t advance(fd_pump_t *p) {
    for (;;) {
        const size_t head = p->rx.got < sizeof(fd_frame_t) ? sizeof(fd_frame_t) : header_bytes(&p->rx.head.frame);
        if (p->rx.got >= head) break;
        struct iovec part = {(uint8_t *)&p->rx.head + p->rx.got, head - p->rx.got};
        if (!receive_bytes(p, &part, 1)) return p->rx.error ? RX_END : RX_DRY;
        if (p->rx.got == sizeof(fd_frame_t)) p->rx.error = check_frame(p, &p->rx.head.frame);
        if (!p->rx.error && p->rx.got >= sizeof(fd_frame_t) && p->rx.got == header_bytes(&p->rx.head.frame))
            p->rx.error = begin_body(p);
        if (p->rx.error) return RX_END;
    }
    while (bytes_left(p->rx.parts)) {
        if (!p->rx.budget) return RX_MORE;
        if (!receive_bytes(p, p->rx.parts, PARTS)) return p->rx.error ? RX_END : RX_DRY;
    }
    p->rx.error = finish_frame(p);
    return p->rx.error ? RX_END : RX_FRAME;
}

static void end_link(fd_pump_t *p) {
    shutdown(p->sock, SHUT_RDWR); /* so that the other direction ends too */
    fd_down_stop_link(p->down, p->side, p->region, &p->geometry, p->rx.error);
}

static fd_rx_t receive(fd_pump_t *p) {
    if (p->rx.error) return RX_END;
    p->rx.budget = POLL_BYTES;
    fd_rx_t rx = advance(p);
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
        rx = receive(p);
        pthread_mutex_unlock(&p->receive_ownership);
    }
    return NULL;
}

static bool pump_poll(void *pump, bool go_on) {
    fd_pump_t *p = pump;
    const bool mine = __atomic_load_n(&p->poller, __ATOMIC_RELAXED) == &thread_mark;
    if (go_on && !mine) {
        if (pthread_mutex_trylock(&p->receive_ownership)) return false;
        if (p->sock < 0 || p->rx.error) {
            pthread_mutex_unlock(&p->receive_ownership);
            return false;
        }
        __atomic_store_n(&p->poller, &thread_mark, __ATOMIC_RELAXED);
        start_receiving(p);
    } else if (!mine) {
        return false;
    }
    if (go_on && receive(p) != RX_END) return true;
    __atomic_store_n(&p->poller, NULL, __ATOMIC_RELAXED);
    stop_receiving(p);
    return false;
}

static int pump_fd(void *pump) { return ((fd_pump_t *)pump)->sock; }

const fd_carrier_ops_t fd_pump_ops = {.send = pump_send, .poll = pump_poll, .poll_fd = pump_fd, .wakes = true};

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
    while (p->sending) pthread_cond_wait(&p->work, &p->lock);
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
