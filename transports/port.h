/* The S side's data path: posts calls into a region and waits for their replies, over any transport.
 *
 * Any thread may use a port, but only one thread at a time may use a slot. Any thread may call fd_port_kill, which
 * ends every wait.
 */
#ifndef FD_PORT_H
#define FD_PORT_H

#include "down.h"
#include "rdma_poster.h"
#include "tcp_pump.h"

typedef struct {
    uint8_t *region;
    fd_geometry_t geometry;
    fd_layout_t layout;
    uint64_t spin_ns;
    int wake_fd;         /* shm: the R-engine's eventfd; else -1 */
    fd_pump_t *pump;     /* TCP; else NULL */
    fd_poster_t *poster; /* RDMA; else NULL */
    fd_down_t down;
    struct {
        fd_call_t call; /* the call in flight, or the last one */
        bool in_flight;
    } slots[FD_MAX_SLOTS];
} fd_port_t;

typedef enum {
    FD_PORT_OK,
    FD_PORT_MISUSE, /* the caller made a mistake; nothing has been sent */
    FD_PORT_DOWN,   /* the reason is in `down` */
} fd_port_result_t;

/* `spin_us`: how long a waiter spins before it sleeps. Returns 0, or -1 with errno if no descriptor is free. */
int fd_port_init(fd_port_t *port, uint8_t *region, const fd_geometry_t *g, uint32_t spin_us);

/* Sets the number of `call` and publishes it. Its rows, and with FD_CALL_NEW_STEP its table, must be in the slot
 * already. On FD_PORT_MISUSE *misuse is a sentence. */
fd_port_result_t fd_port_post(fd_port_t *port, uint32_t slot, fd_call_t *call, const char **misuse);

/* Waits for the reply to the slot's last call, copies it to *reply and checks it. A timeout takes the port down. */
fd_port_result_t fd_port_wait(fd_port_t *port, uint32_t slot, uint64_t timeout_ns, fd_reply_t *reply,
                              const char **misuse);

/* Takes the port down and ends every wait. A port that is down keeps its first reason. */
void fd_port_kill(fd_port_t *port, const char *reason);

#endif
