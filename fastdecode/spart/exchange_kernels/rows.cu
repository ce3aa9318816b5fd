/* Moves the rows of a step between the S-Part's tensors and the slots of its links.
 *
 * A slot is host memory that is mapped into the device: the R-node's own memory over shared memory, else the region
 * that a carrier sends from. A row goes straight there, so no copy engine and no host thread takes part. Which slot and
 * which row of it a row has changes from step to step; the kernels look it up in tables that come with the step's
 * upload.
 *
 * A launch may have more blocks than the step has rows, so that one captured graph serves every step of its size class.
 * A row whose address is 0 is left out: its K and V lie on the device itself.
 * A row is a multiple of 16 bytes in every activation dtype, and rows and slots are aligned to 16 bytes.
 *
 *   grid    (rows of the size class, 2) to pack, where the second dimension is 0 for Q and 1 for KV
 *           (rows of the size class, 1) to unpack
 *   block   FD_ROW_THREADS threads, which copy a row in chunks of 16 bytes
 */
#ifndef FD_ROW_THREADS
#define FD_ROW_THREADS 512
#endif

/* q [counts[0]][q_chunks] and kv [counts[1]][kv_chunks]: row i of each is written to the address that q_slots[i] or
 * kv_slots[i] holds. The rows are visible to the host once the stream's next memory operation is. */
FD_KERNEL fd_pack_rows(const uint4 *q, const uint4 *kv, const unsigned long long *q_slots,
                       const unsigned long long *kv_slots, const unsigned *counts, unsigned q_chunks,
                       unsigned kv_chunks) {
    const unsigned row = blockIdx.x, kind = blockIdx.y;
    if (row >= counts[kind]) return;
    const unsigned chunks = kind ? kv_chunks : q_chunks;
    const uint4 *from = (kind ? kv : q) + (unsigned long long)row * chunks;
    uint4 *to = (uint4 *)(kind ? kv_slots[row] : q_slots[row]);
    if (!to) return;
    for (unsigned i = threadIdx.x; i < chunks; i += FD_ROW_THREADS) to[i] = from[i];
}

/* Row i of o [counts[0]][o_chunks] is read from the address that o_slots[i] holds. The host has written the rows since
 * the last launch, so the loads do not take them from a cache. */
FD_KERNEL fd_unpack_rows(uint4 *o, const unsigned long long *o_slots, const unsigned *counts, unsigned o_chunks) {
    const unsigned row = blockIdx.x;
    if (row >= counts[0]) return;
    const uint4 *from = (const uint4 *)o_slots[row];
    if (!from) return;
    uint4 *to = o + (unsigned long long)row * o_chunks;
    for (unsigned i = threadIdx.x; i < o_chunks; i += FD_ROW_THREADS) to[i] = __ldcv(from + i);
}
