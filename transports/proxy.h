/* Carries the layer words of slots that a device drives.
 *
 * A device, such as a CUDA stream, writes Q and KV rows and then layer_request, and waits for layer_reply, without a
 * thread of the host. Only memory that both ends share needs no carrier, and even there a sleeping R-engine must
 * be woken. So a thread of the host, the proxy, reads the words of all such slots, lets their carriers send what a word
 * announces, and takes in the replies. The proxy takes down the link of an R-node that is late. When a link dies, the
 * proxy writes FD_POISON again and again, because a late reply may overwrite it while the device still waits.
 *
 * At the end of a step the device writes the completion word of its mini-batch, which the proxy turns into an event
 * that a thread can sleep on.
 */
#pragma once

#include "port.h"

#define FD_PROXY_SLOTS 1024u
#define FD_PROXY_PAGE 4096u
_Static_assert(FD_MAX_SLOTS *FD_LINE <= FD_PROXY_PAGE && FD_MAX_SLOTS <= 32, "a page and a mask hold all completions");

typedef struct fd_proxy fd_proxy_t;

/* Starts the thread. `spin_us`: how long it reads words that do not change before it naps. NULL with errno. */
fd_proxy_t *fd_proxy_new(uint32_t spin_us);

/* A page of memory, which the device must be able to write. The completion word of mini-batch i is at i * FD_LINE. */
uint8_t *fd_proxy_page(fd_proxy_t *proxy);

/* Clears the completion word of a mini-batch, and watches for the device to write another value. */
void fd_proxy_expect(fd_proxy_t *proxy, uint32_t mini_batch);

/* True if the device has written the completion word. The eventfd becomes readable then. */
bool fd_proxy_done(const fd_proxy_t *proxy, uint32_t mini_batch);
int fd_proxy_done_fd(const fd_proxy_t *proxy, uint32_t mini_batch);

/* Lets the device drive the slot's step, whose verdict has been waited for (FD_SLOT_ARMED, no layer asked for). An
 * R-node that takes longer than `timeout_ns` for a layer loses its link. The port must stay open until fd_proxy_end.
 * Returns NULL, or what the caller did wrong. To be called for a port that is up. */
const char *fd_proxy_begin(fd_proxy_t *proxy, fd_port_t *port, uint32_t slot, uint64_t timeout_ns);

/* Ends what fd_proxy_begin began, after the device has passed its last gate. FD_PORT_OK: every layer was answered, and
 * fd_port_disarm gives the totals. FD_PORT_REFUSED: the step was poisoned, and `report` says why. FD_PORT_DOWN: the
 * link has died. FD_PORT_PENDING: the device has left layers out; the slot can be armed again. FD_PORT_MISUSE: nothing
 * was begun. */
fd_port_result_t fd_proxy_end(fd_proxy_t *proxy, fd_port_t *port, uint32_t slot, fd_report_t *report);

void fd_proxy_free(fd_proxy_t *proxy); /* joins the thread; every slot must have ended */
