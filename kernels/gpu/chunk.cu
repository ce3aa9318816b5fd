/* The layout of chunks (kernels/attention/chunk.h) and the tables of a step, for one format and head size.
 *
 *   FD_FORMAT     FD_FP16 or FD_BF16, or FD_INT8
 *   FD_HEAD_SIZE  elements of a head of Q, K, V and O, a multiple of 16
 *   FD_ACT        the format of Q, K, V and O rows: FD_FP32, FD_FP16 or FD_BF16
 *   FD_HADAMARD   1: Q and K are transformed here (kernels/cpu/hadamard.h)
 */
#define FD_INT8 3
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

constexpr int PAGE_TOKENS = 128, LANES = 32; /* LANES: of a column of a chunk */
constexpr bool IS_FP16 = FD_FORMAT == FD_FP16, IS_BF16 = FD_FORMAT == FD_BF16, IS_INT8 = FD_FORMAT == FD_INT8;
constexpr int HEAD = FD_HEAD_SIZE, COLUMNS = (HEAD + LANES - 1) / LANES;         /* of V */
constexpr int WORD = IS_FP16 ? 2 : 4, IN_WORD = IS_FP16 ? 1 : IS_BF16 ? 2 : 4;   /* bytes and elements of a word */
constexpr int K_ROWS = HEAD / IN_WORD + IS_INT8, V_ROWS = PAGE_TOKENS / IN_WORD; /* of a column */
constexpr int V_SCALES = PAGE_TOKENS * K_ROWS * WORD, V_AT = V_SCALES + (IS_INT8 ? PAGE_TOKENS * 4 : 0);
constexpr int CHUNK = V_AT + HEAD * V_ROWS * WORD;

/* A row of a step: the entry of its sequence in the page table (-1: none), its position, its number among the
 * sequence's rows of the step, and the first position that it may see. */
struct fd_step_row {
    int sequence, position, index, first;
};

/* The chunk of a KV head and a block of a sequence. `table` [sequences][table_blocks] holds pages. */
__device__ __forceinline__ u64 fd_chunk_offset(int page, u32 page_bytes, u32 head) {
    return (u64)(u32)page * page_bytes + (u64)head * CHUNK;
}
