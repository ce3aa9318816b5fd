/* Runs kernels on an emulated machine for tests/helpers/emulated.py: it reads calls from stdin and writes results to
 * stdout.
 *
 *   request  request_t, then `n_buffers` times: a size in bytes (uint32_t) and that many bytes
 *   reply    the first `n_written` buffers, with their contents after the call
 *
 * Numbers are little-endian. Each buffer ends right before an unmapped page, so that a kernel that reads or writes
 * beyond it crashes. The program exits with 0 when stdin ends, and with 1 and a sentence on stderr if it cannot serve a
 * request.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "attention/attention.h"
#include "region/region.h"

enum { APPEND = 0, ATTEND = 1, MERGE = 2, FINISH = 3, LOAD_ACT = 4, MAX_BUFFERS = 9 };

typedef struct {
    char isa[16];
    uint32_t op, dtype; /* dtype: fd_kv_dtype_t or fd_act_dtype_t, whichever the operation needs */
    uint32_t n_buffers, n_written;
    uint32_t head_size, rows; /* rows: number of tokens to append, or of rows to merge or finish */
    uint32_t token;           /* append: index of the first token in the chunks. attend: fd_attend_t.first_token */
    uint32_t heads, group, q_len, q_pos, window;
    uint32_t v_size, segment; /* v_size: of V, where a head has one */
    uint32_t v_in_k;          /* 1: V is the first elements of K */
    float scale, softcap;
} request_t;

typedef struct {
    uint8_t *at, *map;
    uint32_t bytes;
    size_t map_bytes;
} buffer_t;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void read_exactly(void *to, size_t n) {
    if (n && fread(to, n, 1, stdin) != 1) fail("a request ends too early");
}

static buffer_t read_buffer(void) {
    buffer_t b;
    read_exactly(&b.bytes, sizeof b.bytes);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), mapped = fd_round_up(b.bytes, page);
    b.map_bytes = mapped + page;
    b.map = mmap(NULL, b.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.map == MAP_FAILED || mprotect(b.map + mapped, page, PROT_NONE)) fail("no memory");
    b.at = b.map + mapped - b.bytes;
    read_exactly(b.at, b.bytes);
    return b;
}

static void append(const request_t *r, const fd_kv_ops_t *ops, buffer_t *b) {
    const size_t chunk_bytes = fd_kv_chunk_bytes((fd_kv_dtype_t)r->dtype, r->head_size, r->v_size, r->v_in_k);
    for (uint32_t i = 0; i < r->rows; i++) {
        const uint32_t t = r->token + i;
        uint8_t *chunk = b[0].at + t / FD_PAGE_TOKENS * chunk_bytes;
        ops->append(chunk, r->head_size, r->v_size, t % FD_PAGE_TOKENS,
                    (const float *)b[1].at + (size_t)i * r->head_size,
                    r->v_in_k ? NULL : (const float *)b[2].at + (size_t)i * r->v_size, 0);
    }
}

/* Buffers: acc, m, l, o (empty if O rows are not wanted), pages, indexes of the pages to attend to (uint32_t), q,
 * slopes and sinks (each empty if there are none). */
static void attend(const request_t *r, const fd_kv_ops_t *ops, buffer_t *b) {
    const size_t head_bytes = fd_kv_chunk_bytes((fd_kv_dtype_t)r->dtype, r->head_size, r->v_size, r->v_in_k),
                 page_bytes = r->heads * head_bytes;
    const uint32_t n_chunks = b[5].bytes / sizeof(uint32_t);
    const uint8_t **chunks = malloc((n_chunks + 1) * sizeof *chunks);
    if (!chunks) fail("no memory");
    for (uint32_t i = 0; i < n_chunks; i++) chunks[i] = b[4].at + ((const uint32_t *)b[5].at)[i] * page_bytes;
    const size_t token_bytes = (size_t)r->group * r->head_size * sizeof(float),
                 o_token_bytes = (size_t)r->group * r->v_size * sizeof(float);
    const fd_attend_t a = {
        .chunks = chunks,
        .heads = r->heads,
        .head_stride = head_bytes,
        .n_chunks = n_chunks,
        .first_token = r->token,
        .head_size = r->head_size,
        .v_size = r->v_size,
        .v_in_k = r->v_in_k,
        .group = r->group,
        .q_len = r->q_len,
        .q_pos = r->q_pos,
        .window = r->window,
        .segment = r->segment,
        .softcap = r->softcap,
        .slopes = b[7].bytes ? (const float *)b[7].at : NULL,
        .sinks = b[8].bytes ? (const float *)b[8].at : NULL,
        .softmax_scale = 1.0f,
        .act_dtype = FD_ACT_FP32,
        .q = b[6].at,
        .q_head_stride = r->q_len * token_bytes,
        .q_token_stride = token_bytes,
        .o = b[3].bytes ? b[3].at : NULL,
        .o_head_stride = r->q_len * o_token_bytes,
        .o_token_stride = o_token_bytes,
        .acc = (float *)b[0].at,
        .m = (float *)b[1].at,
        .l = (float *)b[2].at,
    };
    ops->attend(&a);
    free(chunks);
}

static void serve(const request_t *r, buffer_t *b) {
    fd_isa_t isa;
    if (fd_isa_from_name(r->isa, &isa) || !fd_isa_supported(isa))
        fail("the ISA is unknown or not supported by this CPU");
    const fd_kv_ops_t *kv = fd_kv_ops((fd_kv_dtype_t)r->dtype, isa);
    const fd_vec_ops_t *vec = fd_vec_ops(isa);
    if (strcmp(kv->isa, r->isa)) fail("the kernels are not those of the requested ISA");
    float *f[MAX_BUFFERS];
    for (int i = 0; i < MAX_BUFFERS; i++) f[i] = (float *)b[i].at;
    switch (r->op) {
    case APPEND: append(r, kv, b); break;
    case ATTEND: attend(r, kv, b); break;
    case MERGE: vec->merge(f[0], f[1], f[2], f[3], f[4], f[5], r->rows, r->head_size); break;
    case FINISH: vec->finish(b[0].at, f[1], f[2], r->rows, r->head_size, r->dtype); break;
    case LOAD_ACT: vec->load_act(f[0], b[1].at, b[0].bytes / sizeof(float), r->dtype, r->scale); break;
    default: fail("the operation is unknown");
    }
}

int main(void) {
    request_t r;
    while (fread(&r, sizeof r, 1, stdin) == 1) {
        buffer_t b[MAX_BUFFERS] = {{0}};
        if (r.n_buffers > MAX_BUFFERS || r.n_written > r.n_buffers) fail("too many buffers");
        for (uint32_t i = 0; i < r.n_buffers; i++) b[i] = read_buffer();
        serve(&r, b);
        for (uint32_t i = 0; i < r.n_written; i++)
            if (b[i].bytes && fwrite(b[i].at, b[i].bytes, 1, stdout) != 1) fail("the reply cannot be written");
        if (fflush(stdout)) fail("the reply cannot be written");
        for (uint32_t i = 0; i < r.n_buffers; i++) munmap(b[i].map, b[i].map_bytes);
    }
    return ferror(stdin) ? 1 : 0;
}
