/* The work of a link whose KV pages lie in a GPU's memory: what work.h is for pages in the host's. A lease has the
 * memory of all pages that it may grow to from the start.
 *
 * The region is mapped into the GPU, so kernels read a layer's Q and KV rows in the slot and write its O rows there.
 * Each slot has a stream. Arming a step uploads its tables: the rows, and the pages of their sequences. A layer is then
 * two launches (kernels/gpu/append.cu, attend.cu), whose end thread 0 sees by polling. Thread 0 alone calls these
 * functions, except for fd_gpu_work_new and fd_gpu_work_free.
 *
 * A call that the GPU refuses has ended at once, and fd_gpu_poll tells why.
 */
#pragma once

#include "gpu/cuda.h"
#include "work.h"

#define FD_GPU_MAX_ROWS 65535u /* of a call: the third size of a CUDA grid */
#define FD_GPU_MAX_SPLITS 256u

/* The kernels of a layer (kernels/gpu/page_kernels.py, PageFunctions). */
typedef struct {
    void *append, *attend; /* CUfunction */
    uint32_t warps;        /* of a block of `attend` */
    uint32_t shared_bytes; /* its dynamic shared memory */
    uint32_t queries;      /* queries of a block */
    uint32_t at_once;      /* blocks that the GPU runs at once */
} fd_gpu_kernels_t;

/* The blocks to cut the work of each of `pairs` pairs of a row and KV head into, so that the blocks fill a GPU that
 * runs `at_once` of them. A pair takes `rounds` rounds, each a slab of tokens for each warp; a block's start and end
 * take as long as one more. */
uint32_t fd_gpu_splits(uint64_t pairs, uint32_t rounds, uint32_t at_once);

typedef struct fd_gpu_work fd_gpu_work_t;

/* `w`, whose cache lies in the GPU's memory, and `region` must outlive the result. `kernels` [n_layers] is copied. NULL
 * if the GPU's memory or its mappings are short. */
fd_gpu_work_t *fd_gpu_work_new(const fd_cuda_t *cuda, const fd_work_t *w, void *region, const fd_gpu_kernels_t *kernels,
                               fd_error_t *error);
/* Waits for what the GPU does for the link. */
void fd_gpu_work_free(fd_gpu_work_t *g);

/* Uploads the tables of a planned step and begins its copies of shared pages. */
fd_status_t fd_gpu_arm(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, fd_error_t *error);
/* Begins a layer of the step. Returns the bytes of KV-cache that the layer reads. */
uint64_t fd_gpu_begin_layer(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, uint32_t layer);

typedef enum { FD_GPU_BUSY, FD_GPU_DONE, FD_GPU_FAILED } fd_gpu_state_t;

/* Whether what was begun last for a slot has ended. Then it has left its O rows in the slot; with FD_GPU_FAILED the
 * reason is in *error. */
fd_gpu_state_t fd_gpu_poll(fd_gpu_work_t *g, uint32_t slot, fd_error_t *error);
