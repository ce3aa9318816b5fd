"""Peers of the decode benchmark: how each one's child process is started, and the KV formats that it has."""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fastdecode.bench.llama_cpp_file import KV_TYPES, gguf_of
from fastdecode.bench.load import PeerLoad
from fastdecode.bench.peer_process import worker_file
from fastdecode.bench.vllm_environment import needed_vllm_python, vllm_env
from fastdecode.daemon.machine import total_memory
from fastdecode.daemon.weights import torch_name
from fastdecode.spart import read_config
from fastdecode.spart.ranks.cut import why_not_shared

#: Bytes of an element in each format of the peers' KV-caches; blocks of 32 elements have a scale in 16 bits.
ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "f32": 4.0, "f16": 2.0}
ELEMENT_BYTES |= {"q8_0": 34 / 32, "q4_0": 18 / 32, "int8": 34 / 32, "int8-int4": 26 / 32}
#: The formats among them that keep 16 bits or more of each element.
DENSE = ("fp32", "fp16", "bf16", "f32", "f16")


class Command(NamedTuple):
    """How a worker process is started."""

    python: str
    worker: Path
    arguments: dict[str, Any]
    env: dict[str, str]


class Peer(ABC):
    """Another system that decodes the same checkpoint. Its constructor raises ValueError if it can run no cell."""

    name: str

    def __init__(self, load: PeerLoad):
        self.load = load

    @abstractmethod
    def format_of(self, kv_dtype: str) -> str:
        """The peer's format that is nearest to one of ours."""

    @abstractmethod
    def command(self, kv_format: str, kv_bytes: int) -> Command:
        """The worker process for caches of one format, of at most `kv_bytes` bytes."""

    def reserved(self, kv_bytes: int) -> int | None:
        """Bytes of KV-cache that a process takes at its start for caches of `kv_bytes` bytes; None: it takes memory as
        a cell needs it."""
        return None

    def close(self) -> None:  # noqa: B027 - most peers keep nothing
        """Remove what the peer has written."""


class Transformers(Peer):
    """transformers' `generate`, with all cores in its turn."""

    name = "transformers"

    def __init__(self, load: PeerLoad):
        _check_dense_directory(self.name, load)
        super().__init__(load)

    def format_of(self, kv_dtype: str) -> str:
        return self.load.dtype_name

    def command(self, kv_format: str, kv_bytes: int) -> Command:
        load = self.load
        arguments = {"model": str(load.model), "dtype": torch_name(load.dtype), "device": str(load.device)}
        return Command(sys.executable, worker_file("transformers"), arguments | {"threads": load.threads}, _QUIET)


class Vllm(Peer):
    """vLLM in an environment of its own, whose Python interpreter FASTDECODE_VLLM_PYTHON names."""

    name = "vllm"

    def __init__(self, load: PeerLoad):
        _check_dense_directory(self.name, load)
        self._python = needed_vllm_python()
        super().__init__(load)

    def format_of(self, kv_dtype: str) -> str:
        return "fp8" if kv_dtype.startswith("int") else self.load.dtype_name

    def command(self, kv_format: str, kv_bytes: int) -> Command:
        load = self.load
        arguments: dict[str, Any] = {"model": str(load.model), "dtype": torch_name(load.dtype), "format": kv_format}
        arguments |= {"batch": load.batch, "context": load.context, "steps": load.steps}
        env = _QUIET | vllm_env(self.reserved(kv_bytes) >> 30) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return Command(self._python, worker_file("vllm"), arguments, env)

    def reserved(self, kv_bytes: int) -> int:
        return max(4, -(-kv_bytes * 9 // 8 >> 30)) << 30  # whole GiB; blocks of 128 tokens are not all full


class LlamaCpp(Peer):
    """llama.cpp, by way of the package llama-cpp-python."""

    name = "llama.cpp"

    def __init__(self, load: PeerLoad):
        if find_spec("llama_cpp") is None:
            raise ValueError("the llama.cpp peer needs the package llama-cpp-python")
        super().__init__(load)
        self._folder = tempfile.TemporaryDirectory(prefix="fastdecode-")
        self._path = gguf_of(load, Path(self._folder.name))

    def format_of(self, kv_dtype: str) -> str:
        return KV_TYPES[kv_dtype]

    def command(self, kv_format: str, kv_bytes: int) -> Command:
        arguments = {"model": str(self._path), "threads": self.load.threads, "steps": self.load.steps}
        return Command(sys.executable, worker_file("llama_cpp"), arguments, {})

    def close(self) -> None:
        self._folder.cleanup()


class OwnRanks(Peer):
    """fastdecode's own split system with the weights cut among ranks, which share the cores evenly."""

    name = "ranks"

    def __init__(self, load: PeerLoad):
        config = read_config(load.model)
        if reason := why_not_shared(config, load.ranks):
            raise ValueError(f"--peer ranks: {reason}")
        if config.delta is not None:
            raise ValueError(f"--peer ranks: not for {config.architecture}, whose layers keep states")
        super().__init__(load)

    def format_of(self, kv_dtype: str) -> str:
        return kv_dtype

    def command(self, kv_format: str, kv_bytes: int) -> Command:
        load, threads = self.load, str(max(1, self.load.threads // self.load.ranks))
        options = {"--model": str(load.model), "--weights": load.weights, "--dtype": load.dtype_name}
        options |= {"--tensor-parallel": str(load.ranks), "--s-threads": threads, "--threads": threads}
        options |= {"--kv-memory": str(total_memory()), "--device": "cpu", "--log-level": "warning"}
        argv = ["--no-calibration", *(word for pair in options.items() for word in pair)]
        if load.mini_batches > 1:
            argv += ["--mini-batches", str(load.mini_batches)]
        arguments = {"options": argv, "mini_batches": load.mini_batches, "steps": load.steps}
        return Command(sys.executable, worker_file("ranks"), arguments, {})


_QUIET = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}


def _check_dense_directory(peer: str, load: PeerLoad) -> None:
    if load.weights not in ("auto", "dense") or not load.model.is_dir():
        raise ValueError(f"the {peer} peer needs a model directory whose weights stay as they are stored")


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Transformers, Vllm, LlamaCpp, OwnRanks)}
