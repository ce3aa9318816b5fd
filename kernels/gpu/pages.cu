/* Pages from memory to memory, and answers of two places that each attended to a part of a row's tokens. */
#define FD_THREADS 128

/* Copies counts[0] pages, whole: for each the addresses of its first plane where it lies and where it goes. The planes
 * of a page lie source_stride and target_stride times 64 bytes apart; plane_bytes is a multiple of 16. Either end may
 * be host memory that is mapped into the device.
 *
 *   grid    (pages of the size class, planes)
 *   block   FD_THREADS threads */
FD_KERNEL_OF(FD_THREADS)
fd_copy_pages(const unsigned long long *moves, const unsigned *counts, unsigned plane_bytes, unsigned source_stride,
              unsigned target_stride) {
    if (blockIdx.x >= counts[0]) return;
    const unsigned long long *move = moves + 2 * (unsigned long long)blockIdx.x;
    const uint4 *from = (const uint4 *)(move[0] + 64ull * source_stride * blockIdx.y);
    uint4 *to = (uint4 *)(move[1] + 64ull * target_stride * blockIdx.y);
    for (unsigned i = threadIdx.x; i < plane_bytes / 16; i += FD_THREADS) to[i] = __ldcv(from + i);
}

/* Merges row i of o [counts[0]][o_stride], an answer without sinks whose scores have the log-sum-exp lse [i][query
 * heads], with the answer at others[i], in place. The latter is what an R-node answers to a partial row
 * (FD_ROW_PARTIAL): the O heads of a row, and o_stride elements behind their beginning a log-sum-exp in fp32 for each
 * head; 0: there is none. `sinks` [query heads], if not NULL, is one more score of each head, without a V.
 *
 *   grid    (rows of the size class, query heads)
 *   block   FD_THREADS threads */
FD_KERNEL_OF(FD_THREADS)
fd_merge_answers(void *o, const float *lse, const unsigned long long *others, const unsigned *counts,
                 const float *sinks, unsigned o_stride, unsigned head_size, unsigned act) {
    const unsigned row = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    if (row >= counts[0]) return;
    const float none = -FD_INFINITY, mine = lse[row * heads + head];
    const unsigned char *other = (const unsigned char *)others[row];
    const unsigned o_bytes = o_stride * (act == FD_FP32 ? 4 : 2);
    const float its = other ? __ldcv((const float *)(other + o_bytes) + head) : none;
    const float sink = sinks ? sinks[head] : none, most = fmaxf(fmaxf(mine, its), sink);
    const bool seen = mine > none || its > none; /* a row that sees no token stays 0, whatever its sink */
    float of_mine = seen ? expf(mine - most) : 0.0f, of_its = seen ? expf(its - most) : 0.0f;
    const float total = of_mine + of_its + (seen ? expf(sink - most) : 1.0f);
    of_mine /= total, of_its /= total;
    for (unsigned d = threadIdx.x; d < head_size; d += FD_THREADS) {
        const fd_index_t at = (fd_index_t)row * o_stride + head * head_size + d;
        const float x = of_mine * fd_load(o, at, act);
        fd_store(o, at, act, x + (other ? of_its * fd_load(other, head * head_size + d, act) : 0.0f));
    }
}
