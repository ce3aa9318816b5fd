"""The CUDA kernels of the exchange on the host, where threads are loops (tests/c/kernels_on_host.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class _Kernel(ctypes.Structure):
    """kernel_t of kernels_on_host.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("n_arguments", ctypes.c_uint),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("pointers", ctypes.POINTER(ctypes.c_uint)),
        ("run", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
    )


class HostKernels:
    """The kernels of kernels.so (compiled.py), launched without a driver."""

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._kernels = {}
        table = ctypes.addressof(_Kernel.in_dll(self._library, "kernels"))
        while (kernel := _Kernel.from_address(table)).name:
            self._kernels[kernel.name.decode()] = kernel
            table += ctypes.sizeof(_Kernel)

    def launch(self, name: str, grid: Sequence[int], threads: int, *arguments: np.ndarray | int) -> None:
        """Run a kernel. An array stands for its address, a number for an unsigned int."""
        arrays = [x.ctypes.data for x in arguments if isinstance(x, np.ndarray)]
        assert all(isinstance(x, np.ndarray) for x in arguments[: len(arrays)])
        self.launch_at(name, grid, threads, arrays, [x for x in arguments if not isinstance(x, np.ndarray)])

    def launch_at(
        self, name: str, grid: Sequence[int], threads: int, pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Run a kernel whose arguments are addresses, and then unsigned ints."""
        values = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_uint, numbers)]
        kernel = self._kernels[name]
        assert kernel.n_arguments == len(values)
        assert [kernel.sizes[i] for i in range(len(values))] == [ctypes.sizeof(value) for value in values]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*(*part, 1, 1)[:3]) for part in (grid, (threads,))]
        kernel.run(*sizes, addresses)
