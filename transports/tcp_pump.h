/* The TCP data path: moves the used bytes of a slot's half from one region to the other, without Python.
 *
 * Each direction carries frames (little-endian, no padding):
 *
 *   both ways     fd_frame_t (magic, slot, length of the rest of the frame), and then
 *   from S to R   fd_call_t, row table (only with FD_CALL_NEW_STEP), n_attend_rows Q rows, n_rows KV rows
 *   from R to S   fd_reply_t, n_attend_rows O rows
 *
 * The call or reply determines how long its frame is. `length` must say the same; the pump ends the link of a peer
 * whose `length` does not. Both regions are private memory of their process. The pump first receives the call or reply
 * into memory of its own, checks it, and checks that the peer may fill this slot now. Then it receives the rows
 * straight into the region.
 *
 * A sender tries the socket at once and leaves the bytes that do not fit to the sending thread, so neither an R-engine
 * thread nor the S-Part ever waits for a peer that reads slowly. A thread that waits for bytes receives them itself:
 * the S-Part in fd_pump_receive, an idle R-engine in fd_pump_poll. That saves a wake-up and a hand-over between
 * threads. At other times the receiving thread receives.
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

/* `region` and `down` must outlive the pump. The pump sets `down` when the connection ends. NULL if out of memory. */
fd_pump_t *fd_pump_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_down_t *down);

/* Starts the two threads on the connected socket `sock`. The pump owns the socket from now on, even if this call fails.
 * On the R side `wake_fd` is the R-engine's eventfd, on the S side -1. Call this once. Returns 0, or -1 with errno. */
int fd_pump_start(fd_pump_t *pump, int sock, int wake_fd);

/* An fd_notify_fn: sends this end's half of the slot, which must not change until the peer has answered. Never
 * blocks. */
void fd_pump_send(void *pump, uint32_t slot);

/* S side: receives on the calling thread until the slot's reply bell reads `number`, the link is down or `timeout_ns`
 * is over. Returns at once if another thread is receiving. Spins for `spin_ns`, then sleeps. Returns the nanoseconds
 * that it has waited. */
uint64_t fd_pump_receive(fd_pump_t *pump, uint32_t slot, uint64_t number, uint64_t spin_ns, uint64_t timeout_ns);

/* R side, an fd_poll_fn: receives the bytes that have arrived. Until the calling thread calls this with `go_on` false,
 * no other thread receives. Never blocks. */
void fd_pump_poll(void *pump, bool go_on);

/* Shuts the connection down and joins the threads. Idempotent. fd_pump_send does nothing afterwards. */
void fd_pump_stop(fd_pump_t *pump);

/* After fd_pump_stop. */
void fd_pump_free(fd_pump_t *pump);

#endif
