#include "gpu/cuda.h"

#include <dlfcn.h>
#include <stdlib.h>

fd_status_t fd_cuda_result(const fd_cuda_t *cuda, int code, const char *name, fd_error_t *error) {
    const char *text = NULL;
    if (!code) return FD_OK;
    cuda->GetErrorString(code, &text);
    return FD_FAIL(FD_INTERNAL, "%s: %s (error %d)", name, text ? text : "unknown error", code);
}

static fd_status_t find_calls(fd_cuda_t *cuda, fd_error_t *error) {
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda->library) return FD_FAIL(FD_INTERNAL, "there is no CUDA driver: %s", dlerror());
    const char *missing = NULL;
#define FIND(name, symbol, ...)                                                                                        \
    cuda->name = (int (*)(__VA_ARGS__))dlsym(cuda->library, symbol);                                                   \
    if (!cuda->name) missing = symbol;
    FD_CUDA_CALLS(FIND)
#undef FIND
    return missing ? FD_FAIL(FD_INTERNAL, "the CUDA driver is too old: it has no %s", missing) : FD_OK;
}

static fd_status_t open_device(fd_cuda_t *cuda, uint32_t device, fd_error_t *error) {
    if (find_calls(cuda, error) != FD_OK || FD_CUDA(cuda, Init, 0) != FD_OK ||
        FD_CUDA(cuda, DeviceGet, &cuda->device, (int)device) != FD_OK ||
        FD_CUDA(cuda, DevicePrimaryCtxRetain, &cuda->context, cuda->device) != FD_OK)
        return error->status;
    fd_cuda_use(cuda);
    return FD_CUDA(cuda, StreamCreate, &cuda->control, FD_CUDA_NON_BLOCKING);
}

fd_cuda_t *fd_cuda_open(uint32_t device, fd_error_t *error) {
    fd_cuda_t *cuda = calloc(1, sizeof *cuda);
    if (!cuda) return FD_FAIL(FD_INTERNAL, "no memory for the CUDA driver's functions"), NULL;
    if (open_device(cuda, device, error) == FD_OK) return cuda;
    fd_cuda_close(cuda);
    return NULL;
}

void fd_cuda_close(fd_cuda_t *cuda) {
    if (!cuda) return;
    if (cuda->control) {
        fd_cuda_use(cuda);
        cuda->StreamDestroy(cuda->control);
    }
    if (cuda->context) cuda->DevicePrimaryCtxRelease(cuda->device);
    free(cuda); /* the library stays loaded: CuPy may use it */
}
