/* The S side's words for the programs of tests/c that drive an R-engine without a port. */
#ifndef FD_S_SIDE_H
#define FD_S_SIDE_H

#include <sched.h>

#include "engine.h"
#include "require.h"

#define S_SIDE_PATIENCE_NS 60000000000u

static inline void s_side_wake(fd_link_t *link, void *region) {
    fd_wake_engine(&((fd_region_header_t *)region)->engine_asleep, fd_link_eventfd(link));
}

static inline void s_side_ring_arm(fd_link_t *link, void *region, fd_slot_t *slot, uint64_t bell) {
    fd_bell_store(&slot->arm_bell, bell);
    s_side_wake(link, region);
}

/* Waits for the verdict on step `bell`. */
static inline const fd_report_t *s_side_verdict(fd_slot_t *slot, uint64_t bell) {
    for (uint64_t start = fd_now_ns(); fd_bell_read(&slot->armed_bell) != bell; sched_yield())
        REQUIRE(fd_now_ns() - start < S_SIDE_PATIENCE_NS);
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
    for (uint64_t start = fd_now_ns(); (reply = fd_word_read(&slot->layer_reply)) != word; sched_yield()) {
        if (reply == FD_POISON) return false;
        REQUIRE(fd_now_ns() - start < S_SIDE_PATIENCE_NS);
    }
    return true;
}

#endif
