"""cuda-bindings over this machine's CUDA driver, or over the simulated one of tests/gpu/driver if it has none."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sources.compiled import compiled

from fastdecode.kernels.gpu.cupy_kernels import Launch
from fastdecode.spart.exchange.driver import Driver
from fastdecode.spart.exchange.stream_rows import Kernels
from fastdecode.spart.exchange_kernels import ROW_THREADS, SOURCE
from gpu.compiled_by_cupy import compiled_by_cupy

DEVICE_MAP = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class CudaError(Exception):
    """A call was refused: `code` is the CUresult, the text is the simulation's reason or the error's name."""

    def __init__(self, call: str, code: int, why: str):
        super().__init__(f"{call}: error {code}: {why}")
        self.code = code


def missing() -> str | None:
    """What this machine lacks for either driver, or None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install cuda-bindings"
    return None


def has_driver() -> bool:
    """Whether this machine has NVIDIA's driver."""
    return Path("/dev/nvidiactl").exists()


class Cuda:
    """The machine's driver, with its first device's primary context current on the thread that made this."""

    simulated = False
    image: bytes  # the kernels of the exchange
    product: Driver  # fastdecode's own, over the same driver

    def __init__(self) -> None:
        from cuda.bindings import driver

        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # as the bypass demands
        self.driver = driver
        self.call("cuInit", 0)
        self.use_here()
        self.product = Driver()
        self.image = self._compiled()

    def _compiled(self) -> bytes:
        major, minor = (self.product.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        return compiled_by_cupy(f"sm_{major}{minor}", [SOURCE], {"FD_ROW_THREADS": ROW_THREADS})

    def reset(self, queues: int = 8, delay_us: int = 0, seed: int = 1) -> None:
        """The simulation: give up everything that exists, and start `queues` hardware queues, each of which delays
        operations at random. Skips the test on a GPU, whose process has another number of queues."""
        if queues != int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")):
            pytest.skip(f"the number of queues is fixed; for this test set CUDA_DEVICE_MAX_CONNECTIONS={queues}")

    def why(self, code: Any) -> str:
        return str(code.name)

    def use_here(self) -> None:
        """Make the primary context current on this thread."""
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", 0)))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver through cuda-bindings. Raises CudaError."""
        code, *results = getattr(self.driver, name)(*arguments)
        if int(code):
            raise CudaError(name, int(code), self.why(code))
        return results[0] if len(results) == 1 else tuple(results) or None

    # -- what tests do again and again ----------------------------------------------------------------------------

    def register(self, memory: Any) -> int:
        """Register a writable buffer. Returns its device pointer."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self.call("cuMemHostRegister", address, len(memory), DEVICE_MAP)
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    def unregister(self, memory: Any) -> None:
        self.call("cuMemHostUnregister", np.frombuffer(memory, np.uint8).ctypes.data)

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Host memory of the driver's own, as bytes."""
        address = int(self.call("cuMemHostAlloc", n_bytes, 0))
        return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), np.uint8)

    def alloc(self, array: np.ndarray) -> int:
        """The device's own memory with the contents of `array`. Returns its device pointer."""
        pointer = self.call("cuMemAlloc", array.nbytes)
        self.call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        return int(pointer)

    def download(self, pointer: int, like: np.ndarray) -> np.ndarray:
        """The device's memory at `pointer`, in a copy that waits for all streams."""
        result = np.empty_like(like)
        self.call("cuMemcpyDtoH", result.ctypes.data, pointer, result.nbytes)
        return result

    def kernel(self, name: str, image: bytes | None = None) -> Any:
        """A kernel of an image, by default of the exchange's."""
        return self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image or self.image), name.encode())

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        stream: Any,
        pointers: Sequence[int],
        numbers: Sequence[int],
        threads: int = ROW_THREADS,
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel whose arguments are pointers, and then unsigned numbers."""
        kinds = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_uint,) * len(numbers)
        packed = ((*pointers, *numbers), kinds)
        blocks = (*grid, 1, 1)[:3]
        self.call("cuLaunchKernel", kernel, *blocks, threads, 1, 1, shared_bytes, stream, packed, 0)

    def kernels(self) -> Kernels:
        """The exchange's kernels, launched through cuda-bindings: CuPy runs on no simulated driver."""
        return Kernels(self.product, *(self._launches(name) for name in ("fd_pack_rows", "fd_unpack_rows")))

    def _launches(self, name: str) -> Launch:
        kernel = self.kernel(name)

        def launch(grid: tuple[int, int], threads: int, stream: int, pointers: Any, numbers: Any) -> None:
            assert threads == ROW_THREADS
            self.launch(kernel, grid, stream, [*pointers], [*numbers])

        return launch

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        """Capture what `work` submits to the stream. Returns the executable graph."""
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", stream, mode)
        work()
        graph = self.call("cuStreamEndCapture", stream)
        executable = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        return executable

    def is_done(self, stream: Any) -> bool:
        """Whether everything that was submitted to the stream has run."""
        try:
            self.call("cuStreamQuery", stream)
        except CudaError as error:
            if error.code != self.driver.CUresult.CUDA_ERROR_NOT_READY:
                raise
            return False
        return True

    def finish(self, stream: Any, seconds: float) -> bool:
        """Wait until everything has run; False after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.is_done(stream):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        return True


class SimulatedCuda(Cuda):
    """The simulated driver, loaded into this process for good. It is stricter than a GPU's; see sim.h."""

    simulated = True

    def __init__(self, folder: Path):
        self._kernels = compiled("kernels.so", folder)
        # cuda-bindings ask the loader for this name, and get the library that has it already.
        self._sim = ctypes.CDLL(str(compiled("libcuda.so.1", folder)))
        self._sim.sim_why.restype = ctypes.c_char_p
        self._sim.sim_reset.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64)
        self._sim.sim_set_memory.argtypes = (ctypes.c_size_t,)
        assert self._sim.sim_add_kernels(str(self._kernels).encode()) == 0
        super().__init__()

    def _compiled(self) -> bytes:
        return self._kernels.read_bytes()

    def reset(self, queues: int = 8, delay_us: int = 0, seed: int = 1) -> None:
        self._sim.sim_reset(queues, delay_us, seed)

    def why(self, code: Any) -> str:
        return (self._sim.sim_why() or b"").decode()

    def counts(self) -> dict[str, int]:
        """How many things of each kind nobody has given back; "graphs" counts executable ones too."""
        names = ("registered", "pinned", "allocated", "streams", "graphs", "modules")
        numbers = (ctypes.c_uint * len(names))()
        self._sim.sim_count(numbers)
        return dict(zip(names, numbers, strict=True))

    def set_attribute(self, name: str, value: int) -> None:
        """An attribute of the device, until `reset`; `name` is CU_DEVICE_ATTRIBUTE_... without that prefix."""
        self._sim.sim_set_attribute(int(getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")), value)

    def set_memory(self, n_bytes: int) -> None:
        """Bytes of the device's own memory, until `reset`."""
        self._sim.sim_set_memory(n_bytes)


@functools.cache
def open_driver(folder: Path) -> Cuda:
    """The process's driver; the simulated one is compiled in `folder`."""
    return Cuda() if has_driver() else SimulatedCuda(folder)
