/* The RDMA carrier: writes the used bytes of a slot into the peer's region, the word last, without Python.
 *
 * pyverbs makes the queue pair, the registration and the completion channel (rdma_endpoint.py). The poster itself posts
 * work requests, through the function table of the queue pair's context: pyverbs would take the GIL for that, and an
 * R-engine thread must not wait for the GIL.
 *
 * Each message (carrier.h) is a chain of one-sided WRITEs on one reliable connection, which executes them in order; the
 * step's header and the words go inline. The poster builds the work requests of a slot once; to post them it only sets
 * their lengths and links. It asks for one completion per quarter of the send queue. fd_poster_reap takes completions
 * when a completion event wakes the event loop, while a thread waits for a reply, and when the send queue is full. A
 * thread that has waited long rings again, to find out whether the peer is still there; so does a link whose control
 * connection is silent.
 *
 * A WRITE interrupts no thread at the other end, so no thread there can be woken: the R-engine polls these words even
 * while it is idle, and a waiter on the S side sleeps in short naps.
 */
#pragma once

#include "region/carrier.h"
#include "link_state.h"
#include "verbs_abi.h"

#define FD_INLINE_BYTES 64u /* the queue pair must take this much inline: a step's header */

/* One end of a connected queue pair. */
typedef struct {
    fd_ibv_qp_t *qp;
    uint32_t lkey;        /* key of this end's region */
    uint32_t rkey;        /* key of the peer's region */
    uint64_t peer;        /* address of the peer's region in the peer's process */
    uint64_t max_message; /* most bytes of one WRITE */
    uint32_t depth;       /* most work requests in the send queue, and most entries of the completion queue */
} fd_verbs_t;

/* Checks, for any `address`, that the struct ibv_qp with number `qp_num` is there, of type reliable connection and with
 * a completion channel. Returns NULL, or what is wrong. */
const char *fd_verbs_error(uint64_t address, uint32_t qp_num);

typedef struct fd_poster fd_poster_t;

/* `self` is an fd_poster_t. `send` does nothing before fd_poster_start and after fd_poster_stop. */
extern const fd_carrier_ops_t fd_poster_ops;

/* `region` and `link` must outlive the poster. It sets `link` if the connection fails. NULL if out of memory. */
fd_poster_t *fd_poster_new(fd_side_t side, uint8_t *region, const fd_geometry_t *g, fd_link_state_t *link);

/* Gives the poster its queue pair. Returns 0, or -1 with errno: EALREADY if called twice or after fd_poster_stop,
 * ENOMEM, or EMSGSIZE if a message needs more work requests than half the send queue. */
int fd_poster_start(fd_poster_t *poster, const fd_verbs_t *verbs);

/* Takes the completions that have arrived. A completion with an error sets `link`. */
void fd_poster_reap(fd_poster_t *poster);

/* Lets the peer's device acknowledge a write that changes nothing; without an acknowledgement `link` is set within a
 * second, once completions are taken. */
void fd_poster_probe(fd_poster_t *poster);

/* Returns once no thread uses the queue pair any more. Idempotent. Send and reap do nothing afterwards. */
void fd_poster_stop(fd_poster_t *poster);

void fd_poster_free(fd_poster_t *poster); /* after fd_poster_stop */
