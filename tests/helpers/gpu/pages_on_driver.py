"""The kernels of resident KV on the device of bypass_on_driver.py, compiled for the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdecode.kernels.gpu.cupy_kernels import Launch
from fastdecode.kernels.gpu.page_kernels import PAGE_SOURCES, PageCopier, PagedLayer, PageKernels, shared_bytes
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from gpu.bypass_on_driver import DriverDevice
from gpu.page_kernels_on_host import SHAPE, HostPageKernels, launch_on


def kernels_on(device: DriverDevice, folder: Path) -> Callable[[PageArena], ResidentKernels]:
    """Makes the kernels of resident KV. In the device's first stream, which is not the driver's, a kernel runs in a
    stream of its own, and has ended when the next operation begins."""
    host, cuda = HostPageKernels(folder), device.cuda
    pages = host.library(PAGE_SOURCES, []).path.read_bytes()
    own = int(cuda.call("cuStreamCreate", 1))

    def launch_of(image: bytes, name: str, shared: int = 0) -> Launch:
        launch = launch_on(cuda, image, name, shared)

        def in_stream(grid: Any, threads: int, stream: int, pointers: Any, numbers: Any) -> None:
            if stream != device.streams[0].handle:
                launch(grid, threads, stream, pointers, numbers)
                return

            def at_once() -> None:
                cuda.use_here()
                launch(grid, threads, own, pointers, numbers)
                cuda.call("cuStreamSynchronize", own)

            device.stream.put(at_once)

        return in_stream

    def load(layer: PagedLayer) -> PageKernels:
        image, shared = host.attention(layer).path.read_bytes(), shared_bytes(layer, SHAPE)
        names = launch_of(image, "fd_append"), launch_of(image, "fd_attend", shared)
        return PageKernels(layer, SHAPE, *names, launch_of(pages, "fd_merge_answers"))

    def make(arena: PageArena) -> ResidentKernels:
        return ResidentKernels(arena, load, PageCopier(launch_of(pages, "fd_copy_pages")), lambda: device.stream.handle)

    return make
