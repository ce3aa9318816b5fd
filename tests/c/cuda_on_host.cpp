/* The machine on which CUDA kernels run on the host; cuda_on_host.h says what it is. */
#include "cuda_on_host.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <vector>

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

model_t model;
void (*kernel_access)(const void *pointer, size_t bytes, bool write, size_t alignment);

namespace {

enum { STACK_BYTES = 64 << 10, MOST_SHARED = 227 << 10, MOST_THREADS = 1024, WARP = 32 };

typedef struct {
    unsigned char *to;
    const unsigned char *from;
    bool keep;
} copy_t;

typedef enum { AT_BLOCK, AT_WARP, AT_SHUFFLE, AT_TRANSPOSE, AT_PRODUCT, AT_READ } meeting_kind_t;

/* Threads that wait for each other. What they give each other stays until the meeting after the next one. */
struct meeting_t {
    unsigned need, came, turn;
    meeting_kind_t kind;
    struct {
        uint32_t words[6];
        const void *pointer;
    } given[2][WARP];
};

struct fiber_t {
    jmp_buf at;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
    unsigned number;
    bool begun, done;
    std::vector<copy_t> open;
    std::deque<std::vector<copy_t>> groups; /* committed, the oldest first */
};

/* A thread of the host that runs kernels. */
struct machine_t {
    std::vector<std::unique_ptr<fiber_t>> fibers;
    fiber_t *now;
    jmp_buf scheduler;
    dim3 grid, block, block_index, thread_index;
    meeting_t of_block, of_warp[MOST_THREADS / WARP];
    unsigned progress, shared_bytes;
    bool shared_is_filled, interrupted;
    void (*body)(void **arguments);
    void **arguments;
    const char *tls_start, *tls_end;
};
thread_local machine_t machine;
alignas(128) thread_local unsigned char shared_memory[MOST_SHARED];

} // namespace

dim3 block_index_now() { return machine.block_index; }
dim3 thread_index_now() {
    const unsigned number = machine.now->number, x = machine.block.x, y = machine.block.y;
    return dim3{number % x, number / x % y, number / x / y};
}
dim3 grid_size_now() { return machine.grid; }
dim3 block_size_now() { return machine.block; }
unsigned char *dynamic_shared() {
    if (!machine.shared_is_filled) memset(shared_memory, 0xff, machine.shared_bytes);
    machine.shared_is_filled = true;
    return shared_memory;
}

/* ---- fibers ---- */

namespace {

void yield() {
    if (!_setjmp(machine.now->at)) _longjmp(machine.scheduler, 1);
}

__attribute__((noreturn)) void end_run(const char *why) {
    snprintf(model.fault, sizeof model.fault, "%s", why);
    for (;;) yield();
}

void complete(meeting_t *m) {
    if (!m->came || m->came < m->need) return;
    m->came = 0, m->turn++, machine.progress++;
}

/* Waits until all threads of the meeting have come. Returns which of its `given` they have filled. */
unsigned meet(meeting_t *m, meeting_kind_t kind) {
    const unsigned turn = m->turn;
    if (!m->came) m->kind = kind;
    if (m->kind != kind) end_run("the lanes of a warp do different things");
    m->came++;
    complete(m);
    while (m->turn == turn) yield();
    return turn % 2;
}
meeting_t *my_warp() { return &machine.of_warp[machine.now->number / WARP]; }
unsigned my_lane() { return machine.now->number % WARP; }

void fiber_main() {
    for (;;) {
        machine.body(machine.arguments);
        machine.now->done = true, machine.progress++;
        machine.of_block.need--, complete(&machine.of_block);
        my_warp()->need--, complete(my_warp());
        yield();
    }
}

void resume(fiber_t *fiber) {
    machine.now = fiber;
    if (_setjmp(machine.scheduler)) return;
    if (fiber->begun) _longjmp(fiber->at, 1);
    fiber->begun = true;
    setcontext(&fiber->start);
}

void prepare(unsigned threads) {
    if (machine.interrupted) machine.fibers.clear(); /* a fault has left them somewhere within a kernel */
    while (machine.fibers.size() < threads) {
        std::unique_ptr<fiber_t> fiber(new fiber_t());
        fiber->number = (unsigned)machine.fibers.size(), fiber->stack.reset(new char[STACK_BYTES]);
        getcontext(&fiber->start);
        fiber->start.uc_stack.ss_sp = fiber->stack.get(), fiber->start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber->start, fiber_main, 0);
        machine.fibers.push_back(std::move(fiber));
    }
}

void run_block(unsigned threads) {
    machine.of_block = meeting_t(), machine.of_block.need = threads, machine.shared_is_filled = false;
    for (unsigned first = 0; first < threads; first += WARP) {
        meeting_t *m = &machine.of_warp[first / WARP];
        m->came = m->turn = 0, m->need = std::min<unsigned>(threads - first, WARP);
    }
    for (unsigned i = 0; i < threads; i++) machine.fibers[i]->done = false;
    for (unsigned left = threads; left && !*model.fault;) {
        const unsigned before = machine.progress;
        for (unsigned i = 0; i < threads && !*model.fault; i++) {
            fiber_t *fiber = machine.fibers[model.backwards ? threads - 1 - i : i].get();
            if (fiber->done) continue;
            resume(fiber);
            left -= fiber->done;
        }
        if (left && machine.progress == before && !*model.fault)
            snprintf(model.fault, sizeof model.fault, "%u threads wait for each other for ever", left);
    }
    for (unsigned i = 0; i < threads && !*model.fault; i++) {
        for (const auto &group : machine.fibers[i]->groups)
            if (!group.empty()) snprintf(model.fault, sizeof model.fault, "a copy was never waited for");
        machine.fibers[i]->groups.clear();
    }
}

int find_tls(dl_phdr_info *info, size_t, void *) {
    const char *inside = (const char *)&machine;
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const char *start = (const char *)info->dlpi_tls_data, *end = start + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type != PT_TLS || inside < start || inside >= end) continue;
        machine.tls_start = start, machine.tls_end = end;
        return 1;
    }
    return 0;
}

} // namespace

void run_grid(void (*body)(void **), const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
              void **arguments) {
    const unsigned threads = block[0] * block[1] * block[2];
    if (threads > MOST_THREADS || shared_bytes > MOST_SHARED)
        snprintf(model.fault, sizeof model.fault, "a block of %u threads has %u bytes of shared memory", threads,
                 shared_bytes);
    if (!machine.tls_start) dl_iterate_phdr(find_tls, NULL);
    prepare(threads);
    machine.grid = dim3{grid[0], grid[1], grid[2]}, machine.block = dim3{block[0], block[1], block[2]};
    machine.body = body, machine.arguments = arguments, machine.shared_bytes = shared_bytes;
    machine.interrupted = true;
    dim3 &at = machine.block_index;
    for (at.z = grid[2]; at.z-- && !*model.fault;)
        for (at.y = grid[1]; at.y-- && !*model.fault;)
            for (at.x = grid[0]; at.x-- && !*model.fault;) run_block(threads);
    machine.interrupted = *model.fault;
    if (*model.fault && kernel_access) fprintf(stderr, "a kernel: %s\n", model.fault); /* nobody else reads it */
}

/* ---- accesses ---- */

/* Shared memory and the thread's own variables are not the device's memory. */
static void check_access(const void *pointer, size_t bytes, bool write, size_t alignment) {
    const char *at = (const char *)pointer, *stack = machine.now->stack.get();
    if (at >= stack && at < stack + STACK_BYTES) return;
    if (at >= (char *)shared_memory && at < (char *)shared_memory + MOST_SHARED) {
        if (at + bytes > (char *)shared_memory + machine.shared_bytes) end_run("an access is beyond the shared memory");
        return;
    }
    if (at >= machine.tls_start && at < machine.tls_end) return;
    if (kernel_access) kernel_access(pointer, bytes, write, alignment);
}

#define ACCESSES(n)                                                                                                    \
    void __tsan_read##n(void *p) { check_access(p, n, false, n); }                                                     \
    void __tsan_write##n(void *p) { check_access(p, n, true, n); }                                                     \
    void __tsan_unaligned_read##n(void *p) { check_access(p, n, false, 1); }                                           \
    void __tsan_unaligned_write##n(void *p) { check_access(p, n, true, 1); }                                           \
    void __tsan_volatile_read##n(void *p) { check_access(p, n, false, n); }                                            \
    void __tsan_volatile_write##n(void *p) { check_access(p, n, true, n); }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *p, size_t n) { check_access(p, n, false, 1); }
void __tsan_write_range(void *p, size_t n) { check_access(p, n, true, 1); }
void __tsan_func_entry(void *p) { (void)p; }
void __tsan_func_exit(void *p) { (void)p; }
void __tsan_init(void) {}
}

/* ---- what CUDA C has beyond C++ ---- */

void __syncthreads() { meet(&machine.of_block, AT_BLOCK); }
void __syncwarp() { meet(my_warp(), AT_WARP); }

/* ---- what base.cu and lanes.cu have in PTX ---- */

float fd_from_half(unsigned short half) {
    const unsigned exponent = half >> 10 & 31, fraction = half & 1023u;
    const float size = exponent == 31  ? bits_as<float>(0x7f800000u | fraction << 13)
                       : exponent == 0 ? ldexpf((float)fraction, -24)
                                       : bits_as<float>((exponent + 112) << 23 | fraction << 13);
    return half >> 15 ? -size : size;
}
/* Rounds to the nearest, ties to even. */
unsigned short fd_to_half(float x) {
    const unsigned sign = bits_as<unsigned>(x) >> 16 & 0x8000u, bits = bits_as<unsigned>(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fff;
    if (bits >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u); /* 65520 and more */
    if (bits < 0x38800000u) return (unsigned short)(sign | (unsigned)nearbyintf(ldexpf(fabsf(x), 24)));
    return (unsigned short)(sign | ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10));
}

static void perform(const copy_t &copy) {
    if (copy.keep) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
}
/* cp.async copies the 16 bytes as one access. */
void fd_copy16(unsigned char *to, const unsigned char *from, bool keep) {
    if (keep) check_access(from, 16, false, 16);
    check_access(to, 16, true, 16);
    model.copied += keep ? 16 : 0;
    const copy_t copy = {to, from, keep};
    if (model.lazy) machine.now->open.push_back(copy);
    else perform(copy);
}
void fd_commit() { machine.now->groups.push_back(std::move(machine.now->open)), machine.now->open.clear(); }
void wait_for_groups(size_t but) {
    auto &groups = machine.now->groups;
    for (; groups.size() > but; groups.pop_front())
        for (const copy_t &copy : groups.front()) perform(copy);
}

/* The turns beyond one in which 8 neighbouring lanes read 16 bytes each from the 32 banks of shared memory. */
static unsigned conflicts_of(const meeting_t *m, unsigned slot, unsigned first) {
    unsigned most = 0;
    for (unsigned bank = 0; bank < 8; bank++) {
        uintptr_t seen[8];
        unsigned n = 0;
        for (unsigned i = first; i < first + 8; i++) {
            const uintptr_t at = (uintptr_t)m->given[slot][i].pointer / 16;
            if (at % 8 == bank && std::find(seen, seen + n, at) == seen + n) seen[n++] = at;
        }
        most = std::max(most, n);
    }
    return most - 1;
}
uint4 fd_read16(const unsigned char *shared) {
    check_access(shared, 16, false, 16);
    uint4 x;
    memcpy(&x, shared, sizeof x); /* before the other lanes come: no barrier may be missing */
    meeting_t *m = my_warp();
    m->given[m->turn % 2][my_lane()].pointer = shared;
    const unsigned slot = meet(m, AT_READ);
    if (my_lane() % 8 == 0) model.shared_reads++, model.conflicts += conflicts_of(m, slot, my_lane());
    return x;
}

unsigned fd_permute(unsigned a, unsigned b, unsigned bytes) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned to = 0;
    for (int i = 0; i < 4; i++) to |= (unsigned)(both >> (bytes >> 4 * i & 7) * 8 & 255) << 8 * i;
    return to;
}
unsigned fd_half_pair(float low, float high) { return (unsigned)fd_to_half(high) << 16 | fd_to_half(low); }
unsigned fd_minus_1152(unsigned pair) {
    return fd_half_pair(fd_from_half((unsigned short)pair) - 1152, fd_from_half((unsigned short)(pair >> 16)) - 1152);
}

float fd_shuffle_xor(float x, int mask) {
    meeting_t *m = my_warp();
    m->given[m->turn % 2][my_lane()].words[0] = bits_as<uint32_t>(x);
    const unsigned slot = meet(m, AT_SHUFFLE);
    return bits_as<float>(m->given[slot][my_lane() ^ (unsigned)mask].words[0]);
}
/* Lane i gets row i / 4, columns 2 * (i % 4) and the next, of the transposed matrix. */
unsigned fd_transposed(unsigned tile) {
    meeting_t *m = my_warp();
    const unsigned lane = my_lane();
    m->given[m->turn % 2][lane].words[0] = tile;
    const unsigned slot = meet(m, AT_TRANSPOSE), column = lane / 4;
    unsigned to = 0;
    for (unsigned j = 0; j < 2; j++) {
        const unsigned row = 2 * (lane % 4) + j;
        to |= (m->given[slot][row * 4 + column / 2].words[0] >> 16 * (column % 2) & 0xffffu) << 16 * j;
    }
    return to;
}

/* mma.m16n8k16: `widen` makes a float of 16 bits. */
template <class Widen> static void multiply_tiles(float *d, const unsigned *a, const unsigned *b, Widen widen) {
    meeting_t *m = my_warp();
    const unsigned lane = my_lane();
    memcpy(m->given[m->turn % 2][lane].words, a, 16), memcpy(m->given[m->turn % 2][lane].words + 4, b, 8);
    const auto *given = m->given[meet(m, AT_PRODUCT)];
    for (unsigned j = 0; j < 4; j++) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + j % 2;
        float sum = 0;
        for (unsigned k = 0; k < 16; k++) {
            const unsigned of_a = given[row * 4 + k % 8 / 2].words[j / 2 + k / 8 * 2];
            const unsigned of_b = given[column * 4 + k % 8 / 2].words[4 + k / 8];
            sum += widen((unsigned short)(of_a >> 16 * (k % 2))) * widen((unsigned short)(of_b >> 16 * (k % 2)));
        }
        d[j] += sum;
    }
}
void fd_multiply_fp16(float *d, const unsigned *a, const unsigned *b) { multiply_tiles(d, a, b, fd_from_half); }
void fd_multiply_bf16(float *d, const unsigned *a, const unsigned *b) {
    multiply_tiles(d, a, b, [](unsigned short x) { return bits_as<float>((unsigned)x << 16); });
}
