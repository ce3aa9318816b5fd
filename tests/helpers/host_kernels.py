"""CUDA kernels compiled for the host, where threads are loops (tests/c/kernels_on_host.h)."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sources import ROOT

from fastdecode.spart.exchange_kernels import ROW_THREADS, SOURCE

_HEADER = ROOT / "tests" / "c" / "kernels_on_host.h"
_FLAGS = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fsanitize=thread", "-Wno-tsan", f"-DFD_ROW_THREADS={ROW_THREADS}"]
_KERNEL = re.compile(r"^FD_KERNEL (\w+)\(([^)]*)\)", re.MULTILINE)


class _Kernel(ctypes.Structure):
    """kernel_t of kernels_on_host.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("n_arguments", ctypes.c_uint),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("pointers", ctypes.POINTER(ctypes.c_uint)),
        ("run", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
    )


def kernel_names(source: Path = SOURCE) -> list[str]:
    return [name for name, _ in _KERNEL.findall(source.read_text())]


def build(library: Path, source: Path = SOURCE) -> Path:
    """Compile every kernel of `source` into `library`. Needs gcc."""
    lines, table = [f'#include "{_HEADER}"', f'#include "{source}"'], []
    for name, declared in _KERNEL.findall(source.read_text()):
        # "const uint4 *q" is an argument of type "const uint4 *"
        types = [re.sub(r"\w+$", "", part.strip()) for part in " ".join(declared.split()).split(",")]
        values = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(types))
        run = f"static void run_{name}(const unsigned grid[3], const unsigned block[3], void **a)"
        lines.append(f"NOT_CHECKED {run} {{ RUN({name}({values})); }}")
        lines.append(f"static const unsigned {name}_sizes[] = {{{', '.join(f'sizeof({kind})' for kind in types)}}};")
        lines.append(f"static const unsigned {name}_pointers[] = {{{', '.join(str(int('*' in t)) for t in types)}}};")
        table.append(f'{{"{name}", {len(types)}, {name}_sizes, {name}_pointers, run_{name}}},')
    lines.append(f"const kernel_t kernels[] = {{{' '.join(table)} {{0}}}};\n")
    text = library.with_suffix(".c")
    text.write_text("\n".join(lines))
    objects = library.with_suffix(".o")
    # Linked by itself: GCC would link ThreadSanitizer's own library.
    subprocess.run(["gcc", *_FLAGS, "-c", str(text), "-o", str(objects)], check=True, timeout=100)
    subprocess.run(["gcc", "-shared", str(objects), "-o", str(library)], check=True, timeout=100)
    return library


class HostKernels:
    """The kernels of a library that `build` made, launched without a driver."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._kernels = {}
        table = ctypes.addressof(_Kernel.in_dll(self._library, "kernels"))
        while (kernel := _Kernel.from_address(table)).name:
            self._kernels[kernel.name.decode()] = kernel
            table += ctypes.sizeof(_Kernel)

    def launch(self, name: str, grid: Sequence[int], threads: int, *arguments: np.ndarray | int) -> None:
        """Run a kernel. An array stands for its address, a number for an unsigned int."""
        values = [ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else ctypes.c_uint(x) for x in arguments]
        kernel = self._kernels[name]
        assert kernel.n_arguments == len(values)
        assert [kernel.sizes[i] for i in range(len(values))] == [ctypes.sizeof(value) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*(*part, 1, 1)[:3]) for part in (grid, (threads,))]
        kernel.run(*sizes, pointers)
