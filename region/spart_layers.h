/* The functions with which the S-Part computes its share of each layer, for a port that runs the layers of a step
 * without Python. The S-Part passes them in a capsule of this name. */
#pragma once

#include <stdint.h>

#define FD_SPART_LAYERS_CAPSULE "fastdecode.spart_layers"

/* No function but `raise` needs the GIL. The others return 0, or -1 if they fail. */
typedef struct {
    /* Takes the O rows of layer `layer` - 1, and leaves the Q, K and V rows of layer `layer` if there is one. */
    int (*compute_rows)(void *self, uint32_t layer);
    /* Computes what needs no R-node, after the rows of layer `layer` have been posted. NULL: nothing. */
    int (*compute_meanwhile)(void *self, uint32_t layer);
    /* Sets the exception of the function that has failed. */
    void (*raise)(void *self);
    void *self;
} fd_spart_layers_t;
