/* Carries the layer words of slots that a device drives.
 *
 * A device, such as a CUDA stream, writes Q and KV rows and then layer_request, and waits for layer_reply, without a
 * thread of the host. Only memory that both ends share needs nobody in between, and even there a sleeping R-engine must
 * be woken. So a thread of the host, the proxy, reads the words of all such slots, lets their carriers send what a word
 * announces, and takes in the replies. When a link dies, it writes FD_POISON again and again, because a late reply may
 * overwrite it while the device still waits.
 */
#ifndef FD_PROXY_H
#define FD_PROXY_H

#include "port.h"

#define FD_PROXY_SLOTS 1024u

typedef struct fd_proxy fd_proxy_t;

/* Starts the thread. `spin_us`: how long it reads words that do not change before it naps. NULL with errno. */
fd_proxy_t *fd_proxy_new(uint32_t spin_us);

/* Lets the device drive the slot's step, whose verdict has been waited for (FD_SLOT_ARMED, no layer asked for). The
 * port must stay open until fd_proxy_end. FD_PORT_MISUSE: see *misuse. */
fd_port_result_t fd_proxy_begin(fd_proxy_t *proxy, fd_port_t *port, uint32_t slot, const char **misuse);

/* Ends what fd_proxy_begin began, after the device has passed its last gate. FD_PORT_OK: every layer was answered, and
 * fd_port_disarm gives the totals. FD_PORT_REFUSED: the step was poisoned, and `report` says why. FD_PORT_DOWN: the
 * link has died. FD_PORT_PENDING: the device has left layers out; the slot can be armed again. FD_PORT_MISUSE: nothing
 * was begun. */
fd_port_result_t fd_proxy_end(fd_proxy_t *proxy, fd_port_t *port, uint32_t slot, fd_report_t *report);

void fd_proxy_free(fd_proxy_t *proxy); /* joins the thread; every slot must have ended */

#endif
