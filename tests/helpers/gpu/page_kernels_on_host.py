"""PageKernels over kernels that are compiled for the host (tests/c/cuda_on_host.h)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sources.compiled import compile_kernels

from fastdecode.kernels.gpu.cupy_kernels import Launch, joined
from fastdecode.kernels.gpu.page_kernels import (
    ATTENTION_SOURCES,
    PAGE_SOURCES,
    BlockShape,
    PageCopier,
    PagedLayer,
    PageKernels,
    definitions,
    shared_bytes,
)
from gpu.cuda_driver import Cuda
from gpu.functions_on_driver import SHAPE
from gpu.host_kernels import HostKernels


class HostPageKernels:
    """Compiles each set of definitions once, in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._libraries: dict[tuple[str, ...], HostKernels] = {}

    def library(
        self, sources: Sequence[Path], defines: Sequence[str], patch: tuple[str, str] | None = None
    ) -> HostKernels:
        """`patch` replaces a text, which the sources have once, by another."""
        key = (sources[-1].name, *defines, *(patch or ()))
        if key not in self._libraries:
            text = joined(sources)
            if patch is not None:
                assert text.count(patch[0]) == 1, patch[0]
                text = text.replace(*patch)
            path = self._folder / f"{sources[-1].stem}{len(self._libraries)}.so"
            compile_kernels(text, defines, path)
            self._libraries[key] = HostKernels(path)
        return self._libraries[key]

    def attention(
        self, layer: PagedLayer, shape: BlockShape = SHAPE, patch: tuple[str, str] | None = None
    ) -> HostKernels:
        defines = [f"-D{name}={value}" for name, value in definitions(layer, shape).items()]
        return self.library(ATTENTION_SOURCES, defines, patch)

    def page_kernels(
        self, layer: PagedLayer, shape: BlockShape = SHAPE, patch: tuple[str, str] | None = None
    ) -> PageKernels:
        attention, pages = self.attention(layer, shape, patch), self.library(PAGE_SOURCES, [])
        shared = shared_bytes(layer, shape)
        names: list[tuple[HostKernels, str, int]] = [
            (attention, "fd_append", shared),
            (attention, "fd_attend", shared),
            (pages, "fd_merge_answers", 0),
        ]
        return PageKernels(layer, shape, *(_launch(*name) for name in names))

    def copier(self) -> PageCopier:
        return PageCopier(_launch(self.library(PAGE_SOURCES, []), "fd_copy_pages", 0))


def _launch(kernels: HostKernels, name: str, shared: int) -> Launch:
    def launch(
        grid: tuple[int, ...], threads: int, stream: int, pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        kernels.launch_at(name, grid, threads, pointers, numbers, shared)

    return launch


def launch_on(cuda: Cuda, image: bytes, name: str, shared: int = 0) -> Launch:
    """Launches a kernel of an image on a driver; a block has `shared` bytes of shared memory."""
    kernel = cuda.kernel(name, image)
    if not cuda.simulated and shared:
        attribute = cuda.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cuda.call("cuFuncSetAttribute", kernel, attribute, shared)

    def launch(
        grid: tuple[int, ...], threads: int, stream: int, pointers: Sequence[int], numbers: Sequence[int]
    ) -> None:
        cuda.launch(kernel, grid, stream, pointers, numbers, threads, shared)

    return launch
