"""NVRTC, NVIDIA's run-time compiler, from its package. It needs no device."""

from __future__ import annotations

import ctypes
import site
import sys
from pathlib import Path

from fastdecode.spart.exchange_kernels import ROW_THREADS, SOURCE

INSTALL = "pip install nvidia-cuda-nvrtc-cu12"


def library() -> ctypes.CDLL | None:
    for folder in {*sys.path, *site.getsitepackages()}:
        for path in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


def cubin(architecture: str) -> bytes:
    """The kernels of the exchange for an architecture such as "sm_80". The compiler must have nothing to say."""
    compiler = library()
    assert compiler is not None
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"rows.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}".encode(), f"-DFD_ROW_THREADS={ROW_THREADS}".encode()]
    status = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    assert status == 0 and not log.value.strip(), log.value.decode()
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    assert compiler.nvrtcGetCUBIN(program, made) == 0
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw
