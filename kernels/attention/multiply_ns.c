/* How fast a core executes the instructions that unpack K and V and multiply them (fd_multiply_ns). */
#include "dispatch.h"
#include "region/doorbell.h"
#include "roofline.h"

#if FD_X86
/* A mix is what a kernel does to one vector of words, or of a part of words: UNPACK once, then MULTIPLY for each query
 * row; and for the vectors of a loop together MORE(shifts, widens), which is what only some of the vectors or products
 * take: the upper half of a byte a shift, and 16-bit sums, after 8 products each, vpmaddwd and vpaddd. Its assembly has
 * ten sums, in registers 0 to 9, because a product takes five cycles and two can start in each. Register 14 is the
 * unpacked vector, 15 its words, 13 a row's multipliers, 12 is for what lies between, 11 holds ones. V is the kind of
 * register, ymm or zmm. */
#define M(mix, V, a) MULTIPLY_##mix(V, #a)
#define U(mix, V) UNPACK_##mix(V)
#define ROWS1(mix, V, a) U(mix, V) M(mix, V, a)
#define ROWS4(mix, V, a, b, c, d) U(mix, V) M(mix, V, a) M(mix, V, b) M(mix, V, c) M(mix, V, d)
#define ROWS8(mix, V, a, b, c, d, e, f, g, h)                                                                          \
    ROWS4(mix, V, a, b, c, d) M(mix, V, e) M(mix, V, f) M(mix, V, g) M(mix, V, h)

#define FD_CLOBBERED                                                                                                   \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",         \
        "xmm13", "xmm14", "xmm15"
/* The nanoseconds of one vector. A core that other machines share is slower for a while, so a caller who compares this
 * with a kernel's time measures both in turns, and this for about as long. */
#define FD_LOOP(vectors, assembly)                                                                                     \
    do {                                                                                                               \
        __asm__ volatile("vzeroall" ::: FD_CLOBBERED);                                                                 \
        const uint64_t start = fd_now_ns();                                                                            \
        for (uint64_t i = 0; i < rounds; i++) __asm__ volatile(assembly::"r"(words) : FD_CLOBBERED);                   \
        return (double)(fd_now_ns() - start) / (double)rounds / (vectors);                                             \
    } while (0)

#define FD_MIX(mix, V)                                                                                                 \
    __attribute__((target("avx2"))) static double ns_##mix(uint32_t rows, uint64_t rounds, const void *words) {        \
        if (rows == 1)                                                                                                 \
            FD_LOOP(40, ROWS1X10(mix, V) ROWS1X10(mix, V) ROWS1X10(mix, V) ROWS1X10(mix, V) MORE_##mix(V, 20, 5));     \
        if (rows == 4) FD_LOOP(10, ROWS4X5(mix, V) ROWS4X5(mix, V) MORE_##mix(V, 5, 5));                               \
        FD_LOOP(5, ROWS8(mix, V, 0, 1, 2, 3, 4, 5, 6, 7) ROWS8(mix, V, 8, 9, 0, 1, 2, 3, 4, 5)                         \
                       ROWS8(mix, V, 6, 7, 8, 9, 0, 1, 2, 3) ROWS8(mix, V, 4, 5, 6, 7, 8, 9, 0, 1)                     \
                           ROWS8(mix, V, 2, 3, 4, 5, 6, 7, 8, 9) MORE_##mix(V, 2, 5));                                 \
    }
#define ROWS1X10(mix, V)                                                                                               \
    ROWS1(mix, V, 0)                                                                                                   \
    ROWS1(mix, V, 1)                                                                                                   \
    ROWS1(mix, V, 2)                                                                                                   \
    ROWS1(mix, V, 3)                                                                                                   \
    ROWS1(mix, V, 4) ROWS1(mix, V, 5) ROWS1(mix, V, 6) ROWS1(mix, V, 7) ROWS1(mix, V, 8) ROWS1(mix, V, 9)
#define ROWS4X5(mix, V)                                                                                                \
    ROWS4(mix, V, 0, 1, 2, 3)                                                                                          \
    ROWS4(mix, V, 4, 5, 6, 7) ROWS4(mix, V, 8, 9, 0, 1) ROWS4(mix, V, 2, 3, 4, 5) ROWS4(mix, V, 6, 7, 8, 9)

#define FMA(V, n) "vfmadd231ps %%" V "13, %%" V "14, %%" V n "\n"
#define UNPACK_fp16_256(V) "vcvtph2ps (%0), %%" V "14\n"
#define MULTIPLY_fp16_256 FMA
#define UNPACK_fp16_512 UNPACK_fp16_256
#define MULTIPLY_fp16_512 FMA
#define UNPACK_bf16_256(V) "vpand %%" V "15, %%" V "11, %%" V "14\n" /* or a shift */
#define MULTIPLY_bf16_256 FMA
#define UNPACK_bf16_512 UNPACK_nibbles_512
#define MULTIPLY_bf16_512 FMA
#define UNPACK_none(V) ""
#define UNPACK_bf16_dp UNPACK_none
#define MULTIPLY_bf16_dp(V, n) "vdpbf16ps %%" V "13, %%" V "14, %%" V n "\n"
#define UNPACK_nibbles(V) "vpand %%" V "15, %%" V "11, %%" V "14\n" /* or a shift and a mask */
#define UNPACK_nibbles_512(V) "vpandd %%" V "15, %%" V "11, %%" V "14\n"

#define UNPACK_int8_256 UNPACK_none
#define MULTIPLY_int8_256(V, n)                                                                                        \
    "vpmaddubsw %%" V "13, %%" V "14, %%" V "12\nvpmaddwd %%" V "12, %%" V "11, %%" V "12\nvpaddd %%" V "12, %%" V n   \
    ", %%" V n "\n"
#define UNPACK_int4_256 UNPACK_nibbles
#define MULTIPLY_int4_256(V, n) "vpmaddubsw %%" V "13, %%" V "14, %%" V "12\nvpaddw %%" V "12, %%" V n ", %%" V n "\n"
#define UNPACK_int8_vnni256 UNPACK_none
#define MULTIPLY_int8_vnni256(V, n) "%{vex%} vpdpbusd %%" V "13, %%" V "14, %%" V n "\n"
#define UNPACK_int4_vnni256 UNPACK_nibbles
#define MULTIPLY_int4_vnni256 MULTIPLY_int8_vnni256
#define UNPACK_pairs_512 UNPACK_nibbles_512
#define MULTIPLY_pairs_512(V, n) "vpmaddwd %%" V "13, %%" V "14, %%" V "12\nvpaddd %%" V "12, %%" V n ", %%" V n "\n"
#define UNPACK_int8_vnni512 UNPACK_none
#define MULTIPLY_int8_vnni512(V, n) "vpdpbusd %%" V "13, %%" V "14, %%" V n "\n"
#define UNPACK_int4_vnni512 UNPACK_nibbles_512
#define MULTIPLY_int4_vnni512 MULTIPLY_int8_vnni512

#define NO_MORE(V, shifts, widens) ""
#define SHIFT(V) "vpsrlw $4, %%" V "15, %%" V "14\n"
#define SHIFTS_2(V) SHIFT(V) SHIFT(V)
#define SHIFTS_5(V) SHIFTS_2(V) SHIFTS_2(V) SHIFT(V)
#define SHIFTS_20(V) SHIFTS_5(V) SHIFTS_5(V) SHIFTS_5(V) SHIFTS_5(V)
#define WIDEN(V, n) "vpmaddwd %%" V n ", %%" V "11, %%" V "12\nvpaddd %%" V "12, %%" V n ", %%" V n "\n"
#define WIDENS_5(V) WIDEN(V, "0") WIDEN(V, "2") WIDEN(V, "4") WIDEN(V, "6") WIDEN(V, "8")
#define ONLY_SHIFTS(V, shifts, widens) SHIFTS_##shifts(V)
#define MORE_fp16_256 NO_MORE
#define MORE_bf16_256 NO_MORE
#define MORE_int8_256 NO_MORE
#define MORE_int4_256(V, shifts, widens) SHIFTS_##shifts(V) WIDENS_##widens(V)
#define MORE_int8_vnni256 NO_MORE
#define MORE_int4_vnni256 ONLY_SHIFTS
#define MORE_fp16_512 NO_MORE
#define MORE_bf16_512 NO_MORE
#define MORE_bf16_dp NO_MORE
#define MORE_pairs_512 NO_MORE
#define MORE_int8_vnni512 NO_MORE
#define MORE_int4_vnni512 ONLY_SHIFTS

FD_MIX(fp16_256, "ymm")
FD_MIX(bf16_256, "ymm")
FD_MIX(int8_256, "ymm")
FD_MIX(int4_256, "ymm")
FD_MIX(int8_vnni256, "ymm")
FD_MIX(int4_vnni256, "ymm")
FD_MIX(fp16_512, "zmm")
FD_MIX(bf16_512, "zmm")
FD_MIX(bf16_dp, "zmm")
FD_MIX(pairs_512, "zmm")
FD_MIX(int8_vnni512, "zmm")
FD_MIX(int4_vnni512, "zmm")

typedef double (*mix_fn)(uint32_t rows, uint64_t rounds, const void *words);
/* The mix of a kernel, and the bytes of KV of one of its vectors. */
typedef struct {
    mix_fn ns;
    uint32_t bytes;
} mix_t;

static mix_t mix_of(fd_isa_t isa, fd_kv_dtype_t dtype) {
    const int vnni = isa == FD_ISA_AVX512VNNI || isa == FD_ISA_AVX512BF16;
    if (isa == FD_ISA_AVX2 || isa == FD_ISA_AVXVNNI) {
        if (dtype == FD_KV_FP16) return (mix_t){ns_fp16_256, 16};
        if (dtype == FD_KV_BF16) return (mix_t){ns_bf16_256, 16};
        if (dtype == FD_KV_INT8) return (mix_t){isa == FD_ISA_AVX2 ? ns_int8_256 : ns_int8_vnni256, 32};
        if (dtype == FD_KV_INT4) return (mix_t){isa == FD_ISA_AVX2 ? ns_int4_256 : ns_int4_vnni256, 16};
    }
    if (isa == FD_ISA_AVX512 || vnni) {
        if (dtype == FD_KV_FP16) return (mix_t){ns_fp16_512, 32};
        if (dtype == FD_KV_BF16 && isa == FD_ISA_AVX512BF16) return (mix_t){ns_bf16_dp, 64};
        if (dtype == FD_KV_BF16) return (mix_t){ns_bf16_512, 32};
        if (dtype == FD_KV_INT8) return vnni ? (mix_t){ns_int8_vnni512, 64} : (mix_t){ns_pairs_512, 32};
        if (dtype == FD_KV_INT4) return vnni ? (mix_t){ns_int4_vnni512, 32} : (mix_t){ns_pairs_512, 16};
    }
    return (mix_t){NULL, 0};
}
#endif

double fd_multiply_ns(fd_isa_t isa, fd_kv_dtype_t dtype, uint32_t rows, uint64_t rounds) {
#if FD_X86
    const mix_t mix = mix_of(isa, dtype);
    static const uint8_t words[64];
    if (mix.ns && fd_isa_supported(isa) && (rows == 1 || rows == 4 || rows == 8))
        return mix.ns(rows, rounds, words) * 64 / mix.bytes;
#endif
    return -1;
}
