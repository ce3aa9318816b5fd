"""Our CUDA sources as CuPy compiles them, for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.kernels.gpu.cupy_kernels import joined
from fastdecode.spart import block_kernels, exchange_kernels

_THREADS = (
    f"-DFD_ROW_THREADS={exchange_kernels.ROW_THREADS}",
    f"-DFD_BLOCK_THREADS={block_kernels.BLOCK_THREADS}",
)

#: What CuPy adds to a RawModule's options.
_OPTIONS = ("-ftz=true", "-std=c++17", "--device-as-default-execution-space")


def compiled_by_cupy(architecture: str, source: Path = exchange_kernels.SOURCE) -> bytes:
    """The cubin of a source for an architecture such as "sm_89". Skips the test without CuPy or NVRTC. RawModule itself
    asks the driver for the architecture, so this calls what it calls."""
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="needs CuPy: pip install cupy-cuda12x")
    options = (f"-arch={architecture}", *_THREADS, *_OPTIONS)
    try:
        program = compiler._NVRTCProgram(joined([source]), source.name, (), (), method="cubin")
    except Exception as error:
        pytest.skip(f"needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 ({error})")
    cubin: bytes = program.compile(options)[0]
    return cubin
