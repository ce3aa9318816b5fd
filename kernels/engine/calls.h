/* The words of a slot: what a peer asks for, and how the engine answers. Thread 0 calls these functions, except the
 * last. */
#ifndef FD_CALLS_H
#define FD_CALLS_H

#include "engine_state.h"

typedef enum {
    FD_ASKS_NOTHING,
    FD_ASKS_LAYER, /* to do a layer of the slot's step */
} fd_asks_t;

/* Reads the words of a slot. */
fd_asks_t fd_slot_asks(fd_link_t *link, uint32_t slot);

/* After FD_ASKS_LAYER: checks the whole call, and plans its step if it is the first of one. Returns true if the layer
 * state->layer of state->step is now to be done. Returns false if the call was refused; it is answered then. */
bool fd_slot_begin_layer(fd_link_t *link, uint32_t slot);
/* The layer is done: ends page copies that are complete, counts the call and replies. */
void fd_slot_end_layer(fd_link_t *link, uint32_t slot, uint64_t kv_bytes, uint64_t busy_ns);

/* Answers the calls that thread 0 has not served, now that it no longer serves this link. Does not call `notify`: the
 * owner of the link ends the connection itself. */
void fd_link_refuse_waiting(fd_link_t *link);

#endif
