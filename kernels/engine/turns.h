/* The order of the calls: thread 0 decides which call the engine works on, and when links take turns.
 *
 * Thread 0 does a short call at once, even while the other threads work on a long one. The threads work on long calls
 * in slices, and links take turns by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): each round gives every
 * link with calls the same engine time, however many slots the link has; a link that has used up its time waits until
 * the other links have used theirs. Thread 0 charges a link the time that its calls take, and estimates the time of a
 * call from the plan's cost, which counts attention, appended rows and page copies, at the rate of the link's last
 * calls.
 *
 * All threads work on one job, the main job. Once all of its items are claimed, the next job becomes the main job, so
 * several calls are under way at once if one call does not fill the threads.
 */
#pragma once

#include "jobs.h"

#define FD_QUANTUM_NS 2000000 /* engine time of a link in each round */

/* Begins the calls that links ask for. Returns whether there was one. */
bool fd_turns_poll(fd_engine_t *e);
/* Works on the calls that have begun, for a short time. */
void fd_turns_work(fd_engine_t *e);

/* Ends the work on the calls of a link that leaves. Returns false if threads still work on one; call this again then.
 * Calls that are not done stay unanswered. */
bool fd_turns_leave(fd_engine_t *e, fd_link_t *link);
