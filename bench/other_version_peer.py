"""The R-engine of another version of fastdecode, in a worker process that runs in that version's environment."""

from __future__ import annotations

import os

from fastdecode.bench.attention_process import ProcessAttention
from fastdecode.bench.shape import Shape


class OtherVersionAttention(ProcessAttention):
    """The other version's R-engine, with its own layout of the same KV format. It uses the best instruction set, or
    that of FASTDECODE_ISA."""

    needs = "FASTDECODE_OTHER_PYTHON, the python of an environment with another version of fastdecode,"
    _worker_name = "other_version"

    @staticmethod
    def python() -> str | None:
        return os.environ.get("FASTDECODE_OTHER_PYTHON")

    def __init__(self, shape: Shape, kv_dtype: str, kv_bytes: int, threads: int, scattered: bool = False):
        """`scattered` is that of RPart. Raises ValueError if that version does not support the shape or format,
        RuntimeError if the worker ends."""
        self.format = kv_dtype
        opened = self._open(shape, format=kv_dtype, fill=kv_bytes, threads=threads, scattered=scattered)
        self.sequences, self.kv_bytes = opened["sequences"], opened["kv_bytes"]
        self.run_pages: float = opened["run_pages"]  # the average number of adjacent pages of a sequence
