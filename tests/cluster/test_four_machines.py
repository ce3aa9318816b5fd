"""The page "From nothing to four machines" of docs/cluster.md, word for word, on four machines that share nothing.

A machine is a network namespace on a bridge, with a /tmp, processes and Ray of its own. So no shared memory joins two
machines. Paths and sizes of the page are replaced by those of this computer; the virtual environment exists already.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from sources import ROOT

from fastdecode.demo import model_dir

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "FASTDECODE_NAMESPACES" not in os.environ or os.geteuid() != 0,
        reason="takes minutes and makes network namespaces, as root: FASTDECODE_NAMESPACES",
    ),
]

NAMES = {"head": "10.0.0.1", "r1": "10.0.0.2", "r2": "10.0.0.3", "r3": "10.0.0.4"}
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
def network() -> Iterator[bool]:
    """Four namespaces on a bridge. Yields whether the kernel can add a delay between them (sch_netem)."""
    with contextlib.ExitStack() as stack:
        delayed = True
        run("ip", "link", "add", "fd-bridge", "type", "bridge")
        stack.callback(run, "ip", "link", "del", "fd-bridge")
        run("ip", "link", "set", "fd-bridge", "up")
        for name, address in NAMES.items():
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


def page() -> tuple[list[str], str, list[str]]:
    """The lines of step 2 of the page, cluster.yaml, and the commands of step 4."""
    text = (ROOT / "docs/cluster.md").read_text().split("## From nothing to four machines")[1].split("\n## ")[0]
    ray, up = re.findall(r"```sh\n(.*?)```", text, re.S)[1:3]
    [config] = re.findall(r"```yaml\n(.*?)```", text, re.S)
    rows = re.findall(r"^\| `(fastdecode-cluster [^`]*)`", text, re.M)
    return ray.strip().splitlines(), config, [up.strip(), *rows]


def test_the_page_as_a_new_user_would_follow_it():
    lines, config, commands = page()
    assert "--head" in lines[1] and "--address" in lines[2]
    assert [command.split()[1] for command in commands] == ["up", "scale", "drain", "drain", "status", "down"]
    with contextlib.ExitStack() as stack:
        print("delay of 0.1 ms:", "yes" if stack.enter_context(network()) else "no, the kernel has no sch_netem")
        folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # every machine has a /tmp of its own
        stack.callback(shutil.rmtree, folder)
        shutil.copytree(model_dir(), folder / "chat")
        secret = folder / "secret"
        secret.write_bytes(os.urandom(32))
        secret.chmod(0o600)
        places = {"/opt/fastdecode/bin": str(Path(sys.executable).parent), "/etc/fastdecode/secret": str(secret),
                  "/models/chat": str(folder / "chat")}  # fmt: skip
        sizes = {"cpus: 16": "cpus: 1", "cpus: 4, gpus: 1": "cpus: 1", "200GiB": "256MiB", "32GiB": "1GiB"}
        for old, new in (places | sizes).items():
            assert any(old in text for text in [*lines, config])
            config = config.replace(old, new)
            lines = [line.replace(old, new) for line in lines]
        (folder / "cluster.yaml").write_text(config)
        machines: dict[str, Machine] = {}
        for name in NAMES:
            machines[name] = Machine(name)
            stack.callback(machines[name].close)
            machines[name].run(lines[0])
            machines[name].run(lines[1 if name == "head" else 2])
        head, far = machines["head"], machines["r3"]
        head.run(f"cd {folder}")
        ask = ("curl -s http://10.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "
               """'{"model": "chat", "prompt": "It was", "max_tokens": 40, "temperature": 0}'""")  # fmt: skip
        texts = []
        for command in commands:
            if command.split()[1] == "down":
                continue
            table = head.run(command)
            texts.append(orjson.loads(far.run(ask))["choices"][0]["text"])
            if command.split()[1] in ("up", "status"):
                rows = [row.split() for row in table.splitlines()[1:] if row]
                machine_of = {row[0]: row[2] for row in rows if row[1] == "running"}
                links = {row[0]: row for row in rows}
                assert {"s0", "r0", "router"} <= machine_of.keys(), links
                if command.split()[1] == "up":
                    assert len({machine_of[f"r{i}"] for i in range(3)}) == 3, "R-nodes are spread over machines"
        assert len(set(texts)) == 1 and texts[0]
        head.run(commands[-1])
