/* Whether and why one end of a link is down: a flag for data threads, a sentence, and an eventfd for the event loop. */
#ifndef FD_DOWN_H
#define FD_DOWN_H

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
    char reason[256]; /* of the first fd_down_set */
} fd_down_t;

static inline int fd_down_init(fd_down_t *d) {
    d->flag = 0;
    d->reason[0] = 0;
    d->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->fd < 0) return -1;
    pthread_mutex_init(&d->lock, NULL);
    return 0;
}

/* Closes the eventfd. The flag and the reason stay readable. */
static inline void fd_down_close_fd(fd_down_t *d) {
    close(d->fd);
    d->fd = -1;
}

static inline bool fd_is_down(const fd_down_t *d) { return __atomic_load_n(&d->flag, __ATOMIC_ACQUIRE) != 0; }

/* Marks the link as down. If it is down already, the first reason stays. */
static inline void fd_down_set(fd_down_t *d, const char *reason) {
    pthread_mutex_lock(&d->lock);
    if (!fd_is_down(d)) {
        snprintf(d->reason, sizeof d->reason, "%s", reason);
        __atomic_store_n(&d->flag, 1, __ATOMIC_SEQ_CST);
        fd_eventfd_wake(d->fd);
    }
    pthread_mutex_unlock(&d->lock);
}

/* Sets `d`. On the S side, also poisons the region and wakes every waiter, because no reply will come. */
static inline void fd_down_stop_link(fd_down_t *d, fd_side_t side, uint8_t *region, const fd_geometry_t *g,
                                     const char *reason) {
    fd_down_set(d, reason);
    if (side == FD_SIDE_S) fd_poison_all(region, g);
}

static inline void fd_down_reason(fd_down_t *d, char out[256]) {
    pthread_mutex_lock(&d->lock);
    memcpy(out, d->reason, sizeof d->reason);
    pthread_mutex_unlock(&d->lock);
}

#endif
