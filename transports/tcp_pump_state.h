/* The TCP pump's own types, which tcp_pump.c (sending and life) and tcp_receive.c share. */
#pragma once

#include <sys/uio.h>

#include "tcp_pump.h"

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
    fd_link_state_t *link;

    int sock; /* -1 before start and after stop; changes only under both mutexes */
    bool started;
    pthread_t rx_thread, tx_thread;

    pthread_mutex_t lock; /* guards everything down to `n_busy`; never held across a system call that moves data */
    pthread_cond_t work;  /* wakes the sending thread */
    bool stopping;
    bool rx_thread_receives; /* false: the receiving thread waits only for the end of the connection */
    bool left;               /* atomic: what is queued is left to the sending thread and to threads that poll */
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

static inline fd_slot_t *fd_pump_slot(const fd_pump_t *p, uint32_t index) {
    return fd_slot_at(p->region, &p->layout, index);
}

/* Bytes of a frame's header: its fixed part, received before anything of the region is written. */
static inline size_t fd_frame_header_bytes(const fd_frame_t *frame) {
    return sizeof *frame + (frame->kind == FD_ARM ? sizeof(fd_arm_t) : 0);
}

/* Sets iovecs for the parts that follow the header. `report` is where the report of the frame lies. Returns the bytes
 * of the whole frame after its fd_frame_t. */
size_t fd_frame_body(const fd_pump_t *p, const fd_frame_t *frame, const fd_arm_t *arm, fd_report_t *report,
                     struct iovec *parts);

static inline size_t fd_bytes_left(const struct iovec *parts) {
    size_t n = 0;
    for (int i = 0; i < PARTS; i++) n += parts[i].iov_len;
    return n;
}

static inline void fd_consume(struct iovec *parts, size_t n_parts, size_t n) {
    for (size_t i = 0; i < n_parts && n; i++) {
        const size_t take = fd_min(n, parts[i].iov_len);
        if (!take) continue; /* the base of an empty part may be NULL */
        parts[i].iov_base = (uint8_t *)parts[i].iov_base + take;
        parts[i].iov_len -= take;
        n -= take;
    }
}

/* Makes the receiving thread receive, or only wait for the end of the connection. The caller holds `lock`. */
void fd_pump_let_rx_thread_receive(fd_pump_t *p, bool on);

/* Sends what is left, if anything: a thread that polls need not wait until the sending thread gets a core. */
void fd_pump_send_rest(fd_pump_t *p);

/* The receiving thread. */
void *fd_pump_rx_main(void *pump);

/* `poll` of fd_carrier_ops_t. */
bool fd_pump_poll(void *pump, bool go_on);
