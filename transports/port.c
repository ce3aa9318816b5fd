#include "port.h"

enum { UNSURE_MAX = 1000 }; /* see `meaningless` */

/* ---- carriers without a wire ---- */

static void shm_send(void *self, uint32_t slot, fd_message_t message) {
    const fd_shm_s_t *shm = self;
    (void)slot, (void)message;
    fd_wake_engine(&shm->header->engine_asleep, shm->wake_fd);
}

const fd_carrier_ops_t fd_shm_s_ops = {.send = shm_send, .wakes = true};

static void leave_to_waiter(void *self, uint32_t slot, fd_message_t message) { (void)self, (void)slot, (void)message; }

static bool stand_in(void *self, bool go_on) {
    const fd_shm_s_t *shm = self;
    const fd_stand_in_t *engine = shm->stand_in;
    if (!go_on) {
        engine->leave(engine->self);
        return false;
    }
    const fd_stand_in_result_t result = engine->serve(engine->self);
    /* Thread 0 may have looked at the bells before this one was rung, and be about to sleep. */
    if (result == FD_STAND_IN_TAKEN) fd_wake_engine(&shm->header->engine_asleep, shm->wake_fd);
    return result == FD_STAND_IN_BUSY;
}

const fd_carrier_ops_t fd_shm_s_ops_standing_in = {.send = leave_to_waiter, .serve = stand_in, .wakes = true};

static void loopback_send(void *self, uint32_t index, fd_message_t message) {
    fd_port_t *port = self;
    fd_slot_t *slot = fd_port_slot(port, index);
    if (message == FD_ARM || slot->layer_request == slot->arm.n_layers)
        slot->report = (fd_report_t){.number = slot->arm.number, .n_layers = slot->arm.n_layers};
    if (message == FD_ARM) fd_bell_store(&slot->armed_bell, slot->arm.number);
    else fd_word_store(&slot->layer_reply, slot->layer_request);
}

const fd_carrier_ops_t fd_loopback_ops = {.send = loopback_send, .wakes = true};

/* ---- life ---- */

int fd_port_init(fd_port_t *port, uint8_t *region, const fd_geometry_t *g, uint32_t spin_us) {
    memset(port, 0, sizeof *port);
    port->region = region;
    port->geometry = *g;
    port->layout = fd_region_layout(g);
    port->spin_ns = spin_us * 1000ull;
    return fd_link_state_init(&port->link);
}

void fd_port_kill(fd_port_t *port, const char *reason) {
    fd_link_stop(&port->link, FD_SIDE_S, port->region, &port->geometry, reason);
}

void fd_port_give_up(fd_port_t *port, uint32_t slot, uint64_t timeout_ns) {
    const fd_port_slot_t *state = &port->slots[slot];
    char late[128], what[32] = "the verdict";
    if (state->phase == FD_SLOT_ASKED) snprintf(what, sizeof what, "the reply to layer %u", state->asked - 1);
    snprintf(late, sizeof late, "%s of step %llu in slot %u has not come within %.3g s", what,
             (unsigned long long)state->arm.number, slot, (double)timeout_ns * 1e-9);
    fd_port_kill(port, late);
}

void fd_port_poison(fd_port_t *port) {
    if (fd_link_is_down(&port->link)) fd_poison_all(port->region, &port->geometry);
}

/* ---- arming and asking ---- */

const char *fd_port_arm(fd_port_t *port, uint32_t index, const fd_row_t *rows, size_t n_entries, uint32_t n_layers) {
    if (index >= port->geometry.n_slots) return "the slot is beyond the region";
    if (n_entries > port->geometry.max_rows) return "the row table is longer than the slot allows";
    fd_port_slot_t *state = &port->slots[index];
    if (state->phase == FD_SLOT_ARMING || state->phase == FD_SLOT_ASKED)
        return "the slot's last message has not been waited for";
    uint64_t n_rows = 0, n_attend_rows = 0;
    for (size_t i = 0; i < n_entries; i++) {
        n_rows += rows[i].n_rows;
        if (rows[i].flags & FD_ROW_ATTEND) n_attend_rows += rows[i].n_rows;
    }
    if (n_rows > port->geometry.max_rows) return "the table has more rows than the slot";
    fd_arm_t arm = {.number = state->arm.number + 1,
                    .n_entries = (uint32_t)n_entries,
                    .n_rows = (uint32_t)n_rows,
                    .n_attend_rows = (uint32_t)n_attend_rows,
                    .n_layers = n_layers};
    const char *wrong = fd_arm_error(&port->geometry, &arm);
    if (wrong) return wrong;

    fd_slot_t *slot = fd_port_slot(port, index);
    *state = (fd_port_slot_t){.phase = FD_SLOT_ARMING, .arm = arm};
    memcpy((uint8_t *)slot + port->layout.table, rows, n_entries * sizeof *rows);
    slot->arm = arm;
    fd_bell_store(&slot->arm_bell, arm.number);
    port->carrier.ops->send(port->carrier.self, index, FD_ARM);
    return NULL;
}

const char *fd_port_ask(fd_port_t *port, uint32_t index, uint32_t layer) {
    if (index >= port->geometry.n_slots) return "the slot is beyond the region";
    fd_port_slot_t *state = &port->slots[index];
    if (state->phase == FD_SLOT_ASKED || state->phase == FD_SLOT_ARMING)
        return "the slot's last message has not been waited for";
    if (state->phase != FD_SLOT_ARMED) return "no step is armed in the slot";
    if (layer >= state->arm.n_layers) return "layer beyond the step";
    if (layer != state->asked) return "the layers of a step are asked for in order";
    state->phase = FD_SLOT_ASKED;
    state->asked = layer + 1;
    state->unsure = 0;
    fd_word_store(&fd_port_slot(port, index)->layer_request, layer + 1);
    return NULL;
}

/* ---- looking ---- */

static void violated(fd_awaited_t *a, const char *reason) {
    fd_port_kill(a->port, reason);
    a->result = FD_PORT_DOWN;
}

/* A word shows neither what it showed before nor what is waited for. A software RDMA device may write a word byte by
 * byte, so the waiter reads it again for a while before it blames the peer. */
static void meaningless(fd_awaited_t *a, fd_port_slot_t *state, const char *reason) {
    if (++state->unsure > UNSURE_MAX) violated(a, reason);
}

/* Copies and checks the report. `ok`: the step must stand well; else it must not. NULL, or what is wrong. */
static const char *read_report(const fd_port_t *port, uint32_t index, bool ok, fd_report_t *report) {
    fd_copy_out(report, &fd_port_slot(port, index)->report, sizeof *report);
    report->message[sizeof report->message - 1] = 0;
    if (report->number != port->slots[index].arm.number) return "a report does not carry its step's number";
    if (report->status > FD_INTERNAL) return "a report has an unknown status";
    if ((report->status == FD_OK) != ok) return "a report's status does not match its words";
    return NULL;
}

static void refused(fd_awaited_t *a, fd_port_slot_t *state) {
    a->result = FD_PORT_REFUSED;
    state->phase = FD_SLOT_IDLE;
}

static void look_for_verdict(fd_awaited_t *a, fd_port_slot_t *state, fd_slot_t *slot) {
    fd_port_t *port = a->port;
    const uint64_t bell = fd_bell_read(&slot->armed_bell);
    if (bell != state->arm.number) {
        if (fd_link_is_down(&port->link)) a->result = FD_PORT_DOWN;
        else if (bell != state->arm.number - 1) meaningless(a, state, "the armed bell shows a step that was not armed");
        return;
    }
    const bool ok = __atomic_load_n(&slot->report.status, __ATOMIC_RELAXED) == FD_OK;
    const char *wrong = read_report(port, a->slot, ok, &port->reports[a->slot]);
    if (wrong) {
        violated(a, wrong);
    } else if (!ok) {
        refused(a, state);
    } else {
        __atomic_store_n(&slot->layer_reply, 0, __ATOMIC_SEQ_CST);
        state->phase = FD_SLOT_ARMED;
        a->result = FD_PORT_OK;
        if (fd_link_is_down(&port->link)) { /* the store above may have undone the poison */
            fd_port_poison(port);
            a->result = FD_PORT_DOWN;
        }
    }
}

static void look_for_reply(fd_awaited_t *a, fd_port_slot_t *state, fd_slot_t *slot) {
    const uint32_t word = fd_word_read(&slot->layer_reply);
    if (word == state->asked) {
        state->phase = FD_SLOT_ARMED;
        a->result = FD_PORT_OK;
    } else if (fd_link_is_down(&a->port->link)) {
        a->result = FD_PORT_DOWN;
    } else if (word == FD_POISON) {
        const char *wrong = read_report(a->port, a->slot, false, &a->port->reports[a->slot]);
        if (wrong) violated(a, wrong);
        else refused(a, state);
    } else if (word != state->asked - 1) {
        meaningless(a, state, "a reply arrived for a layer that was not asked for");
    }
}

/* True if there is something for a look to take: an answer, a word with no meaning, or the link's end. */
static bool answered(const fd_port_t *port, const fd_port_slot_t *state, const fd_slot_t *slot) {
    if (fd_link_is_down(&port->link)) return true;
    if (state->phase == FD_SLOT_ARMING) return fd_bell_read(&slot->armed_bell) != state->arm.number - 1;
    return state->phase != FD_SLOT_ASKED || fd_word_read(&slot->layer_reply) != state->asked - 1;
}

void fd_port_look(fd_awaited_t *a) {
    fd_port_slot_t *state = &a->port->slots[a->slot];
    fd_slot_t *slot = fd_port_slot(a->port, a->slot);
    if (a->peek) a->result = answered(a->port, state, slot) ? FD_PORT_OK : FD_PORT_PENDING;
    else if (state->phase == FD_SLOT_ARMING) look_for_verdict(a, state, slot);
    else look_for_reply(a, state, slot);
}

/* ---- disarming ---- */

bool fd_port_disarm(fd_port_t *port, uint32_t index, fd_report_t *report) {
    fd_port_slot_t *state = &port->slots[index];
    const bool whole = state->phase == FD_SLOT_ARMED && state->asked == state->arm.n_layers;
    if (!fd_link_is_down(&port->link) && (state->phase == FD_SLOT_ARMING || state->phase == FD_SLOT_ASKED))
        return false;
    state->phase = FD_SLOT_IDLE;
    if (!whole) return false;
    const char *wrong = read_report(port, index, true, report);
    if (wrong) fd_port_kill(port, wrong);
    return !wrong;
}
