/* The TCP data path: moves the used bytes of a slot's half from one region to the other, without Python.
 *
 * On the wire, both ways, frame by frame (little-endian, no padding):
 *
 *   fd_frame_t   magic, slot, length of all that follows
 *   S to R       fd_call_t, then, of what the call says is used: row table (with FD_CALL_NEW_STEP only), Q rows, KV
 * rows R to S       fd_reply_t, then n_attend_rows O rows
 *
 * A frame's length follows from its header, so `length` is only there to be compared: a peer that lies about it is cut
 * off. Both regions here are private to their process. What arrives lands in them at the layout's offsets once the
 * header, copied out first, has been found in bounds and the slot is known to be the peer's to fill.
 *
 * Sending tries the socket at once and leaves what does not fit to a thread, so neither an R-engine thread nor the
 * S-Part ever waits for a peer that reads slowly. Receiving is done by who waits for what comes, while somebody does:
 * the S-Part in fd_pump_receive, an idle R-engine in fd_pump_poll. That spares a wake-up and a hand-over each. At other
 * times a thread does it.
 */
#ifndef FD_TCP_PUMP_H
#define FD_TCP_PUMP_H

#include "down.h"

#define FD_FRAME_MAGIC 0x4d524644u /* "DFRM" */

typedef struct {
    uint32_t magic;
    uint32_t slot;
    uint64_t length;
} fd_frame_t;

_Static_assert(sizeof(fd_frame_t) == 16, "a frame's head is 16 bytes on the wire");

typedef struct fd_pump fd_pump_t;

/* `region` and `down`, which a pump thread sets when the connection ends, must outlive the pump. NULL if out of memory.
 */
fd_pump_t *fd_pump_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_down_t *down);

/* Starts the two threads on a connected socket, which the pump owns from now on, also on failure. R side: `wake_fd` is
 * the R-engine's eventfd; S side: -1. Once only. 0, or -1 with errno. */
int fd_pump_start(fd_pump_t *pump, int sock, int wake_fd);

/* An fd_notify_fn: sends this end's half of the slot, which must not change until the peer's answer to it. Never
 * blocks. */
void fd_pump_send(void *pump, uint32_t slot);

/* S side: receives on the calling thread until the slot's reply bell shows `number`, the link is down or the time is
 * over; not at all while another thread receives. Spins for `spin_ns`, then sleeps. Returns the nanoseconds it took. */
uint64_t fd_pump_receive(fd_pump_t *pump, uint32_t slot, uint64_t number, uint64_t spin_ns, uint64_t timeout_ns);

/* R side, an fd_poll_fn: what has come is received, by this thread from now on until it says that it does not go on.
 * Never blocks. */
void fd_pump_poll(void *pump, bool go_on);

/* Cuts the connection and joins the threads. Idempotent; fd_pump_send stays harmless afterwards. */
void fd_pump_stop(fd_pump_t *pump);

/* After fd_pump_stop. */
void fd_pump_free(fd_pump_t *pump);

#endif
