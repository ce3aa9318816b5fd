"""The shared libraries that tests load: compiled from C, each once a session, or taken from $FASTDECODE_COMPILED.

An emulated machine needs minutes to compile them, so the machine that starts it compiles them all (`compile_all`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from session_folder import made_once

from fastdecode.kernels.gpu.cupy_kernels import joined
from fastdecode.spart import block_kernels, exchange_kernels
from sources.folders import ROOT

_SHARED = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread"]
_CXX = ["g++", "-std=c++17", "-fPIC", "-pthread", "-w", "-U_FORTIFY_SOURCE"]  # longjmp goes to other stacks
_KERNEL = re.compile(r"^FD_KERNEL(?:_OF\([^)]*\))?\s(\w+)\(([^)]*)\)", re.MULTILINE)


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
    compile_kernels(joined([source]), [definition], library)


def compile_kernels(source: str, definitions: Sequence[str], library: Path) -> None:
    """The CUDA kernels in the text of a source, compiled for the host (tests/c/cuda_on_host.h)."""
    key = hashlib.sha256("\0".join([source, *definitions]).encode()).hexdigest()
    shutil.copyfile(made_once(f"kernels/{key}.so", partial(_compile_kernels, source, definitions)), library)


def _compile_kernels(source: str, definitions: Sequence[str], library: Path) -> None:
    lines, table = [f'#include "{ROOT}/tests/c/cuda_on_host.h"', source], []
    for name, declared in _KERNEL.findall(source):
        # "const uint4 *q" is an argument of type "const uint4 *"
        types = [re.sub(r"\w+$", "", part.strip()) for part in " ".join(declared.split()).split(",")]
        values = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(types))
        lines.append(f"NOT_CHECKED static void call_{name}(void **a) {{ {name}({values}); }}")
        run = f"static void run_{name}(const unsigned grid[3], const unsigned block[3], unsigned shared, void **a)"
        lines.append(f"{run} {{ run_grid(call_{name}, grid, block, shared, a); }}")
        lines.append(f"static const unsigned {name}_sizes[] = {{{', '.join(f'sizeof({kind})' for kind in types)}}};")
        lines.append(f"static const unsigned {name}_pointers[] = {{{', '.join(str(int('*' in t)) for t in types)}}};")
        table.append(f'{{"{name}", {len(types)}, {name}_sizes, {name}_pointers, run_{name}}},')
    lines.append(f'extern "C" kernel_t kernels[] = {{{" ".join(table)} {{}}}};\n')
    text, objects = (library.with_suffix(ending) for ending in (".cpp", ".o"))
    text.write_text("\n".join(lines))
    machine = made_once("kernels/cuda_on_host.o", _machine)
    _run(*_CXX, "-O1", "-fsanitize=thread", *definitions, "-c", text, "-o", objects)
    # Linked by itself: GCC would link ThreadSanitizer's own library.
    _run("g++", "-shared", "-Wl,-Bsymbolic", objects, machine, "-lm", "-o", library)


def _machine(objects: Path) -> None:
    """The machine that runs the kernels' grids."""
    _run(*_CXX, "-O2", "-c", ROOT / "tests/c/cuda_on_host.cpp", "-o", objects)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "device.so": _device,
    "libcuda.so.1": _driver,
    "kernels.so": partial(_kernels, exchange_kernels.SOURCE, f"-DFD_ROW_THREADS={exchange_kernels.ROW_THREADS}"),
    "block_kernels.so": partial(_kernels, block_kernels.SOURCE, f"-DFD_BLOCK_THREADS={block_kernels.BLOCK_THREADS}"),
}


def compiled(name: str, folder: Path) -> Path:
    """The library, in `folder` if it has to be compiled. Skips the test if there is no compiler."""
    if before := os.environ.get("FASTDECODE_COMPILED"):
        return Path(before, name)
    if not shutil.which("g++"):
        pytest.skip("needs gcc and g++")
    shutil.copyfile(made_once(f"libraries/{name}", _BUILDERS[name]), folder / name)
    return folder / name


def compile_all(folder: Path) -> None:
    for name in _BUILDERS:
        compiled(name, folder)
