"""The servers of `fastdecode-bench compare`: a node for each configuration, and other systems' servers as peers."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from fastdecode.bench.serving import client
from fastdecode.bench.soaking.processes import LoggedProcess, Node
from fastdecode.bench.vllm_environment import needed_vllm_python, vllm_env
from fastdecode.daemon.config import NodeConfig

DEMO = "demo"
#: Other systems, by the name of the configuration.
PEERS = ("vllm",)
_VLLM_START_SECONDS = 600.0  # it compiles
_VLLM_GIB = 4  # of KV-cache, if VLLM_CPU_KVCACHE_SPACE is not set


@contextlib.asynccontextmanager
async def servers(model: str, options: str, configurations: dict[str, str]) -> AsyncIterator[dict[str, client.Target]]:
    """A running server for each configuration, whose name says which: a peer's, or a fastdecode-node with `options`,
    too. Raises ValueError, RuntimeError."""
    processes: list[LoggedProcess] = []
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as directory:
        try:
            found = {}
            for name, own in configurations.items():
                log = Path(directory) / f"{len(processes)}.log"
                if name in PEERS:
                    processes.append(process := _vllm(log, model, own, port := _free_port()))
                    await process.read("(Application startup complete)")
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


def _vllm(log: Path, model: str, options: str, port: int) -> LoggedProcess:
    """`vllm serve` of the environment that FASTDECODE_VLLM_PYTHON names, with all cores."""
    python = needed_vllm_python()
    path = NodeConfig(model=None if model == DEMO else Path(model)).model_path()
    if not path.is_dir():
        raise ValueError(f"the vllm peer needs a model directory, not {path}")
    space = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", _VLLM_GIB))
    argv = [str(Path(python).with_name("vllm")), "serve", str(path), "--port", str(port), "--host", "127.0.0.1"]
    return LoggedProcess(log, [*argv, *shlex.split(options)], vllm_env(space), _VLLM_START_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
