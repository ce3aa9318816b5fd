#include "turns.h"

#include <sched.h>

#include "slots.h"

enum {
    TICK_NS = 100000,     /* thread 0 reads the bells this often while it works on a call */
    POLL_SHARE = 8,       /* or, if that takes long, so often that it takes at most this part of the time */
    SHORT_NS = 100000,    /* a call that is estimated to take less is done at once by thread 0, if it is one item */
    LONG_NS = 50000,      /* before a call that is estimated to take longer, the carriers' own threads take over */
    MIN_SAMPLE_COST = 64, /* calls with less work say nothing about the rate */
    SPINS = 64,           /* thread 0 looks this often whether helpers are done before it reads the bells again */
};

/* ---- estimates and credit ---- */

/* Calls on a GPU cost nothing. */
static void charge(fd_link_t *link, uint64_t ns) {
    if (!link->gpu) link->turn.credit_ns -= (int64_t)ns;
}

/* Charges the link of the main job for the time since it was charged last. */
static uint64_t charge_main(fd_engine_t *e) {
    const uint64_t now = fd_now_ns();
    if (e->main_link) charge(e->main_link, now - e->charged_ns);
    e->charged_ns = now;
    return now;
}

/* The time that the engine will take for the job. */
static double estimate_ns(const fd_engine_t *e, const fd_job_t *job) {
    const double one_thread = (double)job->cost * job->link->turn.ns_per_cost;
    return one_thread / fd_job_threads(e, job->n_cut);
}

static void learn(fd_engine_t *e, const fd_job_t *job) {
    if (job->cost < MIN_SAMPLE_COST) return;
    double *rate = &job->link->turn.ns_per_cost;
    const double measured = (double)job->busy_ns * fd_job_threads(e, job->n_cut) / (double)job->cost;
    *rate += (measured - *rate) / 8;
}

static bool active(const fd_link_t *link) { return link->turn.waits || link->turn.n_jobs; }

/* Starts rounds until at least one of the active links has credit. */
static void refill(fd_engine_t *e) {
    int64_t most = INT64_MIN;
    for (uint32_t i = 0; i < e->n_adopted; i++)
        if (active(e->adopted[i]) && e->adopted[i]->turn.credit_ns > most) most = e->adopted[i]->turn.credit_ns;
    if (most > 0 || most == INT64_MIN) return;
    const int64_t rounds = -most / FD_QUANTUM_NS + 1;
    for (uint32_t i = 0; i < e->n_adopted; i++) {
        int64_t *credit = &e->adopted[i]->turn.credit_ns;
        if (!active(e->adopted[i])) continue;
        *credit += rounds * FD_QUANTUM_NS;
        if (*credit > FD_QUANTUM_NS) *credit = FD_QUANTUM_NS;
    }
}

/* The index in `adopted` after `i`. */
static uint32_t next_link(const fd_engine_t *e, uint32_t i) { return i + 1 < e->n_adopted ? i + 1 : 0; }

/* ---- calls ---- */

static void set_main(fd_engine_t *e, fd_link_t *link, fd_job_t *job) {
    charge_main(e);
    e->main_link = link;
    e->main_job = job;
}

/* The job of a call that has been answered. */
static void forget(fd_engine_t *e, fd_job_t *job) {
    job->begun = false;
    if (job->kind == FD_JOB_COPIES) job->link->turn.copying = false;
    job->link->turn.n_jobs--;
    e->n_jobs--;
}

/* Answers a call all of whose items are done. */
static void end_call(fd_engine_t *e, fd_job_t *job) {
    fd_link_t *link = job->link;
    if (job->kind == FD_JOB_LAYER) {
        fd_slot_end_layer(link, job->index, job->kv_bytes, job->busy_ns);
        learn(e, job);
    } else {
        fd_slot_end_copies(link, job->index, job->busy_ns);
    }
    forget(e, job);
}

/* Lets the GPU begin a job. */
static void begin_on_gpu(fd_job_t *job, uint64_t start) {
    job->since_ns = start;
    if (job->kind == FD_JOB_LAYER)
        job->kv_bytes = fd_gpu_begin_layer(job->link->gpu, job->index, job->step, job->layer);
}

/* Answers a job of the GPU if it has ended. Returns whether it has. */
static bool end_on_gpu(fd_engine_t *e, fd_job_t *job) {
    fd_error_t error;
    const fd_gpu_state_t state = fd_gpu_poll(job->link->gpu, job->index, &error);
    if (state == FD_GPU_BUSY) return false;
    job->busy_ns = fd_now_ns() - job->since_ns;
    if (state == FD_GPU_DONE) {
        end_call(e, job);
        return true;
    }
    fd_slot_fail(job->link, job->index, error.text);
    forget(e, job);
    return true;
}

/* Begins a job of the slot's step, and does it if it is short. `start` is when the engine began with the call. */
static void begin_job(fd_engine_t *e, fd_link_t *link, uint32_t slot, fd_job_kind_t kind, uint32_t n_items,
                      uint64_t cost, uint64_t start) {
    fd_slot_state_t *state = &link->slots[slot];
    fd_job_t *job = &state->job;
    job->kind = kind;
    job->work = &link->work;
    job->step = &state->step;
    job->slot = (uint8_t *)fd_slot_at(link->region, &link->work.layout, slot);
    job->layer = state->layer;
    job->items = NULL;
    job->n_items = job->n_cut = n_items;
    job->cost = cost;
    job->left = state->step.left;
    job->link = link;
    job->index = slot;
    job->begun = true;
    job->turn = e->n_begun++;
    job->kv_bytes = 0;
    link->turn.n_jobs++;
    if (!e->n_jobs++) e->working_since = start;
    if (link->gpu) {
        begin_on_gpu(job, start);
        return;
    }
    const double estimate = estimate_ns(e, job);
    if (estimate > LONG_NS) fd_poll_carriers(e, false);
    bool done = false;
    if (n_items == 1 && estimate <= SHORT_NS) {
        const fd_stop_t stop = {NULL, 0, start + 4 * SHORT_NS};
        done = fd_job_do_item(job, 0, 0, &stop, &job->kv_bytes);
        job->left[0] = 1; /* item 0, begun */
        job->items = job->left;
    }
    job->busy_ns = fd_now_ns() - start;
    charge(link, job->busy_ns);
    if (done) end_call(e, job);
}

/* Begins the layer that the slot asks for. */
static void begin_layer(fd_engine_t *e, fd_link_t *link, uint32_t slot) {
    const fd_step_t *step = &link->slots[slot].step;
    const uint64_t start = fd_now_ns();
    if (fd_slot_begin_layer(link, slot))
        begin_job(e, link, slot, FD_JOB_LAYER, step->plan->n_items, step->plan->cost, start);
    else charge(link, fd_now_ns() - start);
}

/* Takes the step that the slot asks for. */
static void arm(fd_engine_t *e, fd_link_t *link, uint32_t slot) {
    const fd_step_t *step = &link->slots[slot].step;
    const uint64_t start = fd_now_ns();
    const bool copies = fd_slot_arm(link, slot);
    charge(link, fd_now_ns() - start);
    if (!copies) return;
    link->turn.copying = true;
    begin_job(e, link, slot, FD_JOB_COPIES, fd_step_copy_items(step, &link->kv, link->work.shapes[0].max_items),
              fd_step_copy_cost(step, &link->kv), fd_now_ns());
}

bool fd_turns_poll(fd_engine_t *e) {
    const uint64_t start = e->n_jobs ? charge_main(e) : 0;
    bool any = false, waiting = false, under_way = false;
    for (uint32_t k = 0, i = e->next_link; k < e->n_adopted; k++, i = next_link(e, i)) {
        fd_link_t *link = e->adopted[i];
        link->turn.waits = false;
        for (uint32_t slot = 0; slot < link->work.g.n_slots; slot++) {
            under_way |= link->slots[slot].step.valid;
            if (link->slots[slot].job.begun) {
                any |= link->gpu && end_on_gpu(e, &link->slots[slot].job);
                continue;
            }
            const fd_asks_t asks = fd_slot_asks(link, slot);
            if (asks == FD_ASKS_NOTHING) continue;
            any = true;
            /* The end of the copies may free pages that this step needs. */
            if (link->turn.leaving || (asks == FD_ASKS_ARM && link->turn.copying)) continue;
            if (link->turn.credit_ns <= 0) link->turn.waits = waiting = true;
            else if (asks == FD_ASKS_ARM) arm(e, link, slot);
            else begin_layer(e, link, slot);
        }
    }
    if (under_way != e->under_way) __atomic_store_n(&e->under_way, under_way, __ATOMIC_RELAXED);
    if (waiting && !e->n_jobs) refill(e);
    if (start) e->poll_ns = (e->charged_ns = fd_now_ns()) - start; /* the main job's link does not pay for this */
    if (start && any) sched_yield(); /* the peer of a short call may need this core, which long calls would keep */
    return any;
}

/* ---- long calls ---- */

/* The first call of a link that has begun and that no thread works on; or n_slots. */
static uint32_t waiting_call(const fd_link_t *link) {
    uint32_t found = link->work.g.n_slots;
    for (uint32_t slot = 0; slot < link->work.g.n_slots && link->turn.n_jobs; slot++) {
        const fd_job_t *job = &link->slots[slot].job;
        if (!job->begun || job->bay) continue;
        if (found == link->work.g.n_slots || job->turn < link->slots[found].job.turn) found = slot;
    }
    return found;
}

/* Makes the next call the main job, if one waits. */
static void start_next(fd_engine_t *e) {
    fd_bay_t *bay = fd_bay_free(e);
    if (!bay) return;
    refill(e);
    for (uint32_t k = 0, i = e->next_link; k < e->n_adopted; k++, i = next_link(e, i)) {
        fd_link_t *link = e->adopted[i];
        if (link->turn.credit_ns <= 0 || link->turn.leaving) continue;
        const uint32_t slot = waiting_call(link);
        if (slot == link->work.g.n_slots) continue;
        fd_job_t *job = &link->slots[slot].job;
        e->next_link = next_link(e, i);
        set_main(e, link, job);
        job->since_ns = e->charged_ns;
        fd_job_start(e, bay, job);
        return;
    }
}

/* Whether another link than the main job's may run a call that has begun. */
static bool another_waits(const fd_engine_t *e) {
    for (uint32_t i = 0; i < e->n_adopted; i++) {
        const fd_link_t *link = e->adopted[i];
        if (link != e->main_link && link->turn.credit_ns > 0 && waiting_call(link) < link->work.g.n_slots) return true;
    }
    return false;
}

/* Answers the calls that are done, and lets withdrawn calls wait for their next turn. Returns whether there was such a
 * call. */
static bool end_calls(fd_engine_t *e) {
    bool any = false;
    for (uint32_t p = 0; p < FD_BAYS; p++) {
        fd_job_t *job = e->bays[p].job;
        if (!job || !fd_job_over(e, &e->bays[p])) continue;
        any = true;
        if (job == e->main_job) set_main(e, NULL, NULL);
        job->busy_ns += fd_now_ns() - job->since_ns;
        if (!job->n_items && !job->cancelled) end_call(e, job);
    }
    return any;
}

void fd_turns_work(fd_engine_t *e) {
    uint64_t now = charge_main(e);
    if (e->main_job && e->main_link->turn.credit_ns <= 0) {
        refill(e);
        if (another_waits(e)) {
            fd_job_withdraw(e, e->main_job->bay);
            set_main(e, NULL, NULL);
        }
    }
    if (!e->main_job) start_next(e);
    const uint64_t tick = fd_max(e->poll_ns * POLL_SHARE, TICK_NS);
    bool worked = false;
    for (uint32_t p = 0; p < FD_BAYS && !worked; p++)
        if (e->bays[p].job && !e->bays[p].withdrawn) worked = fd_job_help(e, &e->bays[p], now + tick);
    if (!worked) set_main(e, NULL, NULL); /* all items are claimed: there are threads for another call */
    for (uint32_t i = 0; i < SPINS && !end_calls(e) && !worked; i++) fd_cpu_relax();
    if (!worked) sched_yield(); /* a helper that still works may need this core */
    /* The carriers must not wait for long, even if an estimate was wrong. */
    if (e->n_jobs && e->polling && fd_now_ns() - e->working_since > LONG_NS) fd_poll_carriers(e, false);
}

bool fd_turns_leave(fd_engine_t *e, fd_link_t *link) {
    bool gone = true;
    link->turn.leaving = true;
    for (uint32_t slot = 0; slot < link->work.g.n_slots; slot++) {
        fd_job_t *job = &link->slots[slot].job;
        if (job->begun && link->gpu) {
            gone &= end_on_gpu(e, job);
            continue;
        }
        if (!job->begun || !job->bay) continue;
        gone = false;
        __atomic_store_n(&job->cancelled, true, __ATOMIC_RELAXED);
        if (!job->bay->withdrawn) fd_job_withdraw(e, job->bay);
        if (job == e->main_job) set_main(e, NULL, NULL);
    }
    if (!gone) return false;
    e->n_jobs -= link->turn.n_jobs;
    link->turn.n_jobs = 0;
    return true;
}
