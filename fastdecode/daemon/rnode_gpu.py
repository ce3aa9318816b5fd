"""The GPU of an R-node (`--device cuda`): its kernels, and what it cannot hold. No torch in this process.

The R-engine drives the GPU itself (kernels/engine/gpu_work.h). Here CuPy compiles the kernels that it launches.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from fastdecode.daemon.option_values import ConfigError
from fastdecode.kernels.gpu.cupy_kernels import DeviceLimits, KernelError, device_limits
from fastdecode.kernels.gpu.page_kernels import PagedLayer, PageFunctions, unsupported
from fastdecode.spart.resident.layers import attention_layers
from fastdecode.transports.base import Hello, LinkRefused

#: The first link of a model waits so long for its kernels, less than an S-node waits for an R-node. CuPy keeps the
#: compiled ones on disk.
_COMPILE_SECONDS = 4.0


def open_gpu() -> RNodeGpu:
    """The first of the GPUs that CUDA_VISIBLE_DEVICES leaves. Raises ConfigError."""
    try:
        return RNodeGpu(0, device_limits(0))
    except KernelError as error:
        raise ConfigError(f"--device cuda: {error}") from None


class RNodeGpu:
    """A GPU that holds KV pages and attends."""

    def __init__(self, index: int, limits: DeviceLimits):
        self.index, self.limits = index, limits
        self.isa = "cuda sm_{}{}".format(*limits.capability)
        self._loaded: dict[PagedLayer, PageFunctions] = {}
        self._loading = threading.Lock()

    async def prepare(self, hello: Hello) -> None:
        """Compile the kernels for a link. Raises LinkRefused."""
        if fault := self.fault(hello):
            raise LinkRefused(f"the R-node's GPU cannot hold this model: {fault}")
        compiling = asyncio.get_running_loop().run_in_executor(None, self.kernels, hello)
        try:
            async with asyncio.timeout(_COMPILE_SECONDS):
                await asyncio.shield(compiling)
        except TimeoutError:
            compiling.add_done_callback(lambda future: future.exception())
            raise LinkRefused(
                "the R-node's GPU has no kernels for this model yet and compiles them: start again in a moment"
            ) from None

    def fault(self, hello: Hello) -> str | None:
        """Why the GPU cannot hold a model, for people; None if it can."""
        if any(hello.layers.selections):
            return "the GPU's attention kernels store no index keys (trained sparse attention)"
        if len(hello.layers.softcaps) not in (0, hello.geometry.n_layers):
            return "it has soft-caps for another number of layers"
        layers = dict.fromkeys(attention_layers(hello))
        return next(filter(None, (unsupported(layer, self.limits.capability) for layer in layers)), None)

    def kernels(self, hello: Hello) -> list[PageFunctions]:
        """The kernels of each layer, compiled where they have not been yet. Raises LinkRefused."""
        return [self._kernels_of(layer) for layer in attention_layers(hello)]

    def _kernels_of(self, layer: PagedLayer) -> PageFunctions:
        alike = replace(layer, softmax_scale=1.0, window=0, softcap=0.0, segment=0)  # these are arguments of a launch
        with self._loading:
            if alike not in self._loaded:
                try:
                    self._loaded[alike] = PageFunctions.load(alike, self.index)
                except (KernelError, ValueError) as error:
                    raise LinkRefused(f"the R-node's GPU has no kernels for this model: {error}") from None
            return self._loaded[alike]
