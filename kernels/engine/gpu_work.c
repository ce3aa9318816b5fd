#include "gpu_work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/half.h"
#include "region/doorbell.h"

enum { SLAB = 64, COUNTERS_UNIT = 256 }; /* of tiles.cu and attend.cu */

/* fd_step_row of kernels/gpu/chunk.cu. */
typedef struct {
    int32_t sequence, position, index, first;
} gpu_row_t;

/* What the GPU needs of a kind of layer in a step. */
typedef struct {
    uint32_t splits;
    size_t scratch;    /* where the kind's scratch memory begins */
    uint64_t kv_bytes; /* that a layer reads */
} gpu_kind_t;

/* Memory of the GPU that grows. */
typedef struct {
    fd_device_ptr_t at;
    size_t bytes;
} gpu_memory_t;

typedef struct {
    void *stream;
    uint8_t *host; /* pinned: the tables before they are uploaded */
    size_t host_bytes;
    gpu_memory_t tables, scratch;
    /* The tables of the step in progress, on the GPU. */
    fd_device_ptr_t counts, appended, attending, pages;
    uint32_t blocks, sequences; /* of the page table of a section: [sequences][blocks] */
    gpu_kind_t kinds[FD_MAX_LAYER_KINDS];
    fd_error_t error;
} gpu_slot_t;

struct fd_gpu_work {
    const fd_cuda_t *cuda;
    const fd_work_t *w;
    void *region; /* registered, or NULL */
    fd_device_ptr_t region_at;
    fd_gpu_kernels_t *kernels; /* [n_layers] */
    gpu_memory_t per_head;     /* fp32: the sinks of all layers [n_layers][n_q_heads], then the slopes of all layers */
    gpu_slot_t *slots;         /* [n_slots] */
};

uint32_t fd_gpu_splits(uint64_t pairs, uint32_t rounds, uint32_t at_once) {
    const uint32_t most = fd_max(fd_min(rounds, FD_GPU_MAX_SPLITS), 1);
    uint32_t best = 1;
    uint64_t least = UINT64_MAX;
    for (uint32_t n = 1; n <= most; n++) {
        const uint64_t cost = (pairs * n + at_once - 1) / at_once * ((rounds + n - 1) / n + 1);
        if (cost < least) least = cost, best = n;
    }
    return best;
}

/* ---- life ---- */

static fd_status_t reserve(const fd_cuda_t *cuda, gpu_memory_t *m, size_t bytes, fd_error_t *error) {
    if (bytes <= m->bytes) return FD_OK;
    if (m->at) cuda->MemFree(m->at);
    *m = (gpu_memory_t){0};
    const size_t wanted = bytes + bytes / 2;
    const fd_status_t status = FD_CUDA(cuda, MemAlloc, &m->at, wanted);
    if (status == FD_OK) m->bytes = wanted;
    return status;
}

static fd_status_t reserve_host(const fd_cuda_t *cuda, gpu_slot_t *s, size_t bytes, fd_error_t *error) {
    if (bytes <= s->host_bytes) return FD_OK;
    if (s->host) cuda->MemFreeHost(s->host);
    s->host = NULL, s->host_bytes = 0;
    const size_t wanted = bytes + bytes / 2;
    const fd_status_t status = FD_CUDA(cuda, MemHostAlloc, (void **)&s->host, wanted, 0);
    if (status == FD_OK) s->host_bytes = wanted;
    return status;
}

/* Uploads the sinks and slopes of all layers; a layer without sinks has those of -INFINITY. */
static fd_status_t upload_per_head(fd_gpu_work_t *g, fd_error_t *error) {
    const fd_work_t *w = g->w;
    const size_t heads = w->g.n_q_heads, half = w->g.n_layers * heads, bytes = 2 * half * sizeof(float);
    float *values = malloc(bytes);
    if (!values) return FD_FAIL(FD_INTERNAL, "no memory for sinks and slopes");
    for (size_t i = 0; i < half; i++) values[i] = -INFINITY, values[half + i] = 0;
    for (uint32_t i = 0; i < w->g.n_layers; i++) {
        const fd_layer_t *y = &w->layers[i];
        if (y->sinks) memcpy(values + i * heads, y->sinks, y->heads.n_q_heads * sizeof *values);
        if (y->slopes) memcpy(values + half + i * heads, y->slopes, y->heads.n_q_heads * sizeof *values);
    }
    fd_status_t status = reserve(g->cuda, &g->per_head, bytes, error);
    if (status == FD_OK) status = FD_CUDA(g->cuda, MemcpyHtoD, g->per_head.at, values, bytes);
    free(values);
    return status;
}

static fd_status_t map_region(fd_gpu_work_t *g, void *region, fd_error_t *error) {
    if (FD_CUDA(g->cuda, MemHostRegister, region, g->w->layout.region_bytes, FD_CUDA_PORTABLE_AND_MAPPED) != FD_OK)
        return error->status;
    g->region = region;
    return FD_CUDA(g->cuda, MemHostGetDevicePointer, &g->region_at, region, 0);
}

fd_gpu_work_t *fd_gpu_work_new(const fd_cuda_t *cuda, const fd_work_t *w, void *region, const fd_gpu_kernels_t *kernels,
                               fd_error_t *error) {
    fd_cuda_use(cuda);
    fd_gpu_work_t *g = calloc(1, sizeof *g);
    if (g) {
        *g = (fd_gpu_work_t){.cuda = cuda, .w = w};
        g->kernels = malloc(w->g.n_layers * sizeof *kernels);
        g->slots = calloc(w->g.n_slots, sizeof *g->slots);
    }
    error->status = FD_OK;
    if (!g || !g->kernels || !g->slots) FD_FAIL(FD_INTERNAL, "no memory for the working space of a link");
    if (error->status == FD_OK) memcpy(g->kernels, kernels, w->g.n_layers * sizeof *kernels);
    if (error->status == FD_OK) map_region(g, region, error);
    if (error->status == FD_OK) upload_per_head(g, error);
    for (uint32_t i = 0; error->status == FD_OK && i < w->g.n_slots; i++)
        FD_CUDA(cuda, StreamCreate, &g->slots[i].stream, FD_CUDA_NON_BLOCKING);
    if (error->status == FD_OK) return g;
    fd_gpu_work_free(g);
    return NULL;
}

void fd_gpu_work_free(fd_gpu_work_t *g) {
    if (!g) return;
    const fd_cuda_t *cuda = g->cuda;
    fd_cuda_use(cuda);
    for (uint32_t i = 0; g->slots && i < g->w->g.n_slots; i++) {
        gpu_slot_t *s = &g->slots[i];
        if (s->stream) cuda->StreamSynchronize(s->stream);
        if (s->stream) cuda->StreamDestroy(s->stream);
        if (s->tables.at) cuda->MemFree(s->tables.at);
        if (s->scratch.at) cuda->MemFree(s->scratch.at);
        if (s->host) cuda->MemFreeHost(s->host);
    }
    if (g->per_head.at) cuda->MemFree(g->per_head.at);
    if (g->region) cuda->MemHostUnregister(g->region);
    free(g->kernels);
    free(g->slots);
    free(g);
}

/* ---- arming ---- */

static bool is_part(const fd_gpu_work_t *g) { return fd_is_part(g->w->part); }

/* Entries of the page table for each sequence. Neighbouring attending rows of a part have different entries, so that
 * each begins a block of its own: its position does not follow from that of the row before it. */
static uint32_t entries_of(const fd_gpu_work_t *g) { return is_part(g) ? 2 : 1; }

/* Where the tables of a step lie in one upload. */
typedef struct {
    size_t appended, attending, pages, bytes; /* the counts come first */
} offsets_t;

static offsets_t offsets_of(const gpu_slot_t *s, const fd_step_t *step) {
    offsets_t at = {.appended = FD_LINE};
    const size_t rows = step->n_rows * sizeof(gpu_row_t), attending = step->n_attend_rows * sizeof(gpu_row_t);
    at.attending = at.appended + rows;
    at.pages = fd_round_up(at.attending + attending, FD_LINE);
    at.bytes = at.pages + (size_t)step->n_sections * s->sequences * s->blocks * sizeof(uint32_t);
    return at;
}

/* Writes the rows of a partial entry, whose pages are those of `sequence`. Their K and V are not appended. */
static void write_partial_rows(const fd_entry_t *e, int32_t sequence, gpu_row_t *appended, gpu_row_t *attending) {
    for (uint32_t i = e->row; i < e->row + 2 * e->n_rows; i += 2) {
        appended[i] = appended[i + 1] = (gpu_row_t){sequence, -1, 0, 0};
        attending[i] = (gpu_row_t){sequence, (int32_t)e->pos - 1, 0, 0};
        attending[i + 1] = (gpu_row_t){-1, -1, 0, 0};
    }
}

/* Writes the rows of entry `i`. A row of a part has the position in the pages that the part keeps; -1 stands for a row
 * that is not kept, or one that sees nothing. */
static void write_rows(const fd_gpu_work_t *g, const fd_entry_t *e, uint32_t i, gpu_row_t *appended,
                       gpu_row_t *attending) {
    const fd_part_t part = g->w->part;
    const int32_t sequence = (int32_t)(i * entries_of(g));
    if (e->partial) {
        write_partial_rows(e, sequence, appended, attending);
        return;
    }
    for (uint32_t j = 0; j < e->n_rows; j++) {
        const uint32_t pos = e->pos + j;
        const bool kept = fd_part_keeps(part, pos);
        appended[e->row + j] = (gpu_row_t){sequence, kept ? (int32_t)fd_part_length(part, pos) : -1, (int32_t)j, 0};
        if (!e->attend) continue;
        const int32_t last = (int32_t)fd_part_length(part, (uint64_t)pos + 1) - 1;
        attending[e->row + j] = is_part(g) ? (gpu_row_t){sequence + (int32_t)(j % 2), last, 0, 0}
                                           : (gpu_row_t){sequence, last, (int32_t)j, 0};
    }
}

static void write_pages(const fd_gpu_work_t *g, const gpu_slot_t *s, const fd_step_t *step, uint32_t *to) {
    const fd_plan_t *plan = &step->plans[0];
    for (uint32_t section = 0; section < step->n_sections; section++)
        for (uint32_t i = 0; i < plan->n_entries; i++) {
            const fd_entry_t *e = &plan->entries[i];
            const uint32_t n = fd_pages_for((uint64_t)e->n_cached + e->n_kept);
            for (uint32_t copy = 0; copy < entries_of(g); copy++, to += s->blocks)
                for (uint32_t b = 0; b < n; b++) to[b] = step->pages[(e->blocks + b) * step->n_sections + section];
        }
}

/* The tokens that a row of the entry sees at most, and the KV bytes that its rows read in a layer of this shape. */
static uint64_t attended(const fd_entry_t *e, const fd_plan_shape_t *shape, uint64_t *kv_bytes) {
    const uint64_t end = (uint64_t)e->n_cached + e->n_kept;
    const uint64_t pages = fd_pages_for(end) - (end ? fd_first_block(e->n_cached, shape->window) : 0);
    *kv_bytes += pages * shape->n_kv_heads * shape->chunk_bytes;
    return pages * FD_PAGE_TOKENS;
}

/* Chooses the splits of each kind of layer. Returns the bytes of scratch memory of all. */
static size_t plan_kinds(const fd_gpu_work_t *g, gpu_slot_t *s, const fd_step_t *step) {
    size_t scratch = 0;
    for (uint32_t k = 0; k < g->w->n_kinds; k++) {
        const fd_plan_shape_t *shape = &g->w->shapes[k];
        uint32_t layer = 0;
        while (g->w->kinds[layer] != k) layer++;
        const fd_gpu_kernels_t *kernels = &g->kernels[layer];
        gpu_kind_t *kind = &s->kinds[k];
        uint64_t longest = 0;
        kind->kv_bytes = 0;
        for (uint32_t i = 0; i < step->n_entries; i++) {
            const fd_entry_t *e = &step->plans[k].entries[i];
            if (e->attend) longest = fd_max(longest, attended(e, shape, &kind->kv_bytes));
        }
        const uint64_t pairs = (uint64_t)step->n_attend_rows * shape->n_kv_heads;
        const uint32_t round = SLAB * kernels->warps;
        kind->splits = fd_gpu_splits(pairs, (uint32_t)((longest + round - 1) / round), kernels->at_once);
        kind->scratch = scratch;
        scratch += fd_round_up(pairs * sizeof(uint32_t), COUNTERS_UNIT);
        if (kind->splits > 1) /* partial results: O, m and l of each query */
            scratch += pairs * kind->splits * kernels->queries * (shape->head_size + 2) * sizeof(float);
        scratch = fd_round_up(scratch, COUNTERS_UNIT);
    }
    return scratch;
}

/* Sets the counters of fd_attend to 0, which other steps may have used for partial results. */
static fd_status_t clear_counters(const fd_gpu_work_t *g, gpu_slot_t *s, const fd_step_t *step, fd_error_t *error) {
    for (uint32_t k = 0; k < g->w->n_kinds; k++) {
        const size_t bytes = (size_t)step->n_attend_rows * g->w->shapes[k].n_kv_heads * sizeof(uint32_t);
        const fd_device_ptr_t at = s->scratch.at + s->kinds[k].scratch;
        if (bytes && FD_CUDA(g->cuda, MemsetD8Async, at, 0, bytes, s->stream) != FD_OK) return error->status;
    }
    return FD_OK;
}

static fd_status_t copy_shared(const fd_gpu_work_t *g, gpu_slot_t *s, const fd_step_t *step, fd_error_t *error) {
    const fd_kvcache_t *kv = g->w->kv;
    for (uint32_t i = 0; i < step->n_copies; i++)
        for (uint32_t plane = 0; plane < kv->planes.n_planes; plane++) {
            const fd_device_ptr_t from = (fd_device_ptr_t)fd_kv_plane(kv, plane, step->copies[i].src),
                                  to = (fd_device_ptr_t)fd_kv_plane(kv, plane, step->copies[i].dst);
            if (FD_CUDA(g->cuda, MemcpyDtoDAsync, to, from, kv->planes.plane_bytes, s->stream) != FD_OK)
                return error->status;
        }
    return FD_OK;
}

static fd_status_t upload(const fd_gpu_work_t *g, gpu_slot_t *s, const fd_step_t *step, fd_error_t *error) {
    const fd_plan_t *plan = &step->plans[0];
    s->sequences = step->n_entries * entries_of(g);
    s->blocks = 1;
    for (uint32_t i = 0; i < plan->n_entries; i++) {
        const fd_entry_t *e = &plan->entries[i];
        s->blocks = fd_max(s->blocks, fd_pages_for((uint64_t)e->n_cached + e->n_kept));
    }
    const offsets_t at = offsets_of(s, step);
    const size_t scratch = plan_kinds(g, s, step);
    if (reserve_host(g->cuda, s, at.bytes, error) != FD_OK || reserve(g->cuda, &s->tables, at.bytes, error) != FD_OK ||
        reserve(g->cuda, &s->scratch, scratch, error) != FD_OK)
        return error->status;
    memcpy(s->host, (uint32_t[]){step->n_attend_rows, step->n_rows}, 2 * sizeof(uint32_t));
    for (uint32_t i = 0; i < plan->n_entries; i++)
        write_rows(g, &plan->entries[i], i, (gpu_row_t *)(s->host + at.appended),
                   (gpu_row_t *)(s->host + at.attending));
    write_pages(g, s, step, (uint32_t *)(s->host + at.pages));
    s->counts = s->tables.at;
    s->appended = s->tables.at + at.appended;
    s->attending = s->tables.at + at.attending;
    s->pages = s->tables.at + at.pages;
    return FD_CUDA(g->cuda, MemcpyHtoDAsync, s->tables.at, s->host, at.bytes, s->stream);
}

fd_status_t fd_gpu_arm(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, fd_error_t *error) {
    gpu_slot_t *s = &g->slots[slot];
    fd_cuda_use(g->cuda);
    error->status = s->error.status = FD_OK;
    /* The tables of a step that this one replaces may still be on their way. */
    if (FD_CUDA(g->cuda, StreamSynchronize, s->stream) == FD_OK && upload(g, s, step, error) == FD_OK &&
        clear_counters(g, s, step, error) == FD_OK)
        copy_shared(g, s, step, error);
    return error->status;
}

/* ---- layers ---- */

static fd_status_t launch(const fd_gpu_work_t *g, gpu_slot_t *s, void *function, const uint32_t grid[3],
                          uint32_t threads, uint32_t shared_bytes, void **arguments, fd_error_t *error) {
    return FD_CUDA(g->cuda, LaunchKernel, function, grid[0], grid[1], grid[2], threads, 1, 1, shared_bytes, s->stream,
                   arguments, NULL);
}

/* What both kernels are told of a layer: where its chunks lie, and the pages of its section. */
typedef struct {
    fd_device_ptr_t chunks, table;
    uint32_t page_bytes, table_blocks;
} gpu_pages_t;

static gpu_pages_t pages_of(const fd_gpu_work_t *g, const gpu_slot_t *s, uint32_t layer) {
    const fd_kvcache_t *kv = g->w->kv;
    const uint32_t store = g->w->store_of[layer];
    const size_t section = (size_t)s->sequences * s->blocks * sizeof(uint32_t);
    return (gpu_pages_t){(fd_device_ptr_t)fd_kv_chunk(kv, store, 0, 0), s->pages + kv->stores[store].section * section,
                         (uint32_t)kv->planes.plane_bytes, s->blocks};
}

static fd_device_ptr_t rows_at(const fd_gpu_work_t *g, uint32_t slot, size_t offset) {
    return g->region_at + g->w->layout.slot0 + slot * g->w->layout.slot_bytes + offset;
}

static uint32_t elements(const fd_gpu_work_t *g, size_t row_bytes) {
    return (uint32_t)(row_bytes / fd_act_bytes(g->w->g.act_dtype));
}

/* Launches fd_append of append.cu. */
static fd_status_t append(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, uint32_t layer, fd_error_t *error) {
    gpu_slot_t *s = &g->slots[slot];
    const fd_heads_t *heads = &g->w->layers[layer].heads;
    gpu_pages_t p = pages_of(g, s, layer);
    fd_device_ptr_t kv = rows_at(g, slot, g->w->layout.kv);
    uint32_t kv_stride = elements(g, g->w->layout.kv_row_bytes);
    void *arguments[] = {&p.chunks, &p.table,      &s->appended,    &s->counts,
                         &kv,       &p.page_bytes, &p.table_blocks, &kv_stride};
    const uint32_t grid[3] = {step->n_rows, heads->n_kv_heads, 1};
    return launch(g, s, g->kernels[layer].append, grid, heads->head_size, 0, arguments, error);
}

/* A length as kernels take it: 0, no limit, for one that no sequence reaches. */
static uint32_t as_int(uint32_t tokens) { return tokens > INT32_MAX ? 0 : tokens; }

/* Launches fd_attend of attend.cu. */
static fd_status_t attend(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, uint32_t layer, fd_error_t *error) {
    gpu_slot_t *s = &g->slots[slot];
    const fd_work_t *w = g->w;
    const fd_layer_t *y = &w->layers[layer];
    const fd_gpu_kernels_t *kernels = &g->kernels[layer];
    const gpu_kind_t *kind = &s->kinds[w->kinds[layer]];
    const size_t per_head = (size_t)layer * w->g.n_q_heads * sizeof(float),
                 all_sinks = (size_t)w->g.n_layers * w->g.n_q_heads * sizeof(float);
    gpu_pages_t p = pages_of(g, s, layer);
    fd_device_ptr_t q = rows_at(g, slot, w->layout.q), o = rows_at(g, slot, w->layout.o);
    fd_device_ptr_t sinks = y->sinks ? g->per_head.at + per_head : 0,
                    slopes = y->slopes ? g->per_head.at + all_sinks + per_head : 0,
                    scratch = s->scratch.at + kind->scratch;
    /* The log-sum-exps of a part's rows stand behind the rows' O heads (region.h). */
    const size_t o_heads = (size_t)y->heads.n_q_heads * y->heads.v_size * fd_act_bytes(w->g.act_dtype);
    fd_device_ptr_t sums = is_part(g) ? o + o_heads : 0;
    uint32_t sums_stride = (uint32_t)(w->layout.o_row_bytes / sizeof(float));
    uint32_t q_stride = elements(g, w->layout.q_row_bytes), o_stride = elements(g, w->layout.o_row_bytes);
    uint32_t scale = fd_float_bits(w->softmax_scale), softcap = fd_float_bits(y->softcap);
    uint32_t window = as_int(y->window), segment = as_int(y->segment);
    void *arguments[] = {
        &p.chunks, &p.table, &s->attending, &s->counts,      &q,        &o,        &sums,        &sinks,
        &slopes,   &scratch, &p.page_bytes, &p.table_blocks, &q_stride, &o_stride, &sums_stride, &scale,
        &softcap,  &window,  &segment};
    const uint32_t grid[3] = {kind->splits, y->heads.n_kv_heads, step->n_attend_rows};
    return launch(g, s, kernels->attend, grid, 32 * kernels->warps, kernels->shared_bytes, arguments, error);
}

uint64_t fd_gpu_begin_layer(fd_gpu_work_t *g, uint32_t slot, const fd_step_t *step, uint32_t layer) {
    gpu_slot_t *s = &g->slots[slot];
    fd_cuda_use(g->cuda);
    if (fd_work_appends(g->w, layer)) append(g, slot, step, layer, &s->error);
    if (s->error.status == FD_OK && step->n_attend_rows) attend(g, slot, step, layer, &s->error);
    return s->kinds[g->w->kinds[layer]].kv_bytes;
}

fd_gpu_state_t fd_gpu_poll(fd_gpu_work_t *g, uint32_t slot, fd_error_t *error) {
    gpu_slot_t *s = &g->slots[slot];
    fd_cuda_use(g->cuda);
    *error = s->error;
    if (error->status != FD_OK) return FD_GPU_FAILED;
    const int code = g->cuda->StreamQuery(s->stream);
    if (code == FD_CUDA_NOT_READY) return FD_GPU_BUSY;
    if (fd_cuda_result(g->cuda, code, "a kernel", error) != FD_OK) return FD_GPU_FAILED;
    return FD_GPU_DONE;
}
