/* How a thread of the S side stands in for thread 0 of an R-engine in the same process.
 *
 * Where the S-Part and the R-engine take turns on the same cores, the S-Part's thread has nothing to do while it waits
 * for a layer. If it does what thread 0 would do, the layer begins at once, and no thread has to be woken or to give up
 * its core.
 */
#pragma once

typedef enum {
    FD_STAND_IN_TAKEN, /* thread 0 is awake, or another thread stands in */
    FD_STAND_IN_IDLE,  /* there was nothing to do */
    FD_STAND_IN_BUSY,  /* something was done; there may be more */
} fd_stand_in_result_t;

typedef struct {
    /* Does a round of thread 0's work, for well under a millisecond. Takes no lock that another thread holds for long,
     * and needs no GIL. Any thread may call it. */
    fd_stand_in_result_t (*serve)(void *self);
    /* The thread stands in no longer: wakes thread 0 if work is left. */
    void (*leave)(void *self);
    void *self;
} fd_stand_in_t;

/* A PyCapsule of this name points to an fd_stand_in_t, which is valid as long as the capsule. */
#define FD_STAND_IN_CAPSULE "fastdecode.stand_in"
