/* The device, the context, and the checks that every call begins with. */
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char bytes[16];
} uuid_t;

static bool initialized;
static int context; /* its address is the primary context's handle */
static _Thread_local void *current;
static atomic_int fault;
static char why[512];
static pthread_mutex_t why_lock = PTHREAD_MUTEX_INITIALIZER;
static int attributes[256];

static int say(int code, const char *format, va_list list) {
    pthread_mutex_lock(&why_lock);
    vsnprintf(why, sizeof why, format, list);
    pthread_mutex_unlock(&why_lock);
    return code;
}

int sim_fail(int code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(code, format, list);
    va_end(list);
    return code;
}

void sim_fault(int code, const char *format, ...) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&fault, &none, code)) return; /* the first one stays */
    va_list list;
    va_start(list, format);
    say(code, format, list);
    va_end(list);
}

bool sim_ended(void) { return atomic_load(&fault) != 0; }

int sim_enter(const char *call, bool unsafe) {
    if (!initialized) return sim_fail(NOT_INITIALIZED, "%s was called before cuInit", call);
    if (!current) return sim_fail(INVALID_CONTEXT, "%s: this thread has no current context", call);
    if (atomic_load(&fault)) return atomic_load(&fault);
    if (unsafe && sim_invalidate_captures())
        return sim_fail(CAPTURE_UNSUPPORTED, "%s was called while a stream is captured", call);
    return DONE;
}

/* ---- for tests ---- */

/* Why the last call was refused, or why the context has ended. */
API const char *sim_why(void) { return why; }

/* Gives up everything that exists and starts again: `queues` hardware queues (0: as CUDA_DEVICE_MAX_CONNECTIONS says,
 * else 8), and a random delay of at most `delay_us` before each operation. Threads keep their current contexts. */
API void sim_reset(unsigned queues, unsigned delay_us, uint64_t seed) {
    static const int defaults[][2] = {
        {16, 1},  /* MULTIPROCESSOR_COUNT */
        {19, 1},  /* CAN_MAP_HOST_MEMORY */
        {41, 1},  /* UNIFIED_ADDRESSING */
        {75, 8},  /* COMPUTE_CAPABILITY_MAJOR */
        {76, 0},  /* COMPUTE_CAPABILITY_MINOR */
        {99, 1},  /* HOST_REGISTER_SUPPORTED */
        {122, 1}, /* CAN_USE_64_BIT_STREAM_MEM_OPS */
        {123, 1}, /* CAN_USE_STREAM_WAIT_VALUE_NOR */
    };
    atomic_store(&fault, 999); /* CUDA_ERROR_UNKNOWN: lets every wait end */
    sim_stop_queues();
    sim_release_streams();
    sim_release_modules();
    sim_release_memory();
    atomic_store(&fault, 0);
    why[0] = 0;
    memset(attributes, 0, sizeof attributes);
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++) attributes[defaults[i][0]] = defaults[i][1];
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (!queues && connections) queues = (unsigned)atoi(connections);
    if (!queues) queues = 8;
    sim_start_queues(queues > MAX_QUEUES ? MAX_QUEUES : queues, delay_us, seed);
}

API void sim_set_attribute(int attribute, int value) { attributes[attribute] = value; }
API void sim_count(sim_counts_t *counts) {
    memset(counts, 0, sizeof *counts);
    sim_count_memory(counts);
    sim_count_streams(counts);
    sim_count_modules(counts);
}

API void sim_set_memory(size_t bytes) { sim_memory_limit = bytes; }

/* ---- device and context ---- */

API int cuInit(unsigned flags) {
    if (flags) return sim_fail(INVALID_VALUE, "cuInit takes no flags");
    if (!initialized) sim_reset(0, 0, 1);
    initialized = true;
    return DONE;
}

API int cuDriverGetVersion(int *version) {
    *version = 13000;
    return DONE;
}

API int cuDeviceGetCount(int *count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = 1;
    return DONE;
}

API int cuDeviceGet(int *device, int ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (ordinal) return sim_fail(INVALID_DEVICE, "there is one device");
    *device = 0;
    return DONE;
}

API int cuDeviceGetName(char *name, int bytes, int device) {
    if (!initialized || device) return initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    snprintf(name, (size_t)bytes, "simulated");
    return DONE;
}

API int cuDeviceGetUuid_v2(uuid_t *uuid, int device) {
    if (!initialized || device) return initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    memset(uuid, 0, sizeof *uuid);
    return DONE;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!initialized || device) return initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    *bytes = sim_memory_limit;
    return DONE;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (!initialized || device) return initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    if (attribute < 1 || attribute >= 256) return sim_fail(INVALID_VALUE, "there is no attribute %d", attribute);
    *value = attributes[attribute];
    return DONE;
}

API int cuDevicePrimaryCtxRetain(void **handle, int device) {
    if (!initialized || device) return initialized ? INVALID_DEVICE : NOT_INITIALIZED;
    *handle = &context;
    return DONE;
}

API int cuDevicePrimaryCtxRelease_v2(int device) { return device ? INVALID_DEVICE : DONE; }

API int cuCtxSetCurrent(void *handle) {
    if (!initialized) return NOT_INITIALIZED;
    if (handle && handle != &context) return sim_fail(INVALID_CONTEXT, "this is no context");
    current = handle;
    return DONE;
}

API int cuCtxGetCurrent(void **handle) {
    if (!initialized) return NOT_INITIALIZED;
    *handle = current;
    return DONE;
}

API int cuCtxGetDevice(int *device) {
    ENTER(false);
    *device = 0;
    return DONE;
}

API int cuCtxSynchronize(void) {
    ENTER(true);
    sim_wait_for_all();
    return sim_enter(__func__, false);
}

/* Internal interfaces of NVIDIA's own libraries: NVRTC asks for one where a driver is loaded, and does without. */
API int cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

API int cuGetErrorName(int code, const char **name) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "simulated error %d", code);
    *name = text;
    return DONE;
}

API int cuGetErrorString(int code, const char **sentence) {
    (void)code;
    *sentence = why;
    return DONE;
}

/* ---- how cuda-bindings find the calls ---- */

API int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    static const char *const newest_first[] = {"_v3", "_v2", ""};
    Dl_info here, there;
    dladdr((void *)cuInit, &here);
    void *self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *address = NULL;
    for (int i = 0; i < 3 && !*address; i++) {
        char full[128];
        snprintf(full, sizeof full, "%s%s", name, newest_first[i]);
        void *found = dlsym(self, full);
        if (found && dladdr(found, &there) && there.dli_fbase == here.dli_fbase) *address = found;
    }
    dlclose(self);
    if (status) *status = *address ? 0 : 1;
    return *address ? DONE : NOT_FOUND;
}

API int cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
