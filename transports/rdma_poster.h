/* The RDMA data path: writes the used bytes of a slot's half into the peer's region, doorbell last, without Python.
 *
 * Queue pair, registration and completion channel are pyverbs' (rdma_endpoint.py). Posting is not, because pyverbs
 * holds the GIL for it and an R-engine thread must not wait for that; it goes through the function table of the queue
 * pair's context.
 *
 * One chain of one-sided WRITEs a call, on one reliable connection, which executes them in order:
 *
 *   S to R       call header (inline), row table (with FD_CALL_NEW_STEP only), Q rows, KV rows, request bell (inline)
 *   R to S       O rows, reply header, reply bell (inline)
 *
 * The work requests of a slot are built once; a post sets lengths and links. A completion is asked for once in a
 * quarter of the send queue. They are taken (fd_poster_reap) when a completion event wakes the event loop, while a
 * thread waits for a reply, and when the queue is short of room. Who waits long rings again, to learn whether there is
 * anybody.
 *
 * Nobody at the other end is interrupted, so nobody there can be woken: the R-engine is told (`no_wakeup` in the
 * region's header) to look at these bells by itself, and a waiter at the S side (port.c) sleeps in short naps.
 */
#ifndef FD_RDMA_POSTER_H
#define FD_RDMA_POSTER_H

#include "down.h"
#include "verbs_abi.h"

#define FD_INLINE_BYTES 64u /* what the queue pair must take inline: a call header */

/* One end of a connected queue pair. */
typedef struct {
    fd_ibv_qp_t *qp;
    uint32_t lkey;        /* of the region here */
    uint32_t rkey;        /* of the peer's region */
    uint64_t peer;        /* address of the peer's region, in the peer's process */
    uint64_t max_message; /* bytes of a WRITE */
    uint32_t depth;       /* work requests that the send queue and the completion queue take */
} fd_verbs_t;

/* Looks at what is said to be the struct ibv_qp of number `qp_num`, without trusting the address. NULL if it is one, of
 * a reliable connection and with a completion channel; else what is wrong with it. */
const char *fd_verbs_error(uint64_t address, uint32_t qp_num);

typedef struct fd_poster fd_poster_t;

/* `region` and `down`, which is set when the connection fails, must outlive the poster. NULL if out of memory. */
fd_poster_t *fd_poster_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_down_t *down);

/* From now on fd_poster_send has somewhere to write to. Once only. 0, or -1 with errno: EALREADY, ENOMEM, or EMSGSIZE
 * if a call takes more work requests than fit into the queue. */
int fd_poster_start(fd_poster_t *poster, const fd_verbs_t *verbs);

/* An fd_notify_fn: sends this end's half of the slot, which must not change until the peer's answer to it. Never
 * blocks. */
void fd_poster_send(void *poster, uint32_t slot);

/* Sends the slot's bell once more, as it was last sent, and asks for a completion. It tells the peer nothing new, but a
 * device that gets no acknowledgement says so within a second: of a host that died after it had acknowledged all of a
 * call nothing else would. */
void fd_poster_ring_again(fd_poster_t *poster, uint32_t slot);

/* Takes what completions there are; one that tells of an error sets `down`. */
void fd_poster_reap(fd_poster_t *poster);

/* Returns when no thread touches the queue pair any more. Idempotent; send and reap stay harmless afterwards. */
void fd_poster_stop(fd_poster_t *poster);

void fd_poster_free(fd_poster_t *poster); /* after fd_poster_stop */

#endif
