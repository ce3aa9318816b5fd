"""Our CUDA sources as CuPy compiles them, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fastdecode.kernels.gpu.cupy_kernels import joined

#: What CuPy adds to a RawModule's options.
_OPTIONS = ("-ftz=true", "-std=c++17", "--device-as-default-execution-space")


def compiled_by_cupy(architecture: str, sources: Sequence[Path], defines: Mapping[str, int]) -> bytes:
    """The cubin of sources for an architecture such as "sm_89". Skips the test without CuPy or NVRTC. RawModule itself
    asks the driver for the architecture, so this calls what it calls."""
    compiler = pytest.importorskip("cupy.cuda.compiler", reason="needs CuPy: pip install cupy-cuda12x")
    options = (f"-arch={architecture}", *(f"-D{name}={value}" for name, value in defines.items()), *_OPTIONS)
    try:
        program = compiler._NVRTCProgram(joined(sources), sources[-1].name, (), (), method="cubin")
    except Exception as error:
        pytest.skip(f"needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 ({error})")
    cubin: bytes = program.compile(options)[0]
    return cubin
