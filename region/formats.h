/* The number formats of a link: activations (Q, K, V and O rows) and the KV-cache.
 *
 * The two tables below are the only copy of these formats. The enums, the names that Python and the command line use,
 * and each ISA's tables of kernels follow from them. A format's number is its place in its table. It goes over the
 * wire, so a new format is added at the end.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FD_PAGE_TOKENS 128u /* tokens of a KV page */

/* X(suffix of its functions' names, enum constant, name, ...), with the further arguments of FD_ACT_FORMATS. */
#define FD_ACT_FORMATS(X, ...)                                                                                         \
    X(fp32, FD_ACT_FP32, "fp32", ##__VA_ARGS__)                                                                        \
    X(fp16, FD_ACT_FP16, "fp16", ##__VA_ARGS__)                                                                        \
    X(bf16, FD_ACT_BF16, "bf16", ##__VA_ARGS__)

/* X(suffix of its kernels' names, enum constant, name). kernels/attention/chunk.h describes each format. */
#define FD_KV_FORMATS(X)                                                                                               \
    X(fp32, FD_KV_FP32, "fp32")                                                                                        \
    X(fp16, FD_KV_FP16, "fp16")                                                                                        \
    X(bf16, FD_KV_BF16, "bf16")                                                                                        \
    X(int8, FD_KV_INT8, "int8")                                                                                        \
    X(int4, FD_KV_INT4, "int4")                                                                                        \
    X(int8_int4, FD_KV_INT8_INT4, "int8-int4") /* K is int8, V is int4 */

#define FD_FORMAT_CONSTANT(suffix, constant, name) constant,
#define FD_FORMAT_NAME(suffix, constant, name) name,

/* FD_ACT_DTYPES and FD_KV_DTYPES are the numbers of formats. */
typedef enum { FD_ACT_FORMATS(FD_FORMAT_CONSTANT) FD_ACT_DTYPES } fd_act_dtype_t;
typedef enum { FD_KV_FORMATS(FD_FORMAT_CONSTANT) FD_KV_DTYPES } fd_kv_dtype_t;

static const char *const fd_act_dtype_names[FD_ACT_DTYPES] = {FD_ACT_FORMATS(FD_FORMAT_NAME)};
static const char *const fd_kv_dtype_names[FD_KV_DTYPES] = {FD_KV_FORMATS(FD_FORMAT_NAME)};

/* Bytes of one element of an activation row. */
static inline size_t fd_act_bytes(uint32_t act_dtype) { return act_dtype == FD_ACT_FP32 ? 4 : 2; }
