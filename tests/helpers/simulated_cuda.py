"""The simulated CUDA driver of tests/gpu/driver, and unmodified cuda-bindings over it.

cuda = SimulatedCuda.build(folder)   # once a process
cuda.reset(queues=1, delay_us=50)
stream = cuda.call("cuStreamCreate", 0)
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from compiled import compiled

from fastdecode.spart.exchange_kernels import ROW_THREADS

DEVICE_MAP = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class CudaError(Exception):
    """A call was refused: `code` is the CUresult, the text is the simulation's reason."""

    def __init__(self, call: str, code: int, why: str):
        super().__init__(f"{call}: error {code}: {why}")
        self.code = code


def missing() -> str | None:
    """What this machine lacks for the simulation, or None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install cuda-bindings"
    if Path("/dev/nvidiactl").exists():
        return "this machine has a driver of its own"
    return None


class SimulatedCuda:
    """The driver, loaded into this process for good, with a current context on the thread that made it."""

    _current: SimulatedCuda | None = None

    def __init__(self, folder: Path):
        self.image = compiled("kernels.so", folder)
        # cuda-bindings ask the loader for this name, and get the library that has it already.
        self._sim = ctypes.CDLL(str(compiled("libcuda.so.1", folder)))
        self._sim.sim_why.restype = ctypes.c_char_p
        self._sim.sim_reset.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64)
        self._sim.sim_set_memory.argtypes = (ctypes.c_size_t,)
        assert self._sim.sim_add_kernels(str(self.image).encode()) == 0
        from cuda.bindings import driver

        self.driver = driver
        self.call("cuInit", 0)
        self.use_here()

    @classmethod
    def build(cls, folder: Path) -> SimulatedCuda:
        """The process's driver; compiled in `folder` the first time."""
        cls._current = cls._current or cls(folder)
        return cls._current

    def reset(self, queues: int = 8, delay_us: int = 0, seed: int = 1) -> None:
        """Give up everything that exists. Each of the `queues` hardware queues delays operations at random."""
        self._sim.sim_reset(queues, delay_us, seed)

    def set_attribute(self, name: str, value: int) -> None:
        self._sim.sim_set_attribute(int(getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")), value)

    def set_memory(self, n_bytes: int) -> None:
        self._sim.sim_set_memory(n_bytes)

    def use_here(self) -> None:
        """Make the primary context current on this thread."""
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", 0)))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver through cuda-bindings. Raises CudaError."""
        code, *results = getattr(self.driver, name)(*arguments)
        if int(code):
            raise CudaError(name, int(code), (self._sim.sim_why() or b"").decode())
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

    def kernel(self, name: str) -> Any:
        image = self.image.read_bytes()
        return self.call("cuModuleGetFunction", self.call("cuModuleLoadData", image), name.encode())

    def launch(self, kernel: Any, grid: tuple[int, int], stream: Any, pointers: list[int], numbers: list[int]) -> None:
        """Launch a kernel whose arguments are pointers, and then unsigned numbers."""
        kinds = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_uint,) * len(numbers)
        packed = (tuple(pointers + numbers), kinds)
        self.call("cuLaunchKernel", kernel, *grid, 1, ROW_THREADS, 1, 1, 0, stream, packed, 0)

    def capture(self, stream: Any, work: Callable[[], None]) -> Any:
        """Capture what `work` submits to the stream. Returns the executable graph."""
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", stream, mode)
        work()
        return self.call("cuGraphInstantiate", self.call("cuStreamEndCapture", stream), 0)

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
