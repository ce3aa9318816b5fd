/* Appends the rows of a step to pages, bit for bit as the C code does (kernels/attention/append.h). */

/* Bytes from the start of a word to its element i. */
__device__ __forceinline__ int fd_byte_of(int i) {
    return IS_FP16 ? 0 : IS_BF16 ? i % 2 * 2 : i % 2 * 2 + i / 2 % 2; /* int8: bytes 0, 2, 1, 3 */
}
__device__ __forceinline__ int fd_k_offset(int t, int d) {
    return ((t / LANES * K_ROWS + d / IN_WORD) * LANES + t % LANES) * WORD + fd_byte_of(d);
}
__device__ __forceinline__ int fd_k_scale_offset(int t) {
    return ((t / LANES + 1) * K_ROWS - 1) * LANES * WORD + t % LANES * WORD;
}
__device__ __forceinline__ int fd_v_offset(int t, int d) {
    const int first = d / LANES * LANES, wide = HEAD - first < LANES ? HEAD - first : LANES;
    return V_AT + (first * V_ROWS + t / IN_WORD * wide + d % LANES) * WORD + fd_byte_of(t);
}

/* fp16 saturates, and keeps NaN with as much of its payload as fits. */
__device__ __forceinline__ u16 fd_stored_fp16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (u16)(bits >> 16 & 0x8000u | 0x7E00u | bits >> 13 & 0x3FFu);
    return fd_to_half(fminf(fmaxf(x, -65504.0f), 65504.0f));
}
__device__ __forceinline__ u16 fd_stored_half(float x) { return IS_FP16 ? fd_stored_fp16(x) : fd_to_bf16(x); }

/* Element i of a row, exactly: a conversion of fp16 to fp32 would keep a NaN, but not its payload. */
__device__ __forceinline__ float fd_exact(const void *rows, u64 i) {
    if (FD_ACT != FD_FP16) return fd_load(rows, i, FD_ACT);
    const u32 half = ((const u16 *)rows)[i];
    if ((half & 0x7FFFu) > 0x7C00u)
        return __uint_as_float((half & 0x8000u) << 16 | 0x7FC00000u | (half & 0x3FFu) << 13);
    return fd_from_half((u16)half);
}

/* The Hadamard transform of x [HEAD] in blocks of a power of two (fd_hadamard), by HEAD threads. */
__device__ __forceinline__ void fd_hadamard(float *x, int d) {
    int start = 0, size = PAGE_TOKENS; /* of the block of d; the largest one has 128 elements too */
    while (start + size > HEAD || d >= start + size)
        if (start + size > HEAD) size /= 2;
        else start += size;
    for (int half = 1; half < 128; half *= 2) {
        const float mine = x[d], other = half < size ? x[d ^ half] : 0.0f;
        __syncthreads();
        if (half < size) x[d] = d & half ? other - mine : mine + other;
        __syncthreads();
    }
    x[d] = __fmul_rn(x[d], __fdiv_rn(1.0f, __fsqrt_rn((float)size)));
}

/* Rounds x to a code of int8. `most` is the largest size in the token. */
__device__ __forceinline__ u8 fd_code(float x, float most) {
    const float inverse = most < 1e-33f ? 0.0f : __fdiv_rn(127.0f, most); /* FD_TINY */
    return (u8)(__float2int_rn(fminf(fmaxf(__fmul_rn(x, inverse), -127.0f), 127.0f)) + 128);
}
__device__ __forceinline__ float fd_scale(float most) { return most < 1e-33f ? 0.0f : __fdiv_rn(most, 127.0f); }

/* Row i of kv [counts[1]][kv_stride], K heads before V heads, goes to the page of rows[i], unless its position is
 * negative. `chunks` is the chunk of page 0 and KV head 0; pages are page_bytes apart.
 *
 *   grid    (rows of the size class, KV heads)
 *   block   HEAD threads */
FD_KERNEL_OF(HEAD)
fd_append(u8 *chunks, const int *table, const fd_step_row *rows, const u32 *counts, const void *kv, u32 page_bytes,
          u32 table_blocks, u32 kv_stride) {
    const u32 row = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int d = (int)threadIdx.x;
    if (row >= counts[1] || rows[row].position < 0) return;
    const int t = rows[row].position % PAGE_TOKENS, block = rows[row].position / PAGE_TOKENS;
    const int page = table[(u64)(u32)rows[row].sequence * table_blocks + (u32)block];
    u8 *chunk = chunks + fd_chunk_offset(page, page_bytes, head);
    const u64 of_k = (u64)row * kv_stride + head * HEAD + (u32)d;
    const float k = fd_exact(kv, of_k), v = fd_exact(kv, of_k + (u64)heads * HEAD);
    if (!IS_INT8) {
        *(u16 *)(chunk + fd_k_offset(t, d)) = fd_stored_half(k);
        *(u16 *)(chunk + fd_v_offset(t, d)) = fd_stored_half(v);
        return;
    }
    __shared__ float x[HEAD];
    __shared__ u32 most[2]; /* the bits of the largest sizes, which are in the order of the numbers */
    x[d] = k;
    if (d < 2) most[d] = 0;
    __syncthreads();
    if (FD_HADAMARD) fd_hadamard(x, d);
    if (x[d] == x[d]) atomicMax(&most[0], __float_as_uint(fabsf(x[d]))); /* not a NaN */
    if (v == v) atomicMax(&most[1], __float_as_uint(fabsf(v)));
    __syncthreads();
    const float most_k = __uint_as_float(most[0]), most_v = __uint_as_float(most[1]);
    chunk[fd_k_offset(t, d)] = fd_code(x[d], most_k);
    chunk[fd_v_offset(t, d)] = fd_code(v, most_v);
    if (d) return;
    *(float *)(chunk + fd_k_scale_offset(t)) = fd_scale(most_k);
    *(float *)(chunk + V_SCALES + t * 4) = fd_scale(most_v);
}
