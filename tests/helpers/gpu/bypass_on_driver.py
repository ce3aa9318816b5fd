"""Steps of the bypass (fastdecode.spart.exchange.bypass) on the simulated CUDA driver, and the same steps on the CPU;
prints whether their tokens are equal.

Arguments: the number of hardware queues, the number of links, a model directory, and then the numbers of engines that
exist at once, one number after another; $FASTDECODE_COMPILED has the driver. The result tells what is left of each.
The exchange, its driver module and cuda-bindings are the real ones. torch has no device here: its operations are
computed on the CPU, by host functions in the driver's streams and graphs. Steps with prompts are staged on the device
of lying_device.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdecode.spart import load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.stream_rows import Kernels
from fastdecode.transports._native import Proxy
from gpu.cuda_driver import SimulatedCuda, open_driver
from gpu.lying_device import NAME, LyingDevice, LyingStream, take_torchs_place
from gpu.lying_steps import with_links

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ARENA = 1 << 30
_LINE = 256


class DriverStream(LyingStream):
    """A stream of the CUDA driver, which torch's operations enter as host functions."""

    def __init__(self, device: DriverDevice):
        self._cuda, self._driver_stream = device.cuda, device.cuda.call("cuStreamCreate", 1)
        super().__init__(device, int(self._driver_stream))
        weakref.finalize(self, self._cuda.call, "cuStreamDestroy", self._driver_stream)
        self._functions: list[Any] = []  # they must live as long as the stream
        self.failed: list[BaseException] = []
        self.captured = 0

    def put(self, operation: Callable[[], Any]) -> None:
        def run(_: int | None) -> None:
            try:
                with torch.inference_mode():
                    operation()
            except BaseException as error:
                self.failed.append(error)

        self._functions.append(_HOST_FUNCTION(run))
        address = ctypes.cast(self._functions[-1], ctypes.c_void_p).value
        self._cuda.call("cuLaunchHostFunc", self._driver_stream, address, 0)

    def mark(self) -> int:
        return 0

    def run_to(self, mark: int) -> None:
        self._cuda.call("cuStreamSynchronize", self._driver_stream)

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results: list[Any] = []
        with self.current():
            graph = self._cuda.capture(self._driver_stream, lambda: results.append(work()))
        self.captured += 1
        return DriverGraph(self._device, graph), results[0]

    def check(self) -> None:
        if self.failed:
            raise self.failed[0]


class DriverGraph:
    """A graph, which goes back to the driver with this object, as one of torch does."""

    def __init__(self, device: Any, graph: Any):
        self._device, self._graph = device, graph
        weakref.finalize(self, device.cuda.call, "cuGraphExecDestroy", graph)

    def __call__(self) -> None:
        self._device.cuda.call("cuGraphLaunch", self._graph, self._device.stream._driver_stream)


class DriverDevice(LyingDevice):
    """A device whose memory is the driver's, and whose streams but the first are the driver's too."""

    def __init__(self, cuda: SimulatedCuda):
        super().__init__()
        self.cuda = cuda
        self._next = int(cuda.call("cuMemAlloc", _ARENA))
        self._end = self._next + _ARENA
        self._lock = threading.Lock()
        self._live: set[int] = set()  # addresses of the memory of tensors

    def allocate(self, meta: torch.Tensor) -> torch.Tensor:
        n_bytes = meta.untyped_storage().nbytes()
        with self._lock:
            at, self._next = self._next, self._next + -(-n_bytes // _LINE) * _LINE
        assert self._next <= self._end, "the device has no more memory"
        memory = (ctypes.c_uint8 * max(n_bytes, 1)).from_address(at)
        self._live.add(at)
        weakref.finalize(memory, self._live.discard, at)
        memory = np.frombuffer(memory, np.uint8)[:n_bytes]
        return torch.from_numpy(memory).view(meta.dtype).as_strided(meta.shape, meta.stride())

    def held(self) -> dict[str, int]:
        """What nobody has given back."""
        gc.collect()
        return self.cuda.counts() | {"tensors": len(self._live)}

    def make_stream(self) -> DriverStream:
        self.streams[0].synchronize()
        stream = DriverStream(self)
        self.streams.append(stream)
        return stream


def run_engines(kernels: Kernels, device: DriverDevice, model: Any, n_links: int, n: int) -> dict[str, Any]:
    """The tokens of `n` engines that have a bypass each at the same time, and what is left of these afterwards."""
    before = device.held()
    bypasses = [Bypass(kernels, device.make_stream, most_rows=32, proxy=Proxy()) for _ in range(n)]
    found: dict[str, Any] = {
        "tokens": [asyncio.run(with_links(model, n_links, bypass)) for bypass in bypasses],
        "captured": [stream.captured for stream in device.streams[1:] if stream.captured],
        "failed": [str(error) for stream in device.streams[1:] for error in stream.failed],
        "fault": [bypass.fault for bypass in bypasses],
    }
    for bypass in bypasses:
        bypass.close()
    del bypass, bypasses, device.streams[1:]  # which hold the streams' host functions
    return found | {"left": {name: n - before[name] for name, n in device.held().items() if n != before[name]}}


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    queues, n_links, directory, engines = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    want = asyncio.run(with_links(load_model(directory, dtype="fp32"), n_links))
    cuda = open_driver(Path())
    assert isinstance(cuda, SimulatedCuda)
    cuda.reset(queues, delay_us=20)
    cuda.use_here()
    with DriverDevice(cuda) as device:
        model = load_model(directory, device=NAME, dtype="fp32")
        kernels = cuda.kernels()  # which a process keeps
        found = [run_engines(kernels, device, model, n_links, int(n)) for n in engines]
    for one in found:
        one["equal"] = [tokens == want for tokens in one.pop("tokens")]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
