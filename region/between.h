/* What the S side computes between the replies to two layers, and while it waits for one. The S-Part has it in a
 * capsule of this name, for a port that runs the layers of a step without Python. */
#ifndef FD_BETWEEN_H
#define FD_BETWEEN_H

#include <stdint.h>

#define FD_BETWEEN_CAPSULE "fastdecode.between"

typedef struct {
    /* Takes the O rows of layer `layer` - 1, and leaves the Q, K and V rows of layer `layer` if there is one. Needs no
     * GIL. -1 if memory runs out. */
    int (*run)(void *self, uint32_t layer);
    /* Computes what needs no R-node, when the rows of layer `layer` are posted; NULL: nothing. As `run` otherwise. */
    int (*while_asked)(void *self, uint32_t layer);
    void *self;
} fd_between_t;

#endif
