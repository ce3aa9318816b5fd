#include "calls.h"

#include <stdio.h>

#include "fail.h"

enum {
    SETTLE_POLLS = 1000 /* see settled_bell */
};

/* A software RDMA device may write a bell byte by byte. So a bell that shows neither the last call nor the next one is
 * read again for a while before the engine believes it. */
static uint64_t settled_bell(const uint64_t *at, uint64_t bell, uint64_t served) {
    for (int i = 0; i < SETTLE_POLLS && bell != served && bell != served + 1; i++) {
        fd_cpu_relax();
        bell = fd_bell_read(at);
    }
    return bell;
}

fd_asks_t fd_slot_asks(fd_link_t *link, uint32_t slot) {
    fd_slot_t *s = fd_slot_at(link->region, &link->work.layout, slot);
    fd_slot_state_t *state = &link->slots[slot];
    uint64_t bell = fd_bell_read(&s->request_bell);
    if (link->no_wakeup) bell = settled_bell(&s->request_bell, bell, state->served);
    state->asked = bell;
    return bell == state->served ? FD_ASKS_NOTHING : FD_ASKS_LAYER;
}

static fd_status_t begin_step(fd_link_t *link, fd_step_t *step, const uint8_t *slot, const fd_call_t *call, char *err,
                              size_t err_len) {
    pthread_mutex_lock(&link->mutex);
    fd_step_end_copies(step, &link->kv); /* of the slot's last step, by that step's table */
    step->n_entries = call->n_entries;
    step->n_rows = call->n_rows;
    step->n_attend_rows = call->n_attend_rows;
    fd_copy_out(step->table, slot + link->work.layout.table, call->n_entries * sizeof(fd_row_t));
    fd_status_t status = fd_step_plan(step, &link->kv, &link->work.shape, false, err, err_len);
    if (status == FD_OUT_OF_PAGES) { /* copies take more pages while they are under way than at once */
        for (uint32_t i = 0; i < link->work.g.n_slots; i++) fd_step_end_copies(&link->slots[i].step, &link->kv);
        status = fd_step_plan(step, &link->kv, &link->work.shape, true, err, err_len);
        if (status == FD_OK) err[0] = 0;
    }
    pthread_mutex_unlock(&link->mutex);
    step->valid = status == FD_OK;
    return status;
}

/* Checks the whole call and plans its step if it is the first of one. Returns FD_OK, or why the call is refused. */
static fd_status_t take_call(fd_link_t *link, fd_slot_state_t *state, uint64_t bell, const uint8_t *slot,
                             const fd_call_t *call, char *err, size_t err_len) {
    fd_step_t *step = &state->step;
    uint64_t expected = state->served + 1;
    state->served = bell;
    if (call->flags & FD_CALL_NEW_STEP) step->valid = 0;
    if (bell != expected || call->number != bell)
        return FD_FAIL(FD_BAD_CALL,
                       "the bell shows call %llu and the header says call %llu, but call %llu was expected",
                       (unsigned long long)bell, (unsigned long long)call->number, (unsigned long long)expected);
    const char *reason = fd_call_error(&link->work.g, call);
    if (reason)
        return FD_FAIL(FD_BAD_CALL, "%s (flags 0x%x, layer %u, %u entries, %u rows, %u of them attending)", reason,
                       call->flags, call->layer, call->n_entries, call->n_rows, call->n_attend_rows);
    if (call->flags & FD_CALL_NEW_STEP) return begin_step(link, step, slot, call, err, err_len);
    if (!step->valid)
        return FD_FAIL(FD_BAD_CALL, "no step is in progress in this slot: none has begun, or the last one was refused");
    if (call->n_entries != step->n_entries || call->n_rows != step->n_rows ||
        call->n_attend_rows != step->n_attend_rows)
        return FD_FAIL(
            FD_BAD_CALL, "the call has %u entries, %u rows and %u attending rows; the step began with %u, %u and %u",
            call->n_entries, call->n_rows, call->n_attend_rows, step->n_entries, step->n_rows, step->n_attend_rows);
    return FD_OK;
}

static void count(uint64_t *counter, uint64_t n) { __atomic_store_n(counter, *counter + n, __ATOMIC_RELAXED); }

/* Counts the slot's call and replies to it. */
static void end_call(fd_link_t *link, uint32_t slot, const fd_reply_t *r) {
    count(&link->stats.calls, 1);
    count(&link->stats.busy_ns, r->busy_ns);
    fd_slot_t *s = fd_slot_at(link->region, &link->work.layout, slot);
    s->reply = *r;
    fd_ring_reply(s, r->number);
    if (link->notify.fn) link->notify.fn(link->notify.ctx, slot);
}

bool fd_slot_begin_layer(fd_link_t *link, uint32_t slot) {
    fd_slot_t *s = fd_slot_at(link->region, &link->work.layout, slot);
    fd_slot_state_t *state = &link->slots[slot];
    uint64_t start = link->last_call_ns = fd_now_ns();
    fd_call_t call;
    fd_copy_out(&call, &s->call, sizeof call);
    fd_reply_t r = {.number = state->asked};
    r.status = take_call(link, state, r.number, (const uint8_t *)s, &call, r.message, sizeof r.message);
    state->layer = call.layer;
    if (r.status == FD_OK) return true;
    count(&link->stats.refused, 1);
    r.busy_ns = fd_now_ns() - start;
    end_call(link, slot, &r);
    return false;
}

void fd_slot_end_layer(fd_link_t *link, uint32_t slot, uint64_t kv_bytes, uint64_t busy_ns) {
    fd_slot_state_t *state = &link->slots[slot];
    if (fd_work_stores(&link->work, state->layer) &&
        fd_step_layer_done(&state->step, link->work.stores[state->layer], link->kv.n_layers)) {
        pthread_mutex_lock(&link->mutex);
        fd_step_end_copies(&state->step, &link->kv);
        pthread_mutex_unlock(&link->mutex);
    }
    count(&link->stats.rows, state->step.n_rows);
    count(&link->stats.kv_bytes, kv_bytes);
    end_call(link, slot,
             &(fd_reply_t){.number = state->served,
                           .status = FD_OK,
                           .n_attend_rows = state->step.n_attend_rows,
                           .busy_ns = busy_ns,
                           .kv_bytes = kv_bytes});
}

void fd_link_refuse_waiting(fd_link_t *link) {
    for (uint32_t i = 0; i < link->work.g.n_slots; i++) {
        fd_slot_t *slot = fd_slot_at(link->region, &link->work.layout, i);
        uint64_t bell = fd_bell_read(&slot->request_bell);
        if (bell == link->slots[i].served && !link->slots[i].job.begun) continue;
        slot->reply =
            (fd_reply_t){.number = bell, .status = FD_LINK_CLOSED, .message = "the R-node has closed this link"};
        fd_ring_reply(slot, bell);
    }
}
