"""The C extensions; everything else is declared in pyproject.toml.

One set of flags builds every file for the ABI's baseline. A file of vector kernels is empty where the architecture is
another (FD_X86, FD_ARM64), and names what it needs beyond the baseline in a `#pragma GCC target(...)`. cpuid picks
among them at run time, so one wheel serves every machine of an architecture.
"""

import glob

from setuptools import Extension, setup

CFLAGS = ["-O3", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=fast"]
# Extensions inherit CPython's -fwrapv, with which the kernels are slower: a counter that may wrap around cannot become
# a pointer.
CFLAGS += ["-fstrict-overflow"]

setup(
    ext_modules=[
        Extension(
            "fastdecode.kernels._native",
            sources=sorted(glob.glob("kernels/*.c")),
            depends=sorted(glob.glob("kernels/*.h")),
            include_dirs=["kernels"],
            extra_compile_args=CFLAGS,
            extra_link_args=["-pthread"],
        ),
        Extension(
            "fastdecode.transports._native",
            sources=sorted(glob.glob("transports/*.c")),
            depends=[*sorted(glob.glob("transports/*.h")), "kernels/region.h", "kernels/doorbell.h"],
            include_dirs=["kernels", "transports"],
            extra_compile_args=CFLAGS,
            extra_link_args=["-pthread"],
        ),
    ]
)
