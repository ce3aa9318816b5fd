/* The TCP carrier: moves the used bytes of a slot from one region to the other, without Python.
 *
 * Each direction carries frames (little-endian, no padding): an fd_frame_t, and then, by its `kind`:
 *
 *   FD_ARM       S to R   fd_arm_t, row table
 *   FD_LAYER     S to R   n_attend_rows Q rows, n_rows KV rows; `word` is layer_request
 *   FD_VERDICT   R to S   fd_report_t
 *   FD_REPLY     R to S   n_attend_rows O rows, or none if `word` is FD_POISON; fd_report_t if `word` is n_layers or
 *                         FD_POISON; `word` is layer_reply
 *
 * The counts are those of the slot's last ARM, so both ends know how long a frame is. `length` must say the same; the
 * pump ends the link of a peer whose `length` does not. Both regions are private memory of their process. The pump
 * first receives a header into memory of its own, checks it, and checks that the peer may send this now. Then it
 * receives table and rows straight into the region, and stores the word last.
 *
 * A sender tries the socket at once and leaves the bytes that do not fit to the sending thread, so neither an R-engine
 * thread nor the S-Part ever waits for a peer that reads slowly. A thread that waits for bytes receives them itself, in
 * fd_pump_ops.poll: a thread of the S-Part, or an idle R-engine. That saves a wake-up and a hand-over between threads.
 * At other times the receiving thread receives.
 */
#pragma once

#include "region/carrier.h"
#include "link_state.h"

#define FD_FRAME_MAGIC 0x4d524644u /* "DFRM" */

typedef struct {
    uint32_t magic;
    uint16_t kind; /* fd_message_t */
    uint16_t slot;
    uint32_t word;     /* the layer word that the frame rings; 0 for ARM and VERDICT */
    uint32_t reserved; /* 0 */
    uint64_t length;   /* bytes that follow */
} fd_frame_t;

_Static_assert(sizeof(fd_frame_t) == 24, "a frame's head is 24 bytes on the wire");

typedef struct fd_pump fd_pump_t;

/* `self` is an fd_pump_t. `send` does nothing after fd_pump_stop. */
extern const fd_carrier_ops_t fd_pump_ops;

/* `region` and `link` must outlive the pump. The pump sets `link` when the connection ends. NULL if out of memory. */
fd_pump_t *fd_pump_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link);

/* Starts the two threads on the connected socket `sock`. The pump owns the socket from now on, even if this call fails.
 * On the R side `wake_fd` is the R-engine's eventfd, on the S side -1. Call this once. Returns 0, or -1 with errno. */
int fd_pump_start(fd_pump_t *pump, int sock, int wake_fd);

/* Shuts the connection down and joins the threads. Idempotent. */
void fd_pump_stop(fd_pump_t *pump);

/* After fd_pump_stop. */
void fd_pump_free(fd_pump_t *pump);
