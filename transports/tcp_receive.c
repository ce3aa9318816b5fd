/* The receiving half of the TCP pump: on the thread that holds `receive_ownership`. */
#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "tcp_pump_state.h"

/* Most bytes that one call of `poll` receives, so that one link's long frame does not hold up the others. */
#define POLL_BYTES (1u << 20)

/* S side: the receiving thread checks this often for bytes that no thread receives. */
enum { SAFETY_NET_MS = 100 };

static __thread char thread_mark; /* its address names the thread */

void fd_pump_let_rx_thread_receive(fd_pump_t *p, bool on) {
    struct epoll_event event = {.events = EPOLLRDHUP | (on ? EPOLLIN : 0)};
    epoll_ctl(p->epoll, EPOLL_CTL_MOD, p->sock, &event);
    p->rx_thread_receives = on;
}

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
    p->rx.budget -= fd_min(p->rx.budget, (size_t)n);
    fd_consume(parts, n_parts, (size_t)n);
    return true;
}

/* Checks that the peer may send this frame now. Returns NULL, or why the link must end. */
static const char *check_phase(const fd_pump_t *p, const fd_frame_t *frame, const fd_pump_slot_t *state,
                               const fd_arm_t *arm) {
    const bool rings_layer = frame->kind == FD_LAYER || frame->kind == FD_REPLY;
    if (!rings_layer && frame->word) return "a data frame rings a layer that it does not carry";
    switch ((fd_message_t)frame->kind) {
    case FD_ARM:
        if (state->phase == ARMING || state->phase == ASKED)
            return "a step was armed in a slot whose last message is not answered";
        if (arm->number != state->arm.number + 1) return "a step is out of order";
        return fd_arm_error(&p->geometry, arm);
    case FD_LAYER:
        if (state->phase == ASKED) return "a layer was asked for in a slot whose last layer is not answered";
        if (state->phase != ARMED) return "a layer was asked for in a slot that has no step";
        if (frame->word != state->asked + 1 || frame->word > arm->n_layers) return "a layer is out of order";
        return NULL;
    case FD_VERDICT: return state->phase == ARMING ? NULL : "a verdict arrived that answers nothing";
    case FD_REPLY:
        if (state->phase != ASKED || (frame->word != state->asked && frame->word != FD_POISON))
            return "a reply arrived that answers nothing";
        return NULL;
    }
    return "a data frame is of an unknown kind";
}

/* Checks a received header and sets rx.parts for what follows. Returns NULL, or why the link must end. */
static const char *begin_body(fd_pump_t *p) {
    const fd_frame_t *frame = &p->rx.head.frame;
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    const fd_arm_t *arm = frame->kind == FD_ARM ? &p->rx.head.arm : &state->arm;
    const char *error = check_phase(p, frame, state, arm);
    if (!error && frame->length != fd_frame_body(p, frame, arm, &p->rx.head.report, p->rx.parts))
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
    fd_slot_t *slot = fd_pump_slot(p, frame->slot);
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
    pthread_mutex_lock(&p->lock);
    fd_pump_slot_t *state = &p->slots[frame->slot];
    const bool last = frame->word == FD_POISON || frame->word == state->arm.n_layers;
    const bool reported = frame->kind == FD_VERDICT || last;
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

/* Receives the next bytes of the current frame, as long as the budget lasts. If the connection has ended, p->rx.error
 * says why. */
static void advance(fd_pump_t *p) {
    for (;;) {
        const size_t head = p->rx.got < sizeof(fd_frame_t) ? sizeof(fd_frame_t)
                                                           : fd_frame_header_bytes(&p->rx.head.frame);
        if (p->rx.got >= head) break;
        struct iovec part = {(uint8_t *)&p->rx.head + p->rx.got, head - p->rx.got};
        if (!receive_bytes(p, &part, 1)) return;
        if (p->rx.got == sizeof(fd_frame_t)) p->rx.error = check_frame(p, &p->rx.head.frame);
        if (!p->rx.error && p->rx.got >= sizeof(fd_frame_t) && p->rx.got == fd_frame_header_bytes(&p->rx.head.frame))
            p->rx.error = begin_body(p);
        if (p->rx.error) return;
    }
    while (fd_bytes_left(p->rx.parts))
        if (!p->rx.budget || !receive_bytes(p, p->rx.parts, PARTS)) return;
    p->rx.error = finish_frame(p);
}

/* Receives what has arrived, at most POLL_BYTES or one frame. False if the connection has ended. */
static bool receive(fd_pump_t *p) {
    if (p->rx.error) return false;
    p->rx.budget = POLL_BYTES;
    advance(p);
    if (!p->rx.error) return true;
    shutdown(p->sock, SHUT_RDWR); /* so that the other direction ends too */
    fd_link_stop(p->link, p->side, p->region, &p->geometry, p->rx.error);
    return false;
}

/* The calling thread holds `receive_ownership` and receives from now on, instead of the receiving thread. */
static void start_receiving(fd_pump_t *p) {
    pthread_mutex_lock(&p->lock);
    if (p->rx_thread_receives) fd_pump_let_rx_thread_receive(p, false);
    pthread_mutex_unlock(&p->lock);
}

/* The calling thread stops receiving and releases `receive_ownership`. The receiving thread takes over, except on the S
 * side while nothing is in flight: no bytes can arrive then, and the thread that sends the next message waits itself.
 */
static void stop_receiving(fd_pump_t *p) {
    pthread_mutex_lock(&p->lock);
    if (p->side == FD_SIDE_R || p->n_busy) fd_pump_let_rx_thread_receive(p, true);
    pthread_mutex_unlock(&p->lock);
    pthread_mutex_unlock(&p->receive_ownership);
}

void *fd_pump_rx_main(void *arg) {
    fd_pump_t *p = arg;
    struct epoll_event event;
    for (bool open = true; open;) {
        int n = epoll_wait(p->epoll, &event, 1, p->side == FD_SIDE_S ? SAFETY_NET_MS : -1);
        if (n < 0) continue; /* EINTR */
        if (n > 0) pthread_mutex_lock(&p->receive_ownership);
        else if (pthread_mutex_trylock(&p->receive_ownership)) continue;
        open = receive(p);
        pthread_mutex_unlock(&p->receive_ownership);
    }
    return NULL;
}

bool fd_pump_poll(void *pump, bool go_on) {
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
    if (go_on) fd_pump_send_rest(p);
    if (go_on) {
        struct pollfd r = {.fd = p->sock, .events = POLLIN};
        if (!poll(&r, 1, 0)) return true;
    }
    if (go_on && receive(p)) return true;
    __atomic_store_n(&p->poller, NULL, __ATOMIC_RELAXED);
    stop_receiving(p);
    return false;
}
