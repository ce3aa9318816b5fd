/* Picks the function of an ISA, and shares the rows and heads of a prompt among threads. */
#include "prompt.h"

#include "dispatch.h"
#include "parallel.h"

#if FD_X86
extern fd_prompt_fn *const fd_prompt_avx2[FD_ACT_DTYPES], *const fd_prompt_avx512[FD_ACT_DTYPES];
extern fd_prompt_fn fd_prompt_bf16_avx512bf16;
#elif FD_ARM64
extern fd_prompt_fn *const fd_prompt_neon[FD_ACT_DTYPES];
#endif

fd_prompt_fn *fd_prompt_fn_of(fd_isa_t isa, uint32_t act_dtype, const char **name) {
#if FD_X86
    switch (isa) {
    case FD_ISA_AVX2:
    case FD_ISA_AVXVNNI: *name = "avx2"; return fd_prompt_avx2[act_dtype];
    case FD_ISA_AMX:
        if (act_dtype == FD_ACT_BF16) return NULL; /* torch multiplies bf16 with AMX, which is faster */
        __attribute__((fallthrough));
    case FD_ISA_AVX512BF16:
        if (act_dtype == FD_ACT_BF16) {
            *name = "avx512bf16";
            return fd_prompt_bf16_avx512bf16;
        }
        __attribute__((fallthrough));
    case FD_ISA_AVX512:
    case FD_ISA_AVX512VNNI: *name = "avx512"; return fd_prompt_avx512[act_dtype];
    default: return NULL;
    }
#elif FD_ARM64
    *name = "neon";
    return isa == FD_ISA_NEON ? fd_prompt_neon[act_dtype] : NULL;
#else
    return NULL;
#endif
}

/* K and V are rearranged for each block of rows, so a block should have many; fewer leave more parts for the threads.
 */
enum { MOST_ROWS = 96, FEWEST_ROWS = 24, PARTS_A_THREAD = 4 };

typedef struct {
    fd_prompt_fn *attend;
    const fd_prompt_t *o;
    size_t rows, blocks; /* prompt rows of a block, and blocks of a head */
    int failed;
} run_t;

static size_t least(size_t x, size_t y) { return x < y ? x : y; }

static void run_parts(void *data, size_t first, size_t n) {
    run_t *run = data;
    const fd_prompt_t *o = run->o;
    for (size_t part = first; part < first + n; part++) {
        const size_t row = (run->blocks - 1 - part / o->kv_heads) * run->rows; /* the last rows see most keys */
        if (run->attend(o, part % o->kv_heads, row, least(run->rows, o->rows - row)) < 0)
            __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
    }
}

int fd_prompt_attend(fd_prompt_fn *attend, const fd_prompt_t *o, unsigned threads) {
    const size_t parts = threads > 1 ? PARTS_A_THREAD * threads : 1;
    const size_t wanted = (parts + o->kv_heads - 1) / o->kv_heads; /* blocks of a head */
    size_t rows = (o->rows + wanted - 1) / wanted * o->group;
    rows = rows > MOST_ROWS ? MOST_ROWS : rows < FEWEST_ROWS ? FEWEST_ROWS : rows;
    rows = least(rows > o->group ? rows / o->group : 1, o->rows);
    run_t run = {attend, o, rows, (o->rows + rows - 1) / rows, 0};
    fd_parallel(run_parts, &run, run.blocks * o->kv_heads, threads);
    return run.failed ? -1 : 0;
}
