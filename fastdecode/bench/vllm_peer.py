"""vLLM's paged attention on the CPU, in a worker process that runs in vLLM's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode.bench import vllm_attention_worker
from fastdecode.bench.shape import Data, Shape
from fastdecode.bench.vllm_environment import vllm_python

#: KV format -> nearest format of vLLM's cache.
_FORMATS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "fp8", "int4": "fp8", "int8-int4": "fp8"}
#: Bytes of an element, by vLLM's format.
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class VllmPagedAttention:
    """vLLM's CPU attention over shuffled blocks of 128 tokens. One worker serves all instances, one after the other."""

    needs = "FASTDECODE_VLLM_PYTHON, the python of an environment with vLLM,"
    _worker: subprocess.Popen[str] | None = None

    @staticmethod
    def installed() -> bool:
        return vllm_python() is not None

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int):
        """Raises ValueError if vLLM does not support the shape or format, RuntimeError if the worker ends."""
        self.format = _FORMATS[kv_dtype]
        self._shape = shape
        self.sequences = shape.sequences(2 * shape.kv_heads * shape.head_size * _BYTES[self.format], kv_bytes)
        data = Data.of(shape)
        with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
            path = Path(folder, "data.npz")
            np.savez(path, q=data.q, k=data.k, v=data.v)
            numbers = {name: getattr(shape, name) for name in ("context", "group", "head_size", "kv_heads")}
            opened = self._ask(
                "open",
                **numbers,
                format=self.format,
                sequences=self.sequences,
                threads=threads,
                data=str(path),
            )
        self.kv_bytes = opened["kv_bytes"]

    @classmethod
    def _ask(cls, do: str, **arguments: object) -> dict[str, Any]:
        if cls._worker is None:
            python = vllm_python()
            assert python, f"{cls.__name__} needs {cls.needs}"
            argv = [python, "-P", vllm_attention_worker.__file__]
            env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            cls._worker = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert cls._worker.stdin and cls._worker.stdout
        print(json.dumps({"do": do, **arguments}), file=cls._worker.stdin, flush=True)
        if not (line := cls._worker.stdout.readline()):
            raise RuntimeError("vLLM's worker has ended; see its log above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"].splitlines()[0])
        return reply

    def layer(self) -> float:
        return float(self._ask("layer")["seconds"])

    def output(self) -> np.ndarray:
        with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
            path = Path(folder, "o.npy")
            self._ask("output", to=str(path))
            o: np.ndarray = np.load(path)
            return o

    def close(self) -> None:
        """Free the cache. The worker stays for the next shape and ends with this process."""
        self._ask("close")
