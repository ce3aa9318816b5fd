/* The S side's data path: posts calls into a region and waits for their replies, over whatever carries the bytes.
 *
 * Any thread may use it, one thread a slot at a time; fd_port_kill may come from anywhere and ends all waiting.
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
        fd_call_t call; /* the one in flight, or the last */
        bool in_flight;
    } slots[FD_MAX_SLOTS];
} fd_port_t;

typedef enum {
    FD_PORT_OK,
    FD_PORT_MISUSE, /* the caller's mistake; nothing has been sent */
    FD_PORT_DOWN,   /* the reason is in `down` */
} fd_port_result_t;

/* `spin_us`: how long a waiter spins before it sleeps. -1 with errno if a descriptor cannot be had. */
int fd_port_init(fd_port_t *port, uint8_t *region, const fd_geometry_t *g, uint32_t spin_us);

/* Publishes `call`, whose number is set here; its rows (and with FD_CALL_NEW_STEP its table) lie in the slot already.
 * On FD_PORT_MISUSE *misuse is a sentence. */
fd_port_result_t fd_port_post(fd_port_t *port, uint32_t slot, fd_call_t *call, const char **misuse);

/* Waits for the reply to the last post and copies it out, checked. A timeout takes the port down. */
fd_port_result_t fd_port_wait(fd_port_t *port, uint32_t slot, uint64_t timeout_ns, fd_reply_t *reply,
                              const char **misuse);

/* Takes the port down, if it is not yet, and ends all waiting. */
void fd_port_kill(fd_port_t *port, const char *reason);

#endif
