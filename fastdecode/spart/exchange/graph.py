"""GraphStream: a CUDA stream of torch, and the graphs that are captured on it. Only this module of the
exchange calls torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphStream:
    """A stream of operations on a CUDA device, beside the stream on which torch computes otherwise, which has a lower
    priority. The graphs that are captured on it share their memory, so one of them runs at a time."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1)  # prompts take the processors that decode steps leave
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which has loaded the weights
        self._pool = torch.cuda.graph_pool_handle()
        self.handle: int = self._stream.cuda_stream  # for the driver

    def current(self) -> AbstractContextManager[object]:
        """Within it, torch's operations go into this stream."""
        return torch.cuda.stream(self._stream)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Record what `work` puts into the stream, without running it. Returns a function that runs the record in the
        current stream, and the result of `work`: tensors that hold their values after each run."""
        graph = torch.cuda.CUDAGraph()
        # Unlike torch.cuda.graph, this waits for no other stream. Other threads may call the driver meanwhile.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may have failed for the same reason
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, result

    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody has taken. Torch gives back what it keeps for later."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._stream.device)[0]

    def check(self) -> None:
        """Raise RuntimeError if an operation has failed."""
        self._stream.query()

    def synchronize(self) -> None:
        """Wait until all operations have run."""
        self._stream.synchronize()
