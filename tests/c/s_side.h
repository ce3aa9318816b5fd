/* The S side's words for the programs of tests/c that drive an R-engine without a port. */
#pragma once

#include <sched.h>

#include "engine/engine.h"
#include "require.h"

#define S_SIDE_PATIENCE_NS 60000000000u

/* Set: this thread stands in for thread 0 of the R-engine while it waits, and wakes nobody when it rings. */
static _Thread_local const fd_stand_in_t *s_side_stand_in;
static _Thread_local fd_link_t *s_side_link;
static _Thread_local void *s_side_region;

static inline void s_side_wake(fd_link_t *link, void *region) {
    s_side_link = link, s_side_region = region;
    if (s_side_stand_in) return;
    fd_wake_engine(&((fd_region_header_t *)region)->engine_asleep, fd_link_eventfd(link));
}

static inline void s_side_ring_arm(fd_link_t *link, void *region, fd_slot_t *slot, uint64_t bell) {
    fd_bell_store(&slot->arm_bell, bell);
    s_side_wake(link, region);
}

/* Lets others work between two looks at a word. */
static inline void s_side_pause(void) {
    const fd_stand_in_t *engine = s_side_stand_in;
    if (!engine) sched_yield();
    else if (engine->serve(engine->self) == FD_STAND_IN_TAKEN)
        fd_wake_engine(&((fd_region_header_t *)s_side_region)->engine_asleep, fd_link_eventfd(s_side_link));
}

static inline void s_side_leave(void) {
    if (s_side_stand_in) s_side_stand_in->leave(s_side_stand_in->self);
}

/* Waits for the verdict on step `bell`. */
static inline const fd_report_t *s_side_verdict(fd_slot_t *slot, uint64_t bell) {
    for (uint64_t start = fd_now_ns(); fd_bell_read(&slot->armed_bell) != bell; s_side_pause())
        REQUIRE(fd_now_ns() - start < S_SIDE_PATIENCE_NS);
    s_side_leave();
    fd_word_store(&slot->layer_reply, 0);
    return &slot->report;
}

static inline void s_side_ask(fd_link_t *link, void *region, fd_slot_t *slot, uint32_t word) {
    fd_word_store(&slot->layer_request, word);
    s_side_wake(link, region);
}

/* Waits for the reply `word`. Returns false if the step was poisoned instead. */
static inline bool s_side_replied(fd_slot_t *slot, uint32_t word) {
    uint32_t reply;
    for (uint64_t start = fd_now_ns(); (reply = fd_word_read(&slot->layer_reply)) != word; s_side_pause()) {
        if (reply == FD_POISON) break;
        REQUIRE(fd_now_ns() - start < S_SIDE_PATIENCE_NS);
    }
    s_side_leave();
    return reply == word;
}
