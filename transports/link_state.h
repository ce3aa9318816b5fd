/* Whether and why one end of a link is down: a flag for data threads, a sentence, and an eventfd for the event loop. */
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "region/doorbell.h"

typedef enum { FD_SIDE_S, FD_SIDE_R } fd_side_t; /* the two ends of a link */

typedef struct {
    uint32_t flag; /* 1 once the link is down; never 0 again */
    int fd;        /* eventfd, readable once the link is down */
    pthread_mutex_t lock;
    char reason[256]; /* of the first fd_link_mark_down */
} fd_link_state_t;

static inline int fd_link_state_init(fd_link_state_t *link) {
    link->flag = 0;
    link->reason[0] = 0;
    link->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (link->fd < 0) return -1;
    pthread_mutex_init(&link->lock, NULL);
    return 0;
}

/* Closes the eventfd. The flag and the reason stay readable. */
static inline void fd_link_state_close_fd(fd_link_state_t *link) {
    close(link->fd);
    link->fd = -1;
}

static inline bool fd_link_is_down(const fd_link_state_t *link) {
    return __atomic_load_n(&link->flag, __ATOMIC_ACQUIRE) != 0;
}

/* Marks the link as down. If it is down already, the first reason stays. */
static inline void fd_link_mark_down(fd_link_state_t *link, const char *reason) {
    pthread_mutex_lock(&link->lock);
    if (!fd_link_is_down(link)) {
        snprintf(link->reason, sizeof link->reason, "%s", reason);
        __atomic_store_n(&link->flag, 1, __ATOMIC_SEQ_CST);
        fd_eventfd_wake(link->fd);
    }
    pthread_mutex_unlock(&link->lock);
}

/* Marks the link as down. On the S side, also poisons the region and wakes every waiter, because no reply will come. */
static inline void fd_link_stop(fd_link_state_t *link, fd_side_t side, uint8_t *region, const fd_geometry_t *g,
                                const char *reason) {
    fd_link_mark_down(link, reason);
    if (side == FD_SIDE_S) fd_poison_all(region, g);
}

static inline void fd_link_down_reason(fd_link_state_t *link, char out[256]) {
    pthread_mutex_lock(&link->lock);
    memcpy(out, link->reason, sizeof link->reason);
    pthread_mutex_unlock(&link->lock);
}
