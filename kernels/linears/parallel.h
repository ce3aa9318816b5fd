/* Shares a loop among the threads of the OpenMP library that torch has loaded: its threads exist already, and a pool
 * beside it would take the cores from it. */
#ifndef FD_PARALLEL_H
#define FD_PARALLEL_H

#include <stddef.h>

/* Calls body(data, first, n) for ranges that together are 0 to parts - 1, in up to `threads` threads, or in this one if
 * there is no such library. */
void fd_parallel(void (*body)(void *data, size_t first, size_t n), void *data, size_t parts, unsigned threads);

#endif
