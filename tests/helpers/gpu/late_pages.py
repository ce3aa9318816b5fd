"""The kernels of resident KV on a lying device, which run as late as they may: those of page_reference.py for fp32
pages, and for other formats those of kernels/gpu, compiled for the host."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from gpu.lying_device import LyingDevice
from gpu.lying_driver import host_address
from gpu.page_kernels_on_host import HostPageKernels
from gpu.page_reference import ReferencePageKernels


class Fp32Layer(PagedLayer):
    """A layer whose pages have K and V in fp32, which no GPU kernel reads."""

    @property
    def chunk_bytes(self) -> int:
        return 4 * 128 * self.head_size * 2

    @classmethod
    def like(cls, layer: PagedLayer) -> Fp32Layer:
        return cls(*(getattr(layer, name) for name in layer.__dataclass_fields__))


class Late:
    """Puts the calls of `kernels` into the streams that they name."""

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._kernels, name)
        if name in ("splits", "n_counters", "scratch_bytes"):
            return call

        def put(stream: int, *arguments: Any, **options: Any) -> None:
            assert LyingDevice.current is not None
            LyingDevice.current.streams[stream].put(lambda: call(stream, *arguments, **options))

        return put


@functools.cache
def on_host() -> HostPageKernels:
    return HostPageKernels(Path(tempfile.mkdtemp(prefix="fastdecode-page-kernels-")))


def late_kernels(arena: PageArena) -> ResidentKernels:
    def current() -> int:
        assert LyingDevice.current is not None
        return LyingDevice.current.stream.handle

    load: Callable[[PagedLayer], Any] = lambda layer: Late(on_host().page_kernels(layer))  # noqa: E731
    if arena.hello.kv_dtype == "fp32":
        load = lambda layer: Late(ReferencePageKernels(Fp32Layer.like(layer), host_address))  # noqa: E731
    copier: Any = Late(on_host().copier())
    return ResidentKernels(arena, load, copier, current)
