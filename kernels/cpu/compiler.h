/* What the kernels ask of a compiler: the architecture, the target of a file, inlining and unrolling. */
#pragma once

#if defined(__x86_64__)
#define FD_X86 1
#else
#define FD_X86 0
#endif
#if defined(__aarch64__)
#define FD_ARM64 1
#else
#define FD_ARM64 0
#endif

/* The functions between FD_BEGIN_TARGET(features) and FD_END_TARGET may use instructions beyond the ABI's baseline. */
#define FD_PRAGMA(...) _Pragma(#__VA_ARGS__)
#ifdef __clang__
#define FD_BEGIN_TARGET(features)                                                                                      \
    FD_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FD_END_TARGET FD_PRAGMA(clang attribute pop)
#else
#define FD_BEGIN_TARGET(features) FD_PRAGMA(GCC push_options) FD_PRAGMA(GCC target(features))
#define FD_END_TARGET FD_PRAGMA(GCC pop_options)
#endif
#define FD_AVX2 "avx2,fma,f16c"
#define FD_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"

/* FD_UNROLL precedes a loop whose trip count is constant after inlining: arrays of vectors become registers only if
 * the compiler unrolls the loop. FD_QUICK_BUILD leaves both to the compiler: the kernels compute the same, an order of
 * magnitude slower, and compile in a tenth of the time, which is most of a short run under sanitizers. */
#ifdef FD_QUICK_BUILD
#define FD_INLINE static inline
#define FD_UNROLL
#else
#define FD_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define FD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FD_UNROLL _Pragma("GCC unroll 8")
#endif
#endif

/* A function that runs once for a row or a head. Each file has one copy of it, because inlined copies would be many KB
 * of code that seldom runs. */
#define FD_SHARED static __attribute__((noinline, unused))

/* A function that bench/attention_kernels.py calls by ctypes; all others are hidden (-fvisibility=hidden). */
#define FD_EXPORT __attribute__((visibility("default")))
