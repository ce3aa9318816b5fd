/* Picks the function of an ISA, and shares the rows and heads of a prompt among threads. */
#include "prompt.h"

#include "cpu/isa.h"
#include "cpu/parallel.h"

FD_VECTOR_OPS(fd_prompt_ops_t, fd_prompt);
extern const fd_prompt_ops_t fd_prompt_bf16_avx512bf16, fd_prompt_bf16_amx;

const fd_prompt_ops_t *fd_prompt_ops(fd_isa_t isa, uint32_t act_dtype) {
    if (isa == FD_ISA_SCALAR || act_dtype >= FD_ACT_DTYPES) return NULL;
#if FD_X86
    if (act_dtype == FD_ACT_BF16) {
        if (isa == FD_ISA_AMX) return &fd_prompt_bf16_amx;
        if (isa == FD_ISA_AVX512BF16) return &fd_prompt_bf16_avx512bf16;
    }
#endif
    return FD_VECTOR_OPS_OF(fd_prompt, isa, act_dtype);
}

/* A block of many rows reads K and V from a cache for most of them; fewer rows leave more parts for the threads. */
enum { MOST_ROWS = 96, FEWEST_ROWS = 24, PARTS_A_THREAD = 4 };

typedef struct {
    const fd_prompt_ops_t *ops;
    const fd_prompt_pack_t *o;
} pack_run_t;

static void pack_parts(void *data, size_t first, size_t n) {
    const pack_run_t *run = data;
    const size_t heads = run->o->blocks->kv_heads;
    for (size_t part = first; part < first + n; part++)
        run->ops->pack(run->o, part % heads, run->o->pos / FD_PROMPT_KEYS + part / heads);
}

void fd_prompt_pack(const fd_prompt_ops_t *ops, const fd_prompt_pack_t *o, unsigned threads) {
    if (!o->n) return;
    const fd_prompt_blocks_t *b = o->blocks;
    const size_t blocks = (o->pos + o->n - 1) / FD_PROMPT_KEYS - o->pos / FD_PROMPT_KEYS + 1;
    const size_t numbers = o->n * b->kv_heads * (b->k_size + b->v_size);
    fd_parallel(pack_parts, &(pack_run_t){ops, o}, blocks * b->kv_heads, 0, fd_worth_threads(numbers, threads));
}

typedef struct {
    const fd_prompt_ops_t *ops;
    const fd_prompt_t *o;
    size_t rows, blocks; /* prompt rows of a block, and blocks of a head */
    int failed;
} attend_run_t;

static void attend_parts(void *data, size_t first, size_t n) {
    attend_run_t *run = data;
    const fd_prompt_t *o = run->o;
    const size_t heads = o->blocks->kv_heads;
    for (size_t part = first; part < first + n; part++) {
        const size_t row = (run->blocks - 1 - part / heads) * run->rows; /* the last rows see most keys */
        if (run->ops->attend(o, part % heads, row, fd_min(run->rows, o->rows - row)) != FD_OK)
            __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
    }
}

fd_status_t fd_prompt_attend(const fd_prompt_ops_t *ops, const fd_prompt_t *o, unsigned threads) {
    if (!o->rows) return FD_OK;
    const size_t heads = o->blocks->kv_heads, parts = threads > 1 ? PARTS_A_THREAD * threads : 1;
    const size_t wanted = (parts + heads - 1) / heads; /* blocks of rows of a head */
    size_t rows = (o->rows + wanted - 1) / wanted * o->group;
    rows = rows > MOST_ROWS ? MOST_ROWS : rows < FEWEST_ROWS ? FEWEST_ROWS : rows;
    rows = fd_min(rows > o->group ? rows / o->group : 1, o->rows);
    attend_run_t run = {ops, o, rows, (o->rows + rows - 1) / rows, 0};
    fd_parallel(attend_parts, &run, run.blocks * heads, 1, threads);
    return run.failed ? FD_INTERNAL : FD_OK;
}
