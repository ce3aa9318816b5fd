/* A kernel that was compiled for the host, for C and C++: an entry of the table `kernels`, which a nameless one ends.
 */
#pragma once

typedef struct {
    const char *name;
    unsigned n_arguments;
    const unsigned *sizes, *pointers; /* of each argument: its bytes, and whether it is a pointer */
    void (*run)(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes, void **arguments);
} kernel_t;
