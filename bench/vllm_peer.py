"""vLLM's paged attention on the CPU, in a worker process that runs in vLLM's own environment."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastdecode.bench.attention_process import ProcessAttention
from fastdecode.bench.shape import Data, Shape
from fastdecode.bench.vllm_environment import QUIET, vllm_python

#: KV format -> nearest format of vLLM's cache.
_FORMATS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "fp8", "int4": "fp8", "int8-int4": "fp8"}
#: Bytes of an element, by vLLM's format.
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class VllmPagedAttention(ProcessAttention):
    """vLLM's CPU attention over shuffled blocks of 128 tokens."""

    needs = "FASTDECODE_VLLM_PYTHON, the python of an environment with vLLM,"
    python = staticmethod(vllm_python)
    _worker_name = "vllm_attention"
    _environment: ClassVar[dict[str, str]] = QUIET

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int):
        """Raises ValueError if vLLM does not support the shape or format, RuntimeError if the worker ends."""
        self.format = _FORMATS[kv_dtype]
        self.sequences = shape.sequences(2 * shape.kv_heads * shape.head_size * _BYTES[self.format], kv_bytes)
        data = Data.of(shape)
        with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
            path = Path(folder, "data.npz")
            np.savez(path, q=data.q, k=data.k, v=data.v)
            arguments = {"format": self.format, "sequences": self.sequences, "threads": threads, "data": str(path)}
            self.kv_bytes = self._open(shape, **arguments)["kv_bytes"]
