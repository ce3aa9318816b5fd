"""The shared libraries that tests load: compiled from C, or taken from $FASTDECODE_COMPILED.

An emulated machine needs minutes to compile them, so the machine that starts it compiles them all (`compile_all`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fastdecode.spart import block_kernels, exchange_kernels
from sources.folders import ROOT

_SHARED = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread"]
_KERNEL = re.compile(r"^FD_KERNEL (\w+)\(([^)]*)\)", re.MULTILINE)


def kernel_names(source: Path = exchange_kernels.SOURCE) -> list[str]:
    """The CUDA kernels of a source."""
    return [name for name, _ in _KERNEL.findall(source.read_text())]


def _device(library: Path) -> None:
    _run(*_SHARED, ROOT / "tests/c/device.c", "-o", library)


def _driver(library: Path) -> None:
    """The simulated CUDA driver."""
    options = ["-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    _run(*_SHARED, *options, *sorted((ROOT / "tests/gpu/driver").glob("*.c")), "-o", library)


def _kernels(source: Path, definition: str, library: Path) -> None:
    """The CUDA kernels of a source, compiled for the host (tests/c/kernels_on_host.h)."""
    lines, table = [f'#include "{ROOT}/tests/c/kernels_on_host.h"', f'#include "{source}"'], []
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
    text, objects = library.with_suffix(".c"), library.with_suffix(".o")
    text.write_text("\n".join(lines))
    # Linked by itself: GCC would link ThreadSanitizer's own library.
    options = ["-std=gnu11", "-O1", "-fPIC", "-fsanitize=thread", "-Wno-tsan", definition]
    _run("gcc", *options, "-c", text, "-o", objects)
    _run("gcc", "-shared", objects, "-lm", "-o", library)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=100)


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "device.so": _device,
    "libcuda.so.1": _driver,
    "kernels.so": partial(_kernels, exchange_kernels.SOURCE, f"-DFD_ROW_THREADS={exchange_kernels.ROW_THREADS}"),
    "block_kernels.so": partial(_kernels, block_kernels.SOURCE, f"-DFD_BLOCK_THREADS={block_kernels.BLOCK_THREADS}"),
}


def compiled(name: str, folder: Path) -> Path:
    """The library, compiled in `folder` if it has to be. Skips the test if there is no compiler."""
    if before := os.environ.get("FASTDECODE_COMPILED"):
        return Path(before, name)
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    _BUILDERS[name](folder / name)
    return folder / name


def compile_all(folder: Path) -> None:
    for name in _BUILDERS:
        compiled(name, folder)
