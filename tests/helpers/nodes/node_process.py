"""A fastdecode-node process with the options of users."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from openai import OpenAI

from nodes.forked import LINKS, S_NODE, Forked

#: The programs, each as a module.
PROGRAMS = {"node": "fastdecode.daemon.node", "router": "fastdecode.router.main"}
NODE = [sys.executable, "-m", "fastdecode.daemon.node"]
START_SECONDS = 120


class Node:
    """A fastdecode-node or fastdecode-router process, whose output goes to a log file."""

    def __init__(self, tmp_path: Path, *argv: str, own_group: bool = False, program: str = "node"):
        self.log = tmp_path / f"node-{time.monotonic_ns()}.log"
        self._clients: list[OpenAI] = []
        with self.log.open("wb") as out:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary(tmp_path))}
            self.process = Forked(
                ["-m", PROGRAMS[program], *argv],
                LINKS if program == "router" or "r" in argv else S_NODE,
                stdout=out.fileno(),
                stderr=out.fileno(),
                env=env,
                own_group=own_group,
            )

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log.read_text()):
                return match
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not appear:\n{self.log.read_text()}")

    def api(self) -> OpenAI:
        url = self.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1]
        self._clients.append(OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Close the connections of all that `api` has returned. Python would close them during a later test, which the
        ResourceWarning fails."""
        for client in self._clients:
            client.close()

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill_group(self) -> None:
        """Kill the process and its children, if it has a group of its own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def regions(self) -> int:
        """The number of activation regions that the process has mapped."""
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("fastdecode-region")

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def r_node(self) -> int:
        """The process id of the embedded R-node."""
        [pid] = set(self.children()) - set(self.api_processes())
        return pid

    def api_processes(self) -> list[int]:
        """The process ids of the API's processes."""
        module = b"fastdecode.daemon.api_process"
        return [pid for pid in self.children() if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def gone(pid: int, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def complete(api: OpenAI, n: int = 8) -> str:
    return api.completions.create(model="fastdecode-demo", prompt="It was", max_tokens=n, temperature=0).choices[0].text


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def health(api: OpenAI) -> dict[str, Any]:
    """What the node's /health says."""
    found: dict[str, Any] = orjson.loads(fetch(f"{str(api.base_url).removesuffix('/v1/')}/health"))
    return found


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def temporary(tmp_path: Path) -> Path:
    """The nodes' TMPDIR."""
    directory = tmp_path / "tmp"
    directory.mkdir(exist_ok=True)
    return directory


def traces(tmp_path: Path) -> set[Path]:
    """Files that a killed node could leave behind: shared memory segments and temporary files."""
    return {*Path("/dev/shm").iterdir(), *temporary(tmp_path).iterdir()}
