"""A peer of the attention benchmark that runs in a worker process, because it needs an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fastdecode.bench.peer_process import worker_command, worker_file
from fastdecode.bench.shape import Shape


class ProcessAttention:
    """Attention of a worker process. One worker serves all instances of a class, one after the other.

    A subclass says how its worker starts and how many sequences its format makes of the benchmark's bytes.
    """

    needs: str  # what must be installed, for messages
    format: str
    sequences: int
    kv_bytes: int
    _worker_name: ClassVar[str]  # the worker's name
    _environment: ClassVar[dict[str, str]] = {}  # the worker's variables beside this process's
    _worker: ClassVar[subprocess.Popen[str] | None] = None

    @staticmethod
    def python() -> str | None:
        """The worker's interpreter, None if it is not installed."""
        raise NotImplementedError

    @classmethod
    def installed(cls) -> bool:
        return cls.python() is not None

    def _open(self, shape: Shape, **arguments: object) -> dict[str, Any]:
        """Let the worker fill a cache for `shape`. Raises ValueError if the worker does not support `arguments`,
        RuntimeError if it ends."""
        numbers = {name: getattr(shape, name) for name in ("context", "group", "head_size", "kv_heads")}
        return self._ask("open", **numbers, **arguments)

    @classmethod
    def _ask(cls, do: str, **arguments: object) -> dict[str, Any]:
        if cls._worker is None:
            python = cls.python()
            assert python, f"{cls.__name__} needs {cls.needs}"
            argv, env = worker_command(python, worker_file(cls._worker_name), {}), os.environ | cls._environment
            cls._worker = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            cls._answer()
        assert cls._worker.stdin
        print(json.dumps({"do": do, **arguments}), file=cls._worker.stdin, flush=True)
        return cls._answer()

    @classmethod
    def _answer(cls) -> dict[str, Any]:
        assert cls._worker and cls._worker.stdout
        if not (line := cls._worker.stdout.readline()):
            raise RuntimeError(f"the worker of {cls.__name__} has ended; see its log above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def layer(self) -> float:
        """Run one layer of one step of all sequences; returns the seconds it took."""
        return float(self._ask("layer")["seconds"])

    def output(self) -> np.ndarray:
        """O of the last `layer`, [sequences, q_heads, head_size] float32."""
        with tempfile.TemporaryDirectory(prefix="fastdecode-") as folder:
            path = Path(folder, "o.npy")
            self._ask("output", to=str(path))
            o: np.ndarray = np.load(path)
            return o

    def close(self) -> None:
        """Free the cache. The worker stays for the next shape and ends with this process."""
        self._ask("close")
