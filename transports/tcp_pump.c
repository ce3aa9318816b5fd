#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "tcp_pump_state.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and the structs are sent as they lie in memory"
#endif

/* The sending thread sends larger frames, because copying one into the socket would delay the calling thread. */
#define INLINE_BYTES (1u << 20)

size_t fd_frame_body(const fd_pump_t *p, const fd_frame_t *frame, const fd_arm_t *arm, fd_report_t *report,
                     struct iovec *parts) {
    const fd_layout_t *y = &p->layout;
    uint8_t *base = (uint8_t *)fd_pump_slot(p, frame->slot);
    parts[HEAD] = parts[FIRST] = parts[SECOND] = (struct iovec){NULL, 0};
    switch ((fd_message_t)frame->kind) {
    case FD_ARM: parts[FIRST] = (struct iovec){base + y->table, arm->n_entries * sizeof(fd_row_t)}; break;
    case FD_LAYER:
        parts[FIRST] = (struct iovec){base + y->q, arm->n_attend_rows * y->q_row_bytes};
        parts[SECOND] = (struct iovec){base + y->kv, arm->n_rows * y->kv_row_bytes};
        break;
    case FD_VERDICT: parts[FIRST] = (struct iovec){report, sizeof *report}; break;
    case FD_REPLY:
        if (frame->word != FD_POISON) parts[FIRST] = (struct iovec){base + y->o, arm->n_attend_rows * y->o_row_bytes};
        if (frame->word == FD_POISON || frame->word == arm->n_layers)
            parts[SECOND] = (struct iovec){report, sizeof *report};
        break;
    }
    return fd_frame_header_bytes(frame) - sizeof *frame + parts[FIRST].iov_len + parts[SECOND].iov_len;
}

/* ---- sending ---- */

/* Takes the oldest message from the queue and builds its frame. The caller holds `lock`, and `sending` is its own. */
static void begin_frame(fd_pump_t *p) {
    const uint32_t index = p->queue[0].slot;
    fd_slot_t *slot = fd_pump_slot(p, index);
    fd_pump_slot_t *state = &p->slots[index];
    fd_head_t *head = &p->tx.head;
    head->frame = (fd_frame_t){
        .magic = FD_FRAME_MAGIC, .kind = (uint16_t)p->queue[0].kind, .slot = (uint16_t)index, .word = p->queue[0].word};
    memmove(p->queue, p->queue + 1, --p->queued * sizeof p->queue[0]);
    if (head->frame.kind == FD_ARM) head->arm = state->arm;
    else if (head->frame.kind != FD_LAYER) head->report = slot->report;
    head->frame.length = fd_frame_body(p, &head->frame, &state->arm, &head->report, p->tx.parts);
    p->tx.parts[HEAD] = (struct iovec){head, fd_frame_header_bytes(&head->frame)};
}

static void set_left(fd_pump_t *p, bool left) { __atomic_store_n(&p->left, left, __ATOMIC_RELAXED); }

/* Sends queued frames until none is left, the socket is full, or a frame is large and `large_frames` is false. In the
 * last two cases the sending thread goes on, or a thread that polls. The caller holds `lock`, which is released while
 * bytes move. */
static void flush(fd_pump_t *p, bool large_frames) {
    if (p->sending) return; /* the thread that sends will see what has been queued */
    p->sending = true;
    while (p->sock >= 0 && (fd_bytes_left(p->tx.parts) || p->queued)) {
        if (!fd_bytes_left(p->tx.parts)) begin_frame(p);
        ssize_t n = -1;
        int error = EAGAIN;
        if (large_frames || fd_bytes_left(p->tx.parts) <= INLINE_BYTES) {
            const int sock = p->sock;
            pthread_mutex_unlock(&p->lock);
            struct msghdr message = {.msg_iov = p->tx.parts, .msg_iovlen = PARTS};
            do n = sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            while (n < 0 && errno == EINTR);
            error = errno;
            pthread_mutex_lock(&p->lock);
        }
        if (n >= 0) {
            fd_consume(p->tx.parts, PARTS, (size_t)n);
            if (!fd_bytes_left(p->tx.parts)) p->slots[p->tx.head.frame.slot].unsent--;
        } else if (error == EAGAIN || error == EWOULDBLOCK) {
            set_left(p, true);
            pthread_cond_signal(&p->work);
            break;
        } else {
            if (p->sock >= 0) shutdown(p->sock, SHUT_RDWR); /* the receiving thread then reports the end */
            p->queued = 0;
            fd_consume(p->tx.parts, PARTS, fd_bytes_left(p->tx.parts));
        }
    }
    p->sending = false;
    if (p->stopping) pthread_cond_broadcast(&p->work); /* set_socket waits for the end of a send */
}

/* Notes that the slot's message is about to be sent. False if the slot may not send it now: its peer has broken the
 * protocol, and the receiving thread ends the link. */
static bool note_sent(fd_pump_t *p, uint32_t index, fd_message_t kind, uint32_t *word) {
    fd_pump_slot_t *state = &p->slots[index];
    fd_slot_t *slot = fd_pump_slot(p, index);
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
    if (p->side == FD_SIDE_S && ++p->n_busy > 1 && !p->rx_thread_receives) fd_pump_let_rx_thread_receive(p, true);
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
        if (!p->left) flush(p, false);
    }
    pthread_mutex_unlock(&p->lock);
}

static void *tx_main(void *arg) {
    fd_pump_t *p = arg;
    pthread_mutex_lock(&p->lock);
    while (!p->stopping) {
        if (!p->left) {
            pthread_cond_wait(&p->work, &p->lock);
            continue;
        }
        struct pollfd writable = {.fd = p->sock, .events = POLLOUT};
        pthread_mutex_unlock(&p->lock);
        poll(&writable, 1, -1); /* the shutdown in fd_pump_stop ends this call */
        pthread_mutex_lock(&p->lock);
        set_left(p, false); /* flush sets it again if the socket is full */
        flush(p, true);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

void fd_pump_send_rest(fd_pump_t *p) {
    if (!__atomic_load_n(&p->left, __ATOMIC_RELAXED) || pthread_mutex_trylock(&p->lock)) return;
    if (p->left && !p->stopping) {
        set_left(p, false);
        flush(p, true);
    }
    pthread_mutex_unlock(&p->lock);
}

static int pump_fd(void *pump) { return ((fd_pump_t *)pump)->sock; }

const fd_carrier_ops_t fd_pump_ops = {.send = pump_send, .poll = fd_pump_poll, .poll_fd = pump_fd, .wakes = true};

/* ---- life ---- */

fd_pump_t *fd_pump_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link) {
    fd_pump_t *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->side = side;
    p->geometry = *g;
    p->layout = fd_region_layout(g);
    p->region = region;
    p->wake_fd = -1;
    p->link = link;
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
        rc = pthread_create(&p->rx_thread, NULL, fd_pump_rx_main, p);
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
