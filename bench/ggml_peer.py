"""ggml's flash attention on the CPU, by way of the libraries in the llama-cpp-python package."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fastdecode.bench.shape import Data, Shape
from fastdecode.daemon.roofline import huge_pages

#: KV format -> name and number of the nearest ggml type.
_TYPES = {"fp32": ("f32", 0), "fp16": ("f16", 1), "bf16": ("bf16", 30), "int8": ("q8_0", 8), "int4": ("q4_0", 2)}
_TYPES["int8-int4"] = _TYPES["int8"]
_F32 = 0
_OVERHEAD = 1 << 20  # bytes in a context for tensor headers and the graph
_WORK = 1 << 26  # bytes; more than a graph's plan needs, committed by the OS as they are used


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def _library() -> ctypes.CDLL:
    """libggml-cpu, after libggml-base, on which it depends."""
    spec = find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    directory = Path(spec.origin).parent / "lib"
    base = ctypes.CDLL(str(next(directory.glob("libggml-base.so*"))), ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(next(directory.glob("libggml-cpu.so*"))))
    functions: tuple[tuple[Any, ...], ...] = (  # library, name, type of the result, types of the arguments
        (base, "ggml_init", c_void_p, _InitParams),
        (base, "ggml_free", None, c_void_p),
        (base, "ggml_new_tensor_4d", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
        (base, "ggml_get_data", c_void_p, c_void_p),
        (base, "ggml_nbytes", c_size_t, c_void_p),
        (base, "ggml_row_size", c_size_t, c_int, c_int64),
        (base, "ggml_quantize_chunk", c_size_t, c_int, POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, c_void_p),
        (base, "ggml_flash_attn_ext", c_void_p, *[c_void_p] * 5, c_float, c_float, c_float),
        (base, "ggml_new_graph", c_void_p, c_void_p),
        (base, "ggml_build_forward_expand", None, c_void_p, c_void_p),
        (lib, "ggml_cpu_init", None),
        (lib, "ggml_graph_compute_with_ctx", c_int, c_void_p, c_void_p, c_int),
    )
    for owner, name, result, *arguments in functions:
        function = getattr(owner, name)
        function.restype, function.argtypes = result, arguments
        setattr(lib, name, function)
    lib.ggml_cpu_init()
    return lib


class GgmlFlashAttention:
    """ggml_flash_attn_ext over K and V that are contiguous for each head: [sequences][heads][tokens][head_size]."""

    needs = "llama-cpp-python"

    @staticmethod
    def installed() -> bool:
        return find_spec("llama_cpp") is not None

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int):
        """Raises ValueError if a row is not a multiple of the format's blocks, MemoryError if ggml gets no memory."""
        self.format, self._type = _TYPES[kv_dtype]
        if self.format in ("q8_0", "q4_0") and shape.head_size % 32:
            raise ValueError(f"ggml's {self.format} needs head sizes that are multiples of 32")
        self._lib = lib = _library()
        self._shape, self._threads = shape, threads
        row = lib.ggml_row_size(self._type, shape.head_size)
        self.sequences = shape.sequences(2 * shape.kv_heads * row, kv_bytes)
        self.kv_bytes = self.sequences * shape.context * 2 * shape.kv_heads * row
        o_bytes = q_bytes = self.sequences * shape.q_heads * shape.head_size * 4
        size = self.kv_bytes + o_bytes + q_bytes + _OVERHEAD
        self._memory = huge_pages(size)
        self._held = (ctypes.c_char * size).from_buffer(self._memory)
        self._context = lib.ggml_init(_InitParams(size, ctypes.addressof(self._held), False))
        if not self._context:
            raise MemoryError(f"ggml cannot make a context of {size} bytes")
        data = Data.of(shape)
        k, v = self._cache(data.k), self._cache(data.v)
        q = lib.ggml_new_tensor_4d(self._context, _F32, shape.head_size, 1, shape.q_heads, self.sequences)
        self._floats(q)[:] = data.q
        self._o = lib.ggml_flash_attn_ext(self._context, q, k, v, None, shape.head_size**-0.5, 0.0, 0.0)
        self._graph = lib.ggml_new_graph(self._context)
        lib.ggml_build_forward_expand(self._graph, self._o)

    def _cache(self, x: np.ndarray) -> int:
        """A tensor that holds x [tokens, heads, head_size] once for each sequence."""
        lib, shape = self._lib, self._shape
        tensor: int = lib.ggml_new_tensor_4d(
            self._context, self._type, shape.head_size, shape.context, shape.kv_heads, self.sequences
        )
        one = np.ascontiguousarray(x.swapaxes(0, 1), np.float32)
        n_bytes = lib.ggml_nbytes(tensor) // self.sequences
        target = lib.ggml_get_data(tensor)
        if self.format == "f32":
            ctypes.memmove(target, one.ctypes.data, n_bytes)
        else:
            rows = shape.kv_heads * shape.context
            lib.ggml_quantize_chunk(
                self._type, one.ctypes.data_as(POINTER(c_float)), target, 0, rows, shape.head_size, None
            )
        for i in range(1, self.sequences):
            ctypes.memmove(target + i * n_bytes, target, n_bytes)
        return tensor

    def _floats(self, tensor: int) -> np.ndarray:
        """A view [sequences, q_heads, head_size] of an fp32 tensor with one token for each sequence."""
        shape = (self.sequences, self._shape.q_heads, self._shape.head_size)
        pointer = ctypes.cast(self._lib.ggml_get_data(tensor), POINTER(c_float))
        return np.ctypeslib.as_array(pointer, shape)

    def layer(self) -> float:
        # A new context for each layer, because a computation takes memory from it and never gives it back.
        work = self._lib.ggml_init(_InitParams(_WORK, None, False))
        start = perf_counter()
        status = self._lib.ggml_graph_compute_with_ctx(work, self._graph, self._threads)
        seconds = perf_counter() - start
        self._lib.ggml_free(work)
        if status:
            raise RuntimeError(f"ggml could not compute the graph: status {status}")
        return seconds

    def output(self) -> np.ndarray:
        return self._floats(self._o).copy()

    def close(self) -> None:
        self._lib.ggml_free(self._context)
        del self._held
        self._memory.close()
