"""Machines that share nothing: network namespaces on a bridge, each with a /tmp and processes of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

marks = [
    pytest.mark.tools,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "FASTDECODE_NAMESPACES" not in os.environ or os.geteuid() != 0,
        reason="takes minutes and makes network namespaces, as root: FASTDECODE_NAMESPACES",
    ),
]

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
def network(addresses: dict[str, str]) -> Iterator[bool]:
    """A namespace on a bridge for each address, by name. Yields whether the kernel can delay packets (sch_netem)."""
    with contextlib.ExitStack() as stack:
        delayed = True
        run("ip", "link", "add", "fd-bridge", "type", "bridge")
        stack.callback(run, "ip", "link", "del", "fd-bridge")
        run("ip", "link", "set", "fd-bridge", "up")
        for name, address in addresses.items():
            space, outer = f"fd-{name}", f"fd-{name}-up"
            run("ip", "netns", "add", space)
            stack.callback(run, "ip", "netns", "del", space)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", outer, "master", "fd-bridge", "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            netem = ["tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "0.1ms"]
            delayed &= subprocess.run(netem, capture_output=True, check=False).returncode == 0
        yield delayed
