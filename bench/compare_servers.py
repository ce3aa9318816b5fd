"""The servers of `fastdecode-bench compare`: a node for each configuration, and other systems' servers as peers."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fastdecode.bench.serving import client
from fastdecode.bench.soaking.processes import LoggedProcess, Node
from fastdecode.bench.vllm_environment import needed_vllm_python, vllm_env
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import usable_cpus
from fastdecode.gguf.file import find_gguf

DEMO = "demo"
_PEER_START_SECONDS = 600.0  # vLLM compiles
_VLLM_GIB = 4  # of KV-cache, if VLLM_CPU_KVCACHE_SPACE is not set


@dataclass(frozen=True, slots=True)
class Load:
    """What the servers must be able to hold."""

    concurrency: int  # requests in progress
    tokens: int  # of the longest request, prompt and output together


@contextlib.asynccontextmanager
async def servers(
    model: str, options: str, configurations: dict[str, str], load: Load
) -> AsyncIterator[dict[str, client.Target]]:
    """A running server for each configuration, whose name says which: a peer's, or a fastdecode-node with `options`,
    too. Raises ValueError, RuntimeError."""
    path = NodeConfig(model=None if model == DEMO else Path(model)).model_path()
    peers = {name: PEERS[name](path, load) for name in configurations if name in PEERS}
    processes: list[LoggedProcess] = []
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as directory:
        try:
            found = {}
            for name, own in configurations.items():
                log = Path(directory) / f"{len(processes)}.log"
                if name in peers:
                    peer, port = peers[name], _free_port()
                    argv = [*peer.argv, "--port", str(port), "--host", "127.0.0.1", *shlex.split(own)]
                    processes.append(process := LoggedProcess(log, argv, peer.env, _PEER_START_SECONDS))
                    await process.read(peer.ready)
                    url = f"http://127.0.0.1:{port}/v1"
                else:
                    named = [] if model == DEMO else ["--model", model]
                    argv = [*named, "--port", "0", *shlex.split(options), *shlex.split(own)]
                    processes.append(process := Node(log, *argv))
                    url = await process.read(r"(http://\S+/v1)")
                found[name] = client.Target(url, await client.first_model(url, None))
            yield found
        finally:
            for process in processes:
                await process.end()


@dataclass(frozen=True, slots=True)
class _PeerServer:
    """Another system's server, with all cores."""

    argv: list[str]  # without host and port
    env: dict[str, str]  # beside this process's environment
    ready: str  # what the server writes when it answers: a pattern with a group


def _vllm(model: Path, load: Load) -> _PeerServer:
    """`vllm serve` of the environment that FASTDECODE_VLLM_PYTHON names. Raises ValueError."""
    python = needed_vllm_python()
    if not model.is_dir():
        raise ValueError(f"the vllm peer needs a model directory, not {model}")
    space = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", _VLLM_GIB))
    argv = [str(Path(python).with_name("vllm")), "serve", str(model)]
    return _PeerServer(argv, vllm_env(space), "(Application startup complete)")


def _llama_cpp(model: Path, load: Load) -> _PeerServer:
    """The llama-server that FASTDECODE_LLAMA_SERVER names, with a slot for each request in progress. Raises
    ValueError."""
    program, file = os.environ.get("FASTDECODE_LLAMA_SERVER"), find_gguf(model)
    if program is None:
        raise ValueError("the llama.cpp peer needs FASTDECODE_LLAMA_SERVER, the path of its llama-server")
    if file is None:
        raise ValueError(f"the llama.cpp peer needs a GGUF file, not {model}")
    slots = ["--parallel", str(load.concurrency), "--ctx-size", str(load.concurrency * load.tokens)]
    threads = ["--threads", str(len(usable_cpus()))]
    return _PeerServer([program, "--model", str(file), *slots, *threads], {}, r"(listening on http://)")


#: Other systems, by the name of the configuration.
PEERS = {"vllm": _vllm, "llama.cpp": _llama_cpp}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
