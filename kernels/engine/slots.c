#include "slots.h"

#include <stdio.h>

#include "cache/error.h"

enum {
    SETTLE_POLLS = 1000 /* see settled_bell */
};

static fd_slot_t *slot_of(const fd_link_t *link, uint32_t index) {
    return fd_slot_at(link->region, &link->work.layout, index);
}

/* A software RDMA device may write a word byte by byte. So a word that shows neither what it showed last nor the next
 * number is read again for a while before the engine believes it. */
static uint64_t settled_bell(const fd_link_t *link, const uint64_t *at, uint64_t last) {
    uint64_t bell = fd_bell_read(at);
    for (int i = 0; !link->carrier.ops->wakes && i < SETTLE_POLLS && bell != last && bell != last + 1; i++) {
        fd_cpu_relax();
        bell = fd_bell_read(at);
    }
    return bell;
}

static uint32_t settled_word(const fd_link_t *link, const uint32_t *at, uint32_t last) {
    uint32_t word = fd_word_read(at);
    for (int i = 0; !link->carrier.ops->wakes && i < SETTLE_POLLS && word > last + 1; i++) {
        fd_cpu_relax();
        word = fd_word_read(at);
    }
    return word;
}

fd_asks_t fd_slot_asks(fd_link_t *link, uint32_t slot) {
    const fd_slot_t *s = slot_of(link, slot);
    fd_slot_state_t *state = &link->slots[slot];
    bool layer = false;
    if (state->step.valid) {
        state->request = settled_word(link, &s->layer_request, state->served);
        layer = state->request > state->served;
    }
    /* A step that is armed replaces one that is unfinished, whatever layer that one was asked for. */
    state->bell = settled_bell(link, &s->arm_bell, state->armed);
    return state->bell != state->armed ? FD_ASKS_ARM : layer ? FD_ASKS_LAYER : FD_ASKS_NOTHING;
}

static fd_status_t begin_step(fd_link_t *link, fd_step_t *step, const uint8_t *slot, const fd_arm_t *arm,
                              fd_error_t *error) {
    pthread_mutex_lock(&link->mutex);
    step->n_entries = arm->n_entries;
    step->n_rows = arm->n_rows;
    step->n_attend_rows = arm->n_attend_rows;
    step->n_layers = arm->n_layers;
    fd_copy_out(step->table, slot + link->work.layout.table, arm->n_entries * sizeof(fd_row_t));
    const fd_status_t status = fd_step_plan(step, &link->kv, link->work.shapes, error);
    pthread_mutex_unlock(&link->mutex);
    return status;
}

/* Checks the whole step and plans it. Returns FD_OK, or why the step is refused. */
static fd_status_t take_step(fd_link_t *link, fd_slot_state_t *state, uint64_t expected, const uint8_t *slot,
                             const fd_arm_t *arm, fd_error_t *error) {
    if (state->armed != expected || arm->number != state->armed)
        return FD_FAIL(FD_BAD_CALL,
                       "the bell shows step %llu and the header says step %llu, but step %llu was expected",
                       (unsigned long long)state->armed, (unsigned long long)arm->number, (unsigned long long)expected);
    const char *reason = fd_arm_error(&link->work.g, arm);
    if (reason)
        return FD_FAIL(FD_BAD_CALL, "%s (%u entries, %u rows, %u of them attending)", reason, arm->n_entries,
                       arm->n_rows, arm->n_attend_rows);
    return begin_step(link, &state->step, slot, arm, error);
}

static void count(uint64_t *counter, uint64_t n) { __atomic_store_n(counter, *counter + n, __ATOMIC_RELAXED); }

/* Writes the slot's report. The S side reads it once a word that is stored afterwards tells it to. */
static void report(fd_link_t *link, uint32_t slot, fd_status_t status, const char *message) {
    const fd_slot_state_t *state = &link->slots[slot];
    fd_report_t r = {.number = state->armed,
                     .status = status,
                     .n_layers = state->served,
                     .busy_ns = state->busy_ns,
                     .kv_bytes = state->kv_bytes};
    snprintf(r.message, sizeof r.message, "%s", message);
    slot_of(link, slot)->report = r;
}

static void reply(fd_link_t *link, uint32_t slot, uint32_t word) {
    fd_word_store(&slot_of(link, slot)->layer_reply, word);
    link->carrier.ops->send(link->carrier.self, slot, FD_REPLY);
}

/* Answers FD_ASKS_ARM. */
static void answer_arm(fd_link_t *link, uint32_t slot, fd_status_t status, const char *message) {
    fd_slot_t *s = slot_of(link, slot);
    fd_slot_state_t *state = &link->slots[slot];
    state->step.valid = status == FD_OK;
    fd_word_store(&s->layer_request, 0);
    report(link, slot, status, message);
    fd_bell_store(&s->armed_bell, state->armed);
    link->carrier.ops->send(link->carrier.self, slot, FD_VERDICT);
}

bool fd_slot_arm(fd_link_t *link, uint32_t slot) {
    const fd_slot_t *s = slot_of(link, slot);
    fd_slot_state_t *state = &link->slots[slot];
    const uint64_t start = fd_now_ns(), expected = state->armed + 1;
    fd_error_t error = {0};
    fd_arm_t arm;
    fd_copy_out(&arm, &s->arm, sizeof arm);
    state->armed = state->bell;
    state->served = state->request = 0;
    state->busy_ns = state->kv_bytes = 0;
    state->step.valid = 0;
    fd_status_t status = take_step(link, state, expected, (const uint8_t *)s, &arm, &error);
    if (status == FD_OK && link->gpu && fd_gpu_arm(link->gpu, slot, &state->step, &error) != FD_OK)
        status = FD_LINK_CLOSED;
    if (status != FD_OK) count(&link->stats.refused, 1);
    count(&link->stats.busy_ns, fd_now_ns() - start);
    if (status == FD_OK && state->step.n_copies) return true;
    answer_arm(link, slot, status, error.text);
    return false;
}

void fd_slot_end_copies(fd_link_t *link, uint32_t slot, uint64_t busy_ns) {
    fd_step_t *step = &link->slots[slot].step;
    pthread_mutex_lock(&link->mutex);
    fd_kvcache_end_copies(&link->kv, step->copies, step->n_copies);
    pthread_mutex_unlock(&link->mutex);
    step->n_copies = 0;
    count(&link->stats.busy_ns, busy_ns);
    answer_arm(link, slot, FD_OK, "");
}

bool fd_slot_begin_layer(fd_link_t *link, uint32_t slot) {
    fd_slot_state_t *state = &link->slots[slot];
    state->layer = state->served;
    if (state->request <= state->step.n_layers) {
        state->step.plan = &state->step.plans[link->work.kinds[state->layer]];
        return true;
    }
    state->step.valid = 0;
    count(&link->stats.refused, 1);
    report(link, slot, FD_BAD_CALL, "layer beyond the step");
    reply(link, slot, FD_POISON);
    return false;
}

void fd_slot_fail(fd_link_t *link, uint32_t slot, const char *why) {
    fd_slot_state_t *state = &link->slots[slot];
    char message[sizeof((fd_report_t *)0)->message];
    snprintf(message, sizeof message, "the R-node's GPU has failed: %s", why);
    if (state->job.kind == FD_JOB_COPIES) {
        answer_arm(link, slot, FD_LINK_CLOSED, message);
        return;
    }
    state->step.valid = 0;
    report(link, slot, FD_LINK_CLOSED, message);
    reply(link, slot, FD_POISON);
}

void fd_slot_end_layer(fd_link_t *link, uint32_t slot, uint64_t kv_bytes, uint64_t busy_ns) {
    fd_slot_state_t *state = &link->slots[slot];
    count(&link->stats.calls, 1);
    count(&link->stats.rows, state->step.n_rows);
    count(&link->stats.kv_bytes, kv_bytes);
    count(&link->stats.busy_ns, busy_ns);
    state->kv_bytes += kv_bytes;
    state->busy_ns += busy_ns;
    if (++state->served == state->step.n_layers) {
        state->step.valid = 0;
        report(link, slot, FD_OK, "");
    }
    reply(link, slot, state->served);
}

void fd_link_refuse_waiting(fd_link_t *link) {
    for (uint32_t i = 0; i < link->work.g.n_slots; i++) {
        fd_slot_state_t *state = &link->slots[i];
        if (fd_slot_asks(link, i) == FD_ASKS_NOTHING && !state->step.valid && !state->job.begun) continue;
        fd_slot_t *slot = slot_of(link, i);
        state->armed = state->bell;
        report(link, i, FD_LINK_CLOSED, "the R-node has closed this link");
        fd_word_store(&slot->layer_reply, FD_POISON);
        fd_bell_store(&slot->armed_bell, state->armed);
        fd_wake_waiters(slot);
    }
}
