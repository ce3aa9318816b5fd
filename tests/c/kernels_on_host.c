/* Compiles rows.cu for the host: a block and its threads are loops. */
#define __global__ static
typedef struct {
    unsigned x, y, z, w;
} uint4;
static struct {
    unsigned x, y;
} blockIdx, threadIdx;

static uint4 __ldcv(const uint4 *p) { return *p; }

#include "../../fastdecode/spart/exchange_kernels/rows.cu"

/* Every block, and every thread of a block, one after the other. */
#define EACH_THREAD(blocks, kinds, call)                                                                               \
    for (blockIdx.x = 0; blockIdx.x < (blocks); blockIdx.x++)                                                          \
        for (blockIdx.y = 0; blockIdx.y < (kinds); blockIdx.y++)                                                       \
            for (threadIdx.x = 0; threadIdx.x < FD_ROW_THREADS; threadIdx.x++) call

void pack(unsigned blocks, const uint4 *q, const uint4 *kv, const unsigned long long *q_slots,
          const unsigned long long *kv_slots, const unsigned *counts, unsigned q_chunks, unsigned kv_chunks) {
    EACH_THREAD(blocks, 2, fd_pack_rows(q, kv, q_slots, kv_slots, counts, q_chunks, kv_chunks));
}

void unpack(unsigned blocks, uint4 *o, const unsigned long long *o_slots, const unsigned *counts, unsigned q_chunks) {
    EACH_THREAD(blocks, 1, fd_unpack_rows(o, o_slots, counts, q_chunks));
}
