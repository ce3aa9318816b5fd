"""Machines that share nothing: network namespaces on a switch, each with a /tmp and processes of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

marks = [
    pytest.mark.tools,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "FASTDECODE_NAMESPACES" not in os.environ or os.geteuid() != 0,
        reason="takes minutes and makes network namespaces, as root: FASTDECODE_NAMESPACES",
    ),
]

#: How much later a frame arrives, one way.
DELAY_US = 100
_END = "--- end of the command:"


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Machine:
    """A shell in the namespaces of one machine."""

    def __init__(self, name: str):
        self.name = name
        inside = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash"]
        self._shell = subprocess.Popen(
            ["ip", "netns", "exec", f"fd-{name}", *inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.run("mount -t tmpfs tmpfs /tmp && ip link set lo up")

    def run(self, command: str) -> str:
        """Run a command in the shell, which must succeed. Returns what it prints."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        print(f"[{self.name}] $ {command}", flush=True)
        self._shell.stdin.write(f"{command}\nstatus=$?; echo; echo '{_END}' $status\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(_END):
                assert line.split()[-1] == "0", f"{self.name}: {command}\n{''.join(lines)}"
                return "".join(lines)
            print(f"[{self.name}] {line}", end="", flush=True)
            lines.append(line)
        raise AssertionError(f"the shell of {self.name} has ended:\n{''.join(lines)}")

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()


@contextlib.contextmanager
def network(addresses: dict[str, str]) -> Iterator[None]:
    """A namespace for each address, by name, on a switch that delays every frame by DELAY_US: sch_netem does if the
    kernel has it, else delaying_switch.py."""
    with contextlib.ExitStack() as stack:
        for name in addresses:
            run("ip", "netns", "add", f"fd-{name}")
            stack.callback(run, "ip", "netns", "del", f"fd-{name}")
        stack.enter_context(_bridge(addresses) if _has_netem() else _switch(addresses))
        for name, address in addresses.items():
            run("ip", "-n", f"fd-{name}", "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", f"fd-{name}", "link", "set", "eth0", "up")
        yield


def _has_netem() -> bool:
    run("ip", "netns", "add", "fd-probe")
    try:
        netem = ["tc", "-n", "fd-probe", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(netem, capture_output=True, check=False).returncode == 0
    finally:
        run("ip", "netns", "del", "fd-probe")


@contextlib.contextmanager
def _bridge(names: Iterable[str]) -> Iterator[None]:
    """An eth0 in each namespace, all on a bridge."""
    run("ip", "link", "add", "fd-bridge", "type", "bridge")
    try:
        run("ip", "link", "set", "fd-bridge", "up")
        for name in names:
            outer = f"fd-{name}-up"
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", f"fd-{name}")
            run("ip", "link", "set", outer, "master", "fd-bridge", "up")
            run("tc", "-n", f"fd-{name}", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{DELAY_US}us")
        yield
    finally:
        run("ip", "link", "del", "fd-bridge")


@contextlib.contextmanager
def _switch(names: Iterable[str]) -> Iterator[None]:
    """An eth0 in each namespace, all on a delaying switch."""
    devices = {name: f"fd-{name}-tap" for name in names}
    argv = [sys.executable, str(Path(__file__).with_name("delaying_switch.py")), str(DELAY_US), *devices.values()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the switch has not started"
        for name, device in devices.items():
            run("ip", "link", "set", device, "netns", f"fd-{name}", "name", "eth0")
        yield  # the switch ends with its standard input
