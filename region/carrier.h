/* A carrier moves what one end of a link writes into its activation region to the other end (region.h).
 *
 * Both ends use the same contract: the S side's port (transports/port.h) and the R-engine know nothing else about a
 * transport. Shared memory, TCP and RDMA implement it; docs/adding-a-transport.md shows a new one.
 *
 * The owner of a word stores it in its own region and then calls `send`, which makes the bytes that belong to it, and
 * then the word itself, appear at the other end and wakes the threads that sleep there:
 *
 *   FD_ARM       S to R   `arm`, the first n_entries of the row table; arm_bell
 *   FD_LAYER     S to R   n_attend_rows Q rows, n_rows KV rows; layer_request
 *   FD_VERDICT   R to S   `report`; armed_bell
 *   FD_REPLY     R to S   n_attend_rows O rows unless layer_reply is FD_POISON; `report` if layer_reply is the step's
 * n_layers or FD_POISON; layer_reply
 *
 * The counts are those of the step that was armed last. No function may block, and none may need Python's GIL.
 */
#pragma once

#include "doorbell.h"

typedef enum { FD_ARM, FD_LAYER, FD_VERDICT, FD_REPLY } fd_message_t;

typedef struct {
    /* Sends one of this end's messages. The bytes must not change until the peer has answered. */
    void (*send)(void *self, uint32_t slot, fd_message_t message);

    /* Takes in bytes that have arrived, a bounded number a call, and stores the words that they announce. Between the
     * first call with `go_on` true and the call with `go_on` false, no other thread does so. Returns true if the
     * calling thread does; false if another thread does, or if the link has ended. NULL: bytes appear by themselves. */
    bool (*poll)(void *self, bool go_on);

    /* The descriptor that is readable when `poll` has something to do. Only with `poll`. */
    int (*poll_fd)(void *self);

    /* Does some of the other end's work in the calling thread, which waits for it. Returns whether there was any. With
     * `go_on` false the thread waits no longer. NULL: the other end does its work itself. */
    bool (*serve)(void *self, bool go_on);

    /* A waiter calls this after each nap, so that the death of a peer is noticed. `harder` is true every 250 ms: make
     * the peer's end acknowledge something. NULL: other means find a dead peer. */
    void (*probe)(void *self, uint32_t slot, bool harder);

    /* False if words appear in this end's region without any code here: no thread is woken, so waiters nap. */
    bool wakes;
} fd_carrier_ops_t;

typedef struct {
    const fd_carrier_ops_t *ops;
    void *self;
} fd_carrier_t;

/* A PyCapsule of this name points to an fd_carrier_t. The capsule must outlive the link that it is given to. */
#define FD_CARRIER_CAPSULE "fastdecode.carrier"

/* ---- the R side's end of shared memory: the S side reads the very words that the R-engine stores ---- */

typedef struct {
    void *region;
    fd_layout_t layout;
} fd_shm_r_t;

static inline void fd_shm_r_send(void *self, uint32_t slot, fd_message_t message) {
    fd_shm_r_t *shm = self;
    (void)message;
    fd_wake_waiters(fd_slot_at(shm->region, &shm->layout, slot));
}

static const fd_carrier_ops_t fd_shm_r_ops __attribute__((unused)) = {.send = fd_shm_r_send, .wakes = true};
