"""A Ray head on this machine, with the commands of fastdecode-cluster against it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fastdecode.cluster.hosts import free_port


class RayHead:
    """Runs until it is closed. `folder` holds its files and the home directory of its commands."""

    def __init__(self, folder: Path, auth: Mapping[str, str]):
        """`auth`: Ray's environment variables for authentication."""
        self.port = free_port("127.0.0.1")
        self._folder = folder
        (folder / "home").mkdir()
        words = ["--head", f"--port={self.port}", "--include-dashboard=false", "--num-cpus=8",
                 f"--temp-dir={folder / 'ray'}"]  # fmt: skip
        self._start(words, auth)

    def add_machine(self, resource: str, auth: Mapping[str, str]) -> None:
        """Another raylet. It offers 1 of a resource, and nothing else."""
        self._start([f"--address=127.0.0.1:{self.port}", "--num-cpus=0", f'--resources={{"{resource}": 1}}'], auth)

    def _start(self, words: Sequence[str], auth: Mapping[str, str]) -> None:
        common = ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        subprocess.run(
            [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *common, *words],
            env=self._environment(auth),
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def _environment(self, auth: Mapping[str, str]) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        fixed = {"HOME": str(self._folder / "home"), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        return others | fixed | dict(auth)

    def run(self, command: str, config: str, auth: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command of fastdecode-cluster with this cluster.yaml, to which ray-address is added."""
        process = self.begin(command, config, auth)
        out, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def begin(self, command: str, config: str, auth: Mapping[str, str]) -> subprocess.Popen[str]:
        """Begin a command as `run` runs it."""
        path = self._folder / "cluster.yaml"
        path.write_text(f"ray-address: 127.0.0.1:{self.port}\n{config}")
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fastdecode.cluster.cli", *command.split(), str(path)],
            env=self._environment(auth),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill_gcs(self) -> None:
        """Kill the process that makes this the head, its global control service."""
        assert self._kill("gcs_server"), "it runs"

    def close(self) -> None:
        """Kill all of Ray's processes that have the head's folder in their command lines; workers end with them."""
        self._kill("")

    def _kill(self, word: str) -> int:
        """Kill the head's processes with this word in their command lines. Returns their number."""
        found = process_ids(f"{self._folder}/ray") & process_ids(word)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)


def process_ids(word: str) -> set[int]:
    """The processes with this word in their command lines."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (process / "cmdline").read_text():
                found.add(int(process.name))
    return found


def offers(pid: int, resource: str) -> bool:
    """Whether the raylet under which a process runs offers a resource."""
    while "raylet/raylet" not in (words := Path(f"/proc/{pid}/cmdline").read_text()):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return f"{resource},1" in words


@contextlib.contextmanager
def ray_head(auth: Mapping[str, str]) -> Iterator[RayHead]:
    """A head whose folder has a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = RayHead(Path(folder), auth)
        try:
            yield head
        finally:
            head.close()


def listening(module: str) -> dict[int, set[str]]:
    """The addresses at which processes of a Python module of fastdecode listen for TCP, by process id."""
    inodes = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":  # LISTEN
                words = bytes.fromhex(local.partition(":")[0])
                host = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                inodes[f"socket:[{rest[5]}]"] = socket.inet_ntop(family, host)
    found: dict[int, set[str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if module in (process / "cmdline").read_text().split("\0"):
                sockets = {os.readlink(file) for file in (process / "fd").iterdir()}
                found[int(process.name)] = {inodes[name] for name in sockets & inodes.keys()}
    return found
