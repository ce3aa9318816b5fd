/* The instruction sets (ISAs) that kernels are compiled for, and which of them this machine has. */
#pragma once

#include "compiler.h"

/* In ascending order of preference. The numbers never leave the process. */
typedef enum {
    FD_ISA_SCALAR = 0,
    FD_ISA_AVX2 = 1,
    FD_ISA_AVXVNNI = 2,
    FD_ISA_AVX512 = 3,
    FD_ISA_AVX512VNNI = 4,
    FD_ISA_AVX512BF16 = 5,
    FD_ISA_AMX = 6,
    FD_ISA_NEON = 7,
    FD_ISAS
} fd_isa_t;

/* The best ISA that this CPU and OS support (x86: cpuid and xgetbv). */
fd_isa_t fd_isa_best(void);
int fd_isa_supported(fd_isa_t isa);
/* "scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "neon" */
const char *fd_isa_name(fd_isa_t isa);
FD_EXPORT int fd_isa_from_name(const char *name, fd_isa_t *out); /* 0 on success, -1 unknown */

/* Declares arrays of operations by dtype, `name`_<isa>: one for each width of vectors. */
#define FD_VECTOR_OPS(type, name) extern const type name##_avx2[], name##_avx512[], name##_neon[]
/* The operations for `dtype` of the array for `isa`, which is not FD_ISA_SCALAR. */
#if FD_X86
#define FD_VECTOR_OPS_OF(name, isa, dtype)                                                                             \
    ((isa) == FD_ISA_AVX2 || (isa) == FD_ISA_AVXVNNI ? &name##_avx2[dtype] : &name##_avx512[dtype])
#elif FD_ARM64
#define FD_VECTOR_OPS_OF(name, isa, dtype) (&name##_neon[dtype])
#else
#define FD_VECTOR_OPS_OF(name, isa, dtype) NULL
#endif

/* Whether the processor is by AMD. The answer is cached, because cpuid traps in a virtual machine. */
int fd_by_amd(void);
