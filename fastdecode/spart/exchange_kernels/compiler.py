"""Compiles the kernels for a GPU by NVRTC, NVIDIA's run-time compiler, which CUDA builds of torch bring along."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class CompileError(Exception):
    """NVRTC is missing or has refused the source; the message is NVRTC's."""


def compile_kernels(architecture: str, source: Path, **definitions: int) -> bytes:
    """The kernels of a source as a cubin for an architecture such as "sm_89". `definitions` are numbers of the
    preprocessor. Raises CompileError."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CompileError("cuda-bindings is not installed: pip install 'fastdecode[cuda12]'") from None

    def call(name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(nvrtc, name)(*arguments)
        except RuntimeError as error:  # no library
            raise CompileError(str(error)) from None
        if int(code):
            raise CompileError(f"{name}: {code.name}{_log(nvrtc, program)}")
        return results[0] if results else None

    program: Any = None
    program = call("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), 0, [], [])
    defined = [f"-D{name}={number}" for name, number in definitions.items()]
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *defined)]
    call("nvrtcCompileProgram", program, len(options), options)
    cubin: bytes = b"\0" * call("nvrtcGetCUBINSize", program)
    call("nvrtcGetCUBIN", program, cubin)
    call("nvrtcDestroyProgram", program)
    return cubin


def _log(nvrtc: Any, program: Any) -> str:
    """The compiler's messages about a program, on lines of their own."""
    if program is None:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log: bytes = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    return "\n" + log.decode(errors="replace").rstrip("\0 ")
