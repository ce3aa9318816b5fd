/* The S side's data path: arms steps, asks for their layers and waits, over any carrier.
 *
 * Any thread may use a port, but only one thread at a time may use a slot. Any thread may call fd_port_kill, which
 * ends every wait. A slot goes through these phases:
 *
 *   IDLE -- fd_port_arm --> ARMING -- fd_port_await --> ARMED -- fd_port_ask --> ASKED -- fd_port_await --> ARMED ...
 *
 * A refusal, and fd_port_disarm, lead back to IDLE. fd_port_arm in phase ARMED abandons the step.
 */
#pragma once

#include <poll.h>

#include "region/carrier.h"
#include "link_state.h"
#include "region/stand_in.h"

typedef enum { FD_SLOT_IDLE, FD_SLOT_ARMING, FD_SLOT_ARMED, FD_SLOT_ASKED } fd_slot_phase_t;

typedef struct {
    fd_slot_phase_t phase;
    uint32_t asked;  /* layers that have been asked for */
    uint32_t unsure; /* reads in a row that showed a word with no meaning here; see `meaningless` in port.c */
    fd_arm_t arm;    /* the step's sizes; its number is the last one used */
} fd_port_slot_t;

/* What a layer touches stands together, because a step may be spread over many ports. */
typedef struct {
    uint8_t *region;
    fd_carrier_t carrier;
    fd_layout_t layout;
    fd_geometry_t geometry;
    uint64_t spin_ns; /* how long a waiter spins before it sleeps */
    fd_link_state_t link;
    fd_port_slot_t slots[FD_MAX_SLOTS];
    fd_report_t reports[FD_MAX_SLOTS]; /* the last report read from each slot */
} fd_port_t;

typedef enum {
    FD_PORT_OK,
    FD_PORT_PENDING,
    FD_PORT_MISUSE,  /* nothing was begun */
    FD_PORT_REFUSED, /* the report says why; the link stays usable */
    FD_PORT_DOWN,    /* the reason is in `link` */
} fd_port_result_t;

/* The caller sets `carrier` afterwards. Returns 0, or -1 with errno if no descriptor is free. */
int fd_port_init(fd_port_t *port, uint8_t *region, const fd_geometry_t *g, uint32_t spin_us);

/* Copies the row table `rows` into the slot and publishes the step, which runs the first `n_layers` layers of the
 * link. Returns at once: NULL, or what the caller did wrong, and then it has sent nothing. To be called for a port that
 * is up: at the end of a link a slot may wait for ever. */
const char *fd_port_arm(fd_port_t *port, uint32_t slot, const fd_row_t *rows, size_t n_entries, uint32_t n_layers);

/* Asks for the step's next layer, which must be `layer` and whose rows must be in the slot; fd_port_send makes the
 * R-engine see it. Returns like fd_port_arm. */
const char *fd_port_ask(fd_port_t *port, uint32_t slot, uint32_t layer);
static inline void fd_port_send(const fd_port_t *port, uint32_t slot) {
    port->carrier.ops->send(port->carrier.self, slot, FD_LAYER);
}

/* The head of a slot in the port's region. */
static inline fd_slot_t *fd_port_slot(const fd_port_t *port, uint32_t slot) {
    return fd_slot_at(port->region, &port->layout, slot);
}

/* What a slot waits for: the verdict on its step, or the reply to the layer that was asked for. */
typedef struct {
    fd_port_t *port;
    uint32_t slot;
    fd_port_result_t result; /* FD_PORT_PENDING until the wait for it has ended; FD_PORT_REFUSED: see `reports` */
    bool peek;               /* only find out whether there is an answer, and leave it for the next look */
    bool polling;            /* used by fd_port_await */
    bool open;               /* for the caller: fd_port_await leaves it alone */
} fd_awaited_t;

/* Reads the words of one slot without waiting: sets `result`, and with FD_PORT_REFUSED the port's report. */
void fd_port_look(fd_awaited_t *awaited);

/* Waits until none of the `n` results is pending. After `timeout_ns` the ports that are still pending go down. The
 * slots must be in phase ARMING or ASKED. */
void fd_port_await(fd_awaited_t *awaited, size_t n, uint64_t timeout_ns);

/* Several waits at once. The slots of wait i are those before ends[i] that belong to no earlier wait. */
typedef struct {
    fd_awaited_t *awaited;
    size_t n;
    const size_t *ends;
    size_t n_waits;
    struct pollfd *fds; /* with POLLIN */
    size_t n_fds;
} fd_waits_t;

/* Waits until one of the waits has no pending result or a descriptor is readable. Returns the first such wait, or
 * n_waits plus the index of the descriptor, or -1 once `timeout_ns` is over. No port goes down. */
long fd_port_await_any(const fd_waits_t *waits, uint64_t timeout_ns);

/* Ends the step. Returns true and fills `report` with its totals if all of its layers have been answered. A report that
 * makes no sense takes the port down. */
bool fd_port_disarm(fd_port_t *port, uint32_t slot, fd_report_t *report);

/* Takes the port down, poisons its slots and ends every wait. A port that is down keeps its first reason. */
void fd_port_kill(fd_port_t *port, const char *reason);

/* Takes the port down because what the slot waits for has not come within `timeout_ns`. */
void fd_port_give_up(fd_port_t *port, uint32_t slot, uint64_t timeout_ns);

/* If the port is down, poisons its slots again. For a device's watchdog: a late reply may overwrite the poison. */
void fd_port_poison(fd_port_t *port);

/* Shared memory: `self` is an fd_shm_s_t. */
typedef struct {
    fd_region_header_t *header;
    int wake_fd;                   /* the R-engine's eventfd */
    const fd_stand_in_t *stand_in; /* NULL: no thread stands in */
} fd_shm_s_t;
extern const fd_carrier_ops_t fd_shm_s_ops;
/* The same, but a thread that waits also stands in for thread 0 of the R-engine, through `stand_in`. Every call must be
 * waited for by fd_port_await or fd_port_await_any, because no message wakes the R-engine. */
extern const fd_carrier_ops_t fd_shm_s_ops_standing_in;

/* No R-node: the carrier answers every message itself at once, and O rows stay as they are. `self` is the port. For
 * measurements of the S-Part alone, and to warm a device up. */
extern const fd_carrier_ops_t fd_loopback_ops;
