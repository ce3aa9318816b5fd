/* Modules and kernels. An image is what NVRTC makes for a GPU (cubin or PTX): the same source, compiled for the host
 * (cuda_on_host.h), then stands in for it. Or it is that host library itself. */
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_LIBRARIES = 16, MAX_MODULES = 64, MAX_FUNCTIONS = 64, EM_CUDA_ = 190, MOST_SHARED = 227 << 10 };

typedef void access_fn(const void *, size_t, bool, size_t);

typedef struct {
    char *image; /* NULL: a host library, all of whose kernels are in it */
    size_t bytes;
    const kernel_t *kernels; /* of a host library */
} module_t;

typedef struct {
    const kernel_t *kernel;
    atomic_bool loaded;
} function_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const kernel_t *libraries[MAX_LIBRARIES];
static module_t modules[MAX_MODULES];
static function_t functions[MAX_FUNCTIONS];
static unsigned n_libraries, n_modules, n_unloaded, n_functions;

static _Thread_local jmp_buf out_of_kernel;
static _Thread_local const char *running;

void sim_release_modules(void) {
    for (unsigned i = 0; i < n_modules; i++) free(modules[i].image);
    n_modules = n_unloaded = n_functions = 0; /* libraries stay */
}

void sim_count_modules(sim_counts_t *counts) { counts->modules = n_modules - n_unloaded; }

/* ---- running ---- */

/* Every access of a kernel comes here before it is made. */
static void check(const void *pointer, size_t bytes, bool write, size_t alignment) {
    if ((uintptr_t)pointer % alignment) {
        sim_fault(716, "%s: %p is not aligned to %zu", running, pointer, alignment);
    } else if (!sim_is_device(pointer, bytes, write)) {
        const char *hint = sim_is_pinned(pointer, bytes) ? ", which is a host pointer" : "";
        sim_fault(ILLEGAL_ADDRESS, "%s %s %p%s", running, write ? "writes to" : "reads", pointer, hint);
    } else {
        return;
    }
    longjmp(out_of_kernel, 1);
}

void sim_run_kernel(const op_t *op) {
    void *arguments[MAX_ARGUMENTS];
    for (unsigned i = 0; i < op->kernel->n_arguments; i++) arguments[i] = (void *)&op->arguments[i];
    running = op->kernel->name;
    if (!setjmp(out_of_kernel)) op->kernel->run(op->grid, op->block, op->shared_bytes, arguments);
}

/* ---- modules ---- */

static const kernel_t *open_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return NULL;
    access_fn **checker = dlsym(library, "kernel_access");
    if (checker) *checker = check;
    return checker ? dlsym(library, "kernels") : NULL;
}

/* For tests: a host library whose kernels stand in for those of GPU images. Returns 0, or -1. */
API int sim_add_kernels(const char *path) {
    const kernel_t *kernels = n_libraries < MAX_LIBRARIES ? open_library(path) : NULL;
    if (kernels) libraries[n_libraries++] = kernels;
    return kernels ? 0 : -1;
}

static size_t elf_bytes(const Elf64_Ehdr *e) { return e->e_shoff + (size_t)e->e_shentsize * e->e_shnum; }

API int cuModuleLoadData(module_t **module, const void *image) {
    ENTER(true);
    sim_wait_for_all();
    const Elf64_Ehdr *e = image;
    const bool elf = !memcmp(image, ELFMAG, SELFMAG);
    module_t made = {0};
    if (elf && e->e_machine == EM_X86_64) {
        char path[] = "/tmp/simulated-module-XXXXXX"; /* dlopen takes two files of the same name for one */
        const int fd = mkstemp(path);
        if (fd >= 0 && write(fd, image, elf_bytes(e)) == (ssize_t)elf_bytes(e)) made.kernels = open_library(path);
        if (fd >= 0) close(fd), unlink(path);
    } else if ((elf && e->e_machine == EM_CUDA_) || (!elf && strstr(image, ".entry"))) {
        made.bytes = elf ? elf_bytes(e) : strlen(image);
        made.image = malloc(made.bytes);
        if (made.image) memcpy(made.image, image, made.bytes);
    }
    if (!made.kernels && !made.image) return sim_fail(INVALID_IMAGE, "the image is no cubin, PTX or host library");
    pthread_mutex_lock(&lock);
    const bool room = n_modules < MAX_MODULES;
    if (room) *(*module = &modules[n_modules++]) = made;
    pthread_mutex_unlock(&lock);
    return room ? DONE : OUT_OF_MEMORY;
}

API int cuModuleLoadDataEx(module_t **module, const void *image, unsigned n, int *options, void **values) {
    (void)n, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

API int cuModuleUnload(module_t *module) {
    ENTER(true);
    (void)module; /* its functions may be part of graphs */
    n_unloaded++;
    sim_wait_for_all();
    return DONE;
}

static const kernel_t *by_name(const kernel_t *kernels, const char *name) {
    for (; kernels && kernels->name; kernels++)
        if (!strcmp(kernels->name, name)) return kernels;
    return NULL;
}

API int cuModuleGetFunction(function_t **function, module_t *module, const char *name) {
    ENTER(false);
    const kernel_t *kernel = by_name(module->kernels, name);
    if (module->image && memmem(module->image, module->bytes, name, strlen(name)))
        for (unsigned i = n_libraries; i-- && !kernel;) kernel = by_name(libraries[i], name);
    if (!kernel) return sim_fail(NOT_FOUND, "the module has no kernel %s, or none was compiled for the host", name);
    const char *loading = getenv("CUDA_MODULE_LOADING");
    pthread_mutex_lock(&lock);
    const bool room = n_functions < MAX_FUNCTIONS;
    if (room) {
        *function = &functions[n_functions++];
        (*function)->kernel = kernel;
        atomic_store(&(*function)->loaded, loading && !strcmp(loading, "EAGER"));
    }
    pthread_mutex_unlock(&lock);
    return room ? DONE : OUT_OF_MEMORY;
}

/* The first use of a lazily loaded kernel waits for all queues, and cannot be made in a capture. */
static int load(function_t *function) {
    if (atomic_load(&function->loaded)) return DONE;
    if (sim_invalidate_captures())
        return sim_fail(CAPTURE_UNSUPPORTED, "%s is loaded lazily, within a capture", function->kernel->name);
    sim_wait_for_all();
    atomic_store(&function->loaded, true);
    return DONE;
}

API int cuFuncLoad(function_t *function) {
    ENTER(false);
    return load(function);
}

API int cuLaunchKernel(function_t *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, stream_t *s, void **arguments,
                       void **extra) {
    ENTER(false);
    const kernel_t *k = function->kernel;
    op_t op = {.kind = OP_KERNEL, .kernel = k, .grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z}};
    op.shared_bytes = shared_bytes;
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535 || !threads || threads > 1024)
        return sim_fail(INVALID_VALUE, "%s: a grid of %u x %u x %u, %llu threads", k->name, grid_x, grid_y, grid_z,
                        (unsigned long long)threads);
    if (shared_bytes > MOST_SHARED)
        return sim_fail(INVALID_VALUE, "%s: %u bytes of shared memory, more than %u", k->name, shared_bytes,
                        MOST_SHARED);
    if (extra || !arguments) return sim_fail(NOT_SUPPORTED, "%s: the simulation has no packed arguments", k->name);
    for (unsigned i = 0; i < k->n_arguments; i++) {
        memcpy(&op.arguments[i], arguments[i], k->sizes[i]);
        const void *pointer = (void *)(uintptr_t)op.arguments[i];
        if (k->pointers[i] && pointer && !sim_is_device(pointer, 1, false))
            return sim_fail(INVALID_VALUE, "argument %u of %s is %p, which is no device pointer", i, k->name, pointer);
    }
    const int rc = load(function);
    return rc ? rc : sim_submit(s, op);
}
