"""load_kernels: the kernels of a .cu file, compiled and launched by CuPy. Only this module calls CuPy.

CuPy compiles by NVRTC for the device and keeps the result on disk. torch owns the streams and all memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Launches a kernel whose arguments are pointers, and then unsigned 32-bit numbers: (blocks, threads of a block, a
#: stream's handle, pointers, numbers).
Launch = Callable[[tuple[int, int], int, int, Sequence[int], Sequence[int]], None]


class KernelError(Exception):
    """CuPy is missing, or has refused a source; the message is a sentence for the log."""


class _Stream:
    """A stream of torch, by the protocol that CuPy asks for."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def load_kernels(source: Path, defines: Mapping[str, int], names: Sequence[str], device: int) -> list[Launch]:
    """The functions `names` of a source, loaded on a CUDA device, so that their first launch waits for nothing. Raises
    KernelError."""
    try:
        import cupy
    except ImportError:
        raise KernelError("CuPy is not installed: pip install 'fastdecode[cuda12]' or 'fastdecode[cuda13]'") from None
    options = tuple(f"-D{name}={value}" for name, value in defines.items())
    try:
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=source.read_text(), options=options)
            functions = [module.get_function(name) for name in names]
            for function in functions:
                function.compile()
    except Exception as error:  # CuPy raises errors of NVRTC, of the driver and of its own
        raise KernelError(f"CuPy cannot load {source.name}: {type(error).__name__}: {error}") from None
    return [_launch(cupy, function, device) for function in functions]


def _launch(cupy: Any, function: Any, device: int) -> Launch:
    streams: dict[int, Any] = {}

    def launch(
        grid: tuple[int, int], threads: int, stream: int, pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        if stream not in streams:
            streams[stream] = cupy.cuda.Stream.from_external(_Stream(stream))
        with cupy.cuda.Device(device), streams[stream]:
            function(grid, (threads,), (*map(np.uint64, pointers), *map(np.uint32, numbers)))

    return launch
