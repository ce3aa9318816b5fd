/* Detects the ISAs that this CPU and its OS support. An x86 vector extension counts only if xgetbv reports that the OS
 * saves its registers (Intel SDM vol. 1, 13.2 and 15.2).
 */
#include "isa.h"

#include <stdint.h>
#include <string.h>

#if FD_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    XCR0_AVX = 0x6,     /* xmm and ymm */
    XCR0_AVX512 = 0xe6, /* XCR0_AVX, opmask, upper halves of zmm0-15, zmm16-31 */
    XCR0_AMX = 0x60000  /* tile configuration and tiles */
};

/* Asks Linux for permission to use the tiles, 8 KiB of state for each thread (Documentation/arch/x86/xstate.rst). */
static int allow_tiles(void) {
#ifdef __linux__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static uint64_t xgetbv0(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static unsigned detect(void) {
    const unsigned avx2_1c = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    const unsigned avx512_7b = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    const unsigned amx_7d = 1u << 24 | 1u << 25 | 1u << 22; /* tile, int8, bf16; cpuid.h names them unevenly */
    const unsigned avxvnni_7_1a = 1u << 4;                  /* cpuid.h of older compilers lacks it */
    unsigned a, b, c, d, isas = 1u << FD_ISA_SCALAR;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & avx2_1c) != avx2_1c) return isas;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return isas;
    const uint64_t enabled = xgetbv0();
    if ((enabled & XCR0_AVX) != XCR0_AVX) return isas;
    isas |= 1u << FD_ISA_AVX2;
    unsigned a1 = 0, b1, c1, d1;
    if (a > 0) __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
    if (a1 & avxvnni_7_1a) isas |= 1u << FD_ISA_AVXVNNI;
    if ((b & avx512_7b) != avx512_7b || (enabled & XCR0_AVX512) != XCR0_AVX512) return isas;
    isas |= 1u << FD_ISA_AVX512;
    if (!(c & bit_AVX512VNNI)) return isas;
    isas |= 1u << FD_ISA_AVX512VNNI;
    if (a1 & bit_AVX512BF16) isas |= 1u << FD_ISA_AVX512BF16;
    if (c & bit_AVX512VBMI && (d & amx_7d) == amx_7d && (enabled & XCR0_AMX) == XCR0_AMX && allow_tiles())
        isas |= 1u << FD_ISA_AMX;
    return isas;
}
#elif FD_ARM64 /* Linux requires Advanced SIMD on 64-bit Arm */
static unsigned detect(void) { return 1u << FD_ISA_SCALAR | 1u << FD_ISA_NEON; }
#else
static unsigned detect(void) { return 1u << FD_ISA_SCALAR; }
#endif

/* The supported ISAs as a bit mask. The mask is cached because cpuid traps in a virtual machine; threads that race here
 * detect the same mask. */
static unsigned supported(void) {
    static unsigned cached;
    unsigned isas = __atomic_load_n(&cached, __ATOMIC_RELAXED);
    if (!isas) {
        isas = detect();
        __atomic_store_n(&cached, isas, __ATOMIC_RELAXED);
    }
    return isas;
}

int fd_by_amd(void) {
#if FD_X86
    static int cached; /* 1 if not by AMD, 2 if by AMD */
    int found = __atomic_load_n(&cached, __ATOMIC_RELAXED);
    if (!found) {
        unsigned a, b = 0, c = 0, d;
        found = 1 + (__get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx);
        __atomic_store_n(&cached, found, __ATOMIC_RELAXED);
    }
    return found - 1;
#else
    return 0;
#endif
}

int fd_isa_supported(fd_isa_t isa) { return (unsigned)isa < FD_ISAS && (supported() >> isa & 1u); }

fd_isa_t fd_isa_best(void) {
    unsigned isa = FD_ISAS - 1; /* fd_isa_t is in ascending order of preference */
    while (!fd_isa_supported((fd_isa_t)isa)) isa--;
    return (fd_isa_t)isa;
}

static const char *const names[FD_ISAS] = {
    [FD_ISA_SCALAR] = "scalar",
    [FD_ISA_AVX2] = "avx2",
    [FD_ISA_AVXVNNI] = "avxvnni",
    [FD_ISA_AVX512] = "avx512",
    [FD_ISA_AVX512VNNI] = "avx512vnni",
    [FD_ISA_AVX512BF16] = "avx512bf16",
    [FD_ISA_AMX] = "amx",
    [FD_ISA_NEON] = "neon",
};

const char *fd_isa_name(fd_isa_t isa) { return (unsigned)isa < FD_ISAS ? names[isa] : "unknown"; }

int fd_isa_from_name(const char *name, fd_isa_t *out) {
    for (unsigned i = 0; i < FD_ISAS; i++) {
        if (strcmp(name, names[i])) continue;
        *out = (fd_isa_t)i;
        return 0;
    }
    return -1;
}
