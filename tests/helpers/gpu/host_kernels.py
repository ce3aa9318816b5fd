"""CUDA kernels on the host, where threads are fibers (tests/c/cuda_on_host.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class KernelFault(Exception):
    """A kernel that was compiled for the host cannot end, or has done what no GPU allows."""


class _Kernel(ctypes.Structure):
    """kernel_t of cuda_on_host.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("n_arguments", ctypes.c_uint),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("pointers", ctypes.POINTER(ctypes.c_uint)),
        ("run", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)),
    )


class Model(ctypes.Structure):
    """`model` of cuda_on_host.h."""

    _fields_ = (
        ("lazy", ctypes.c_int),
        ("backwards", ctypes.c_int),
        ("shared_reads", ctypes.c_uint64),
        ("conflicts", ctypes.c_uint64),
        ("copied", ctypes.c_uint64),
        ("fault", ctypes.c_char * 128),
    )


class HostKernels:
    """The kernels of a library that compiled.py has made, launched without a driver. `model` says how they run."""

    def __init__(self, library: Path):
        self.path = library
        self._library = ctypes.CDLL(str(library))
        self._kernels = {}
        self.model = Model.in_dll(self._library, "model")
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
        self,
        name: str,
        grid: Sequence[int],
        threads: int,
        pointers: Sequence[int],
        numbers: Sequence[int],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel whose arguments are addresses, and then unsigned ints. Raises KernelFault."""
        values = [*map(ctypes.c_void_p, pointers), *map(ctypes.c_uint, numbers)]
        kernel = self._kernels[name]
        assert kernel.n_arguments == len(values)
        assert [kernel.sizes[i] for i in range(len(values))] == [ctypes.sizeof(value) for value in values]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*(*part, 1, 1)[:3]) for part in (grid, (threads,))]
        self.model.fault = b""
        kernel.run(*sizes, shared_bytes, addresses)
        if self.model.fault:
            raise KernelFault(f"{name}: {self.model.fault.decode()}")
