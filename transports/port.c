#include "port.h"

/* Longest nap (fd_nap_ns) of a thread that waits for a reply over RDMA, where no thread is woken by a bell. */
#define NAP_MAX_NS 1000000u
#define RING_AGAIN_NS 250000000u /* such a thread rings again this often */

int fd_port_init(fd_port_t *port, uint8_t *region, const fd_geometry_t *g, uint32_t spin_us) {
    memset(port, 0, sizeof *port);
    port->region = region;
    port->geometry = *g;
    port->layout = fd_region_layout(g);
    port->spin_ns = spin_us * 1000ull;
    port->wake_fd = -1;
    return fd_down_init(&port->down);
}

void fd_port_kill(fd_port_t *port, const char *reason) {
    fd_down_stop_link(&port->down, FD_SIDE_S, port->region, &port->geometry, reason);
}

fd_port_result_t fd_port_post(fd_port_t *port, uint32_t index, fd_call_t *call, const char **misuse) {
    if (fd_is_down(&port->down)) return FD_PORT_DOWN;
    if (index >= port->geometry.n_slots) *misuse = "the slot is beyond the region";
    else if (port->slots[index].in_flight) *misuse = "the slot's last call has not been waited for";
    else *misuse = fd_call_error(&port->geometry, call);
    if (*misuse) return FD_PORT_MISUSE;

    call->number = port->slots[index].call.number + 1;
    port->slots[index].call = *call;
    port->slots[index].in_flight = true;
    fd_slot_t *slot = fd_slot_at(port->region, &port->layout, index);
    slot->call = *call;
    if (port->pump) fd_pump_send(port->pump, index);
    else if (port->poster) fd_poster_send(port->poster, index);
    else fd_ring_request(slot, call->number, &((fd_region_header_t *)port->region)->engine_asleep, port->wake_fd);
    return FD_PORT_OK;
}

/* fd_wait_reply for a bell that a device writes. After each nap this function takes the device's completions, so that a
 * dead peer is noticed even while the event loop is busy. Now and then it rings again, so that the device has something
 * to report. */
static fd_wait_t wait_without_wakeup(fd_port_t *port, uint32_t index, uint64_t number, uint64_t timeout_ns) {
    fd_slot_t *slot = fd_slot_at(port->region, &port->layout, index);
    uint64_t start = fd_now_ns(), spin_ns = port->spin_ns, rung_ns = 0;
    for (;;) {
        uint64_t waited = fd_now_ns() - start;
        if (waited >= timeout_ns) return FD_WAIT_TIMEOUT;
        uint64_t nap = fd_nap_ns(waited, NAP_MAX_NS);
        uint64_t left = timeout_ns - waited;
        fd_wait_t result =
            fd_wait_reply(slot, number, spin_ns, spin_ns + nap < left ? spin_ns + nap : left, &port->down.flag);
        if (result != FD_WAIT_TIMEOUT) return result;
        spin_ns = 0;
        if (waited - rung_ns >= RING_AGAIN_NS) fd_poster_ring_again(port->poster, index), rung_ns = waited;
        else fd_poster_reap(port->poster);
    }
}

static fd_wait_t wait_reply(fd_port_t *port, uint32_t index, uint64_t number, uint64_t timeout_ns) {
    if (port->poster) return wait_without_wakeup(port, index, number, timeout_ns);
    return fd_wait_reply(fd_slot_at(port->region, &port->layout, index), number, port->spin_ns, timeout_ns,
                         &port->down.flag);
}

fd_port_result_t fd_port_wait(fd_port_t *port, uint32_t index, uint64_t timeout_ns, fd_reply_t *reply,
                              const char **misuse) {
    if (index >= port->geometry.n_slots) *misuse = "the slot is beyond the region";
    else if (!port->slots[index].in_flight) *misuse = "no call has been posted to the slot";
    else *misuse = NULL;
    if (*misuse) return FD_PORT_MISUSE;

    const fd_call_t *call = &port->slots[index].call;
    const fd_slot_t *slot = fd_slot_at(port->region, &port->layout, index);
    char late[128];
    uint64_t waited_ns = port->pump ? fd_pump_receive(port->pump, index, call->number, port->spin_ns, timeout_ns) : 0;
    uint64_t left_ns = waited_ns < timeout_ns ? timeout_ns - waited_ns : 0;
    switch (wait_reply(port, index, call->number, left_ns)) {
    case FD_WAIT_DONE: break;
    case FD_WAIT_STOPPED: return FD_PORT_DOWN;
    case FD_WAIT_TIMEOUT:
        snprintf(late, sizeof late, "no reply to call %llu of slot %u within %.3g s", (unsigned long long)call->number,
                 index, (double)timeout_ns * 1e-9);
        fd_port_kill(port, late);
        return FD_PORT_DOWN;
    }

    fd_copy_out(reply, &slot->reply, sizeof *reply);
    reply->message[sizeof reply->message - 1] = 0;
    const char *wrong = NULL;
    if (reply->number != call->number) wrong = "a reply does not carry its call's number";
    else if (reply->status > FD_INTERNAL) wrong = "a reply has an unknown status";
    else if (reply->n_attend_rows != (reply->status == FD_OK ? call->n_attend_rows : 0))
        wrong = "a reply's rows do not match its call";
    if (wrong) {
        fd_port_kill(port, wrong);
        return FD_PORT_DOWN;
    }
    port->slots[index].in_flight = false;
    return FD_PORT_OK;
}
