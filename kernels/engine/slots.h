/* The words of a slot: what a peer asks for, and how the engine answers. Thread 0 calls these functions, except the
 * last. */
#pragma once

#include "engine_state.h"

typedef enum {
    FD_ASKS_NOTHING,
    FD_ASKS_ARM,   /* to take a step */
    FD_ASKS_LAYER, /* to do the next layer of the slot's step */
} fd_asks_t;

/* Reads the words of a slot. */
fd_asks_t fd_slot_asks(fd_link_t *link, uint32_t slot);

/* After FD_ASKS_ARM: checks the step, takes its pages and plans it. Returns true if the copies of state->step are now
 * to be done. Returns false if there are none, or if the step is refused; it is answered then. */
bool fd_slot_arm(fd_link_t *link, uint32_t slot);
/* The copies of the step are done: answers it. */
void fd_slot_end_copies(fd_link_t *link, uint32_t slot, uint64_t busy_ns);

/* After FD_ASKS_LAYER: returns true if the layer state->layer of state->step is now to be done. Returns false if the
 * request makes no sense; the step has failed and is answered then. */
bool fd_slot_begin_layer(fd_link_t *link, uint32_t slot);
/* The GPU has failed in a layer of the step or in its copies: the link is closed for the peer. */
void fd_slot_fail(fd_link_t *link, uint32_t slot, const char *why);
/* The layer is done: counts it and replies. */
void fd_slot_end_layer(fd_link_t *link, uint32_t slot, uint64_t kv_bytes, uint64_t busy_ns);

/* Fails the steps that thread 0 has not finished, now that it no longer serves this link. Sends nothing: the owner of
 * the link ends the connection itself. */
void fd_link_refuse_waiting(fd_link_t *link);
