/* The functions of the CUDA driver that the R-engine calls. The library is loaded at run time, so that neither a build
 * nor an R-node on CPUs needs CUDA.
 *
 * A thread calls fd_cuda_use before it calls any other function: the driver keeps a current context for each thread. An
 * operation on a stream that goes wrong spoils the context, and every later call returns its error.
 */
#pragma once

#include <stddef.h>

#include "cache/error.h"

typedef uint64_t fd_device_ptr_t; /* CUdeviceptr */

enum { FD_CUDA_NOT_READY = 600, FD_CUDA_NON_BLOCKING = 1, FD_CUDA_PORTABLE_AND_MAPPED = 3 };

/* X(name without "cu", symbol, arguments). All return a CUresult, 0 for success. */
#define FD_CUDA_CALLS(X)                                                                                               \
    X(Init, "cuInit", unsigned flags)                                                                                  \
    X(DeviceGet, "cuDeviceGet", int *device, int ordinal)                                                              \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", void **context, int device)                                  \
    X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", int device)                                             \
    X(CtxSetCurrent, "cuCtxSetCurrent", void *context)                                                                 \
    X(GetErrorString, "cuGetErrorString", int code, const char **text)                                                 \
    X(MemAlloc, "cuMemAlloc_v2", fd_device_ptr_t *at, size_t bytes)                                                    \
    X(MemFree, "cuMemFree_v2", fd_device_ptr_t at)                                                                     \
    X(MemHostAlloc, "cuMemHostAlloc", void **memory, size_t bytes, unsigned flags)                                     \
    X(MemFreeHost, "cuMemFreeHost", void *memory)                                                                      \
    X(MemHostRegister, "cuMemHostRegister_v2", void *memory, size_t bytes, unsigned flags)                             \
    X(MemHostUnregister, "cuMemHostUnregister", void *memory)                                                          \
    X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", fd_device_ptr_t *at, void *memory, unsigned flags)      \
    X(MemcpyHtoD, "cuMemcpyHtoD_v2", fd_device_ptr_t to, const void *from, size_t bytes)                               \
    X(MemcpyDtoH, "cuMemcpyDtoH_v2", void *to, fd_device_ptr_t from, size_t bytes)                                     \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", fd_device_ptr_t to, const void *from, size_t bytes, void *stream)       \
    X(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", fd_device_ptr_t to, fd_device_ptr_t from, size_t bytes, void *stream)   \
    X(MemsetD8Async, "cuMemsetD8Async", fd_device_ptr_t at, uint8_t value, size_t bytes, void *stream)                 \
    X(StreamCreate, "cuStreamCreate", void **stream, unsigned flags)                                                   \
    X(StreamDestroy, "cuStreamDestroy_v2", void *stream)                                                               \
    X(StreamQuery, "cuStreamQuery", void *stream)                                                                      \
    X(StreamSynchronize, "cuStreamSynchronize", void *stream)                                                          \
    X(LaunchKernel, "cuLaunchKernel", void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,               \
      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,     \
      void **extra)

typedef struct {
#define FD_CUDA_POINTER(name, symbol, ...) int (*name)(__VA_ARGS__);
    FD_CUDA_CALLS(FD_CUDA_POINTER)
#undef FD_CUDA_POINTER
    void *library, *context;
    int device;
    void *control; /* a stream for copies of control operations */
} fd_cuda_t;

/* Opens the driver and retains the primary context of a device, which CuPy uses too. NULL without a driver or device.
 */
fd_cuda_t *fd_cuda_open(uint32_t device, fd_error_t *error);
void fd_cuda_close(fd_cuda_t *cuda);

static inline void fd_cuda_use(const fd_cuda_t *cuda) { cuda->CtxSetCurrent(cuda->context); }

/* FD_OK, or FD_INTERNAL with the driver's words for `code`. */
fd_status_t fd_cuda_result(const fd_cuda_t *cuda, int code, const char *name, fd_error_t *error);

/* Calls a function of the driver, e.g. FD_CUDA(cuda, MemAlloc, &at, bytes) where `error` is an fd_error_t pointer. */
#define FD_CUDA(cuda, name, ...) fd_cuda_result(cuda, (cuda)->name(__VA_ARGS__), "cu" #name, error)
