"""The kernels of an R-engine with a GPU, on the simulated driver: compiled for the host in place of CuPy.

The libraries are compiled before (layers_compiled.py). Without torch, as R-nodes are.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from fastdecode.kernels.gpu.page_kernels import BlockShape, PagedLayer, PageFunctions, definitions

SHAPE = BlockShape(warps=4, stages=3, at_once=8)
#: The layers of link_driver.SMALL with rows and pages of fp16.
SMALL_LAYER = PagedLayer("fp16", "fp16", 4, 2, 16, 1.0)


def library_of(layer: PagedLayer, folder: Path) -> Path:
    """The library with a layer's kernels."""
    return folder / f"attention-{'-'.join(map(str, definitions(layer, SHAPE).values()))}.so"


class DriverFunctions:
    """In place of PageFunctions.load."""

    def __init__(self, folder: Path):
        """The libraries are in `folder`, and the driver too if this process has not loaded it yet."""
        self._folder = folder
        driver = folder / "libcuda.so.1"
        self._driver = ctypes.CDLL(str(driver) if driver.exists() else driver.name)
        assert self._driver.cuInit(0) == 0
        self._context = ctypes.c_void_p()
        assert self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) == 0

    def load(self, layer: PagedLayer, device: int = 0) -> PageFunctions:
        assert self._driver.cuCtxSetCurrent(self._context) == 0
        module = ctypes.c_void_p()
        assert self._driver.cuModuleLoadData(ctypes.byref(module), library_of(layer, self._folder).read_bytes()) == 0
        return PageFunctions.of(
            layer, SHAPE, self._function(module, b"fd_append"), self._function(module, b"fd_attend")
        )

    def _function(self, module: ctypes.c_void_p, name: bytes) -> int:
        function = ctypes.c_void_p()
        assert self._driver.cuModuleGetFunction(ctypes.byref(function), module, name) == 0
        return function.value or 0
