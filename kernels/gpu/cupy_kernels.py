"""load_kernels: the kernels of .cu files, compiled and launched by CuPy. Only this module calls CuPy.

CuPy compiles by NVRTC for the device and keeps the result on disk. Its caller owns the streams and all memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_BASE = Path(__file__).with_name("base.cu")
#: CuPy unloads a module with the last of its functions.
_kept: list[Any] = []

#: Launches a kernel whose arguments are pointers, and then unsigned 32-bit numbers: (blocks in up to three dimensions,
#: threads of a block, a stream's handle, pointers, numbers).
Launch = Callable[[tuple[int, ...], int, int, Sequence[int], Sequence[int]], None]


class KernelError(Exception):
    """CuPy is missing, or has refused a source; the message is a sentence for the log."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device has for kernels."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # of a block, at most
    multiprocessor_shared_bytes: int
    free_bytes: int = 0  # of its memory


class _Stream:
    """A stream of another library, by the protocol that CuPy asks for."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def joined(sources: Sequence[Path]) -> str:
    """The text that is compiled for `sources`: base.cu, then they in their order."""
    return "".join(source.read_text() for source in (_BASE, *sources))


def load_kernels(
    sources: Sequence[Path], defines: Mapping[str, int], names: Sequence[str], device: int, shared_bytes: int = 0
) -> list[Launch]:
    """The functions `names` of sources, loaded on a CUDA device, so that their first launch waits for nothing. Each
    launch gets `shared_bytes` of dynamic shared memory. Raises KernelError."""
    functions = _load(sources, defines, names, device, shared_bytes)
    return [_launch(_cupy(), function, device, shared_bytes) for function in functions]


def load_functions(
    sources: Sequence[Path], defines: Mapping[str, int], names: Sequence[str], device: int, shared_bytes: int = 0
) -> list[int]:
    """The same as handles of the CUDA driver (CUfunction), which stay valid. Raises KernelError."""
    functions = _load(sources, defines, names, device, shared_bytes)
    _kept.extend(functions)
    return [int(function.kernel.ptr) for function in functions]


def _load(
    sources: Sequence[Path], defines: Mapping[str, int], names: Sequence[str], device: int, shared_bytes: int
) -> list[Any]:
    cupy = _cupy()
    options = tuple(f"-D{name}={value}" for name, value in defines.items())
    try:
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=joined(sources), options=options)
            functions = [module.get_function(name) for name in names]
            for function in functions:
                function.compile()
                if shared_bytes:
                    function.max_dynamic_shared_size_bytes = shared_bytes
    except Exception as error:  # CuPy raises errors of NVRTC, of the driver and of its own
        raise KernelError(f"CuPy cannot load {sources[-1].name}: {type(error).__name__}: {error}") from None
    return functions


def device_limits(device: int) -> DeviceLimits:
    """Raises KernelError."""
    cupy = _cupy()
    try:
        has, free = cupy.cuda.Device(device).attributes, cupy.cuda.Device(device).mem_info[0]
    except Exception as error:  # of the driver
        raise KernelError(f"CuPy cannot use device {device}: {type(error).__name__}: {error}") from None
    return DeviceLimits(
        capability=(has["ComputeCapabilityMajor"], has["ComputeCapabilityMinor"]),
        multiprocessors=has["MultiProcessorCount"],
        shared_bytes=has["MaxSharedMemoryPerBlockOptin"],
        multiprocessor_shared_bytes=has["MaxSharedMemoryPerMultiprocessor"],
        free_bytes=free,
    )


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise KernelError("CuPy is not installed: pip install 'fastdecode[cuda12]' or 'fastdecode[cuda13]'") from None
    return cupy


def _launch(cupy: Any, function: Any, device: int, shared_bytes: int) -> Launch:
    streams: dict[int, Any] = {}

    def launch(
        grid: tuple[int, ...], threads: int, stream: int, pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        if stream not in streams:
            streams[stream] = cupy.cuda.Stream.from_external(_Stream(stream))
        arguments = (*map(np.uint64, pointers), *map(np.uint32, numbers))
        with cupy.cuda.Device(device), streams[stream]:
            function(grid, (threads,), arguments, shared_mem=shared_bytes)

    return launch
