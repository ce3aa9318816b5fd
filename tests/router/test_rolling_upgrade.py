"""The rolling upgrade of docs/deployment.md, with the commands of the pods of deploy/kubernetes/base, under streams.

A pod is a network namespace with an address of its own. The names of headless services are lines of /etc/hosts, which
all pods share: a pod gets its line when it is ready, and loses it when it is to end. Sizes are replaced by those of
this computer, and numbers are in fp32, so that a sequence that is computed again has the same tokens.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import orjson
from nodes.pods import secrets_of_the_page, workloads
from sources.folders import ROOT
from wire import namespaces

from fastdecode.demo import model_dir

pytestmark = namespaces.marks

PYTHON = shlex.quote(sys.executable)
SERVICES = {"router": "fastdecode", "s-node": "s-nodes", "r-node": "r-nodes"}
PROGRAMS = {"fastdecode-node": "fastdecode.daemon.node", "fastdecode-router": "fastdecode.router.main"}
CHANGES = {"24GiB": "256MiB", "/etc/fastdecode/secret": "{}", "/etc/fastdecode/tls": "{}", "/models": "{}"}
MORE = {
    "router": "",
    "s-node": "--s-threads 1 --dtype fp32 --kv-dtype fp32",
    "r-node": "--threads 1",
}
#: Two of each, and the ones that replace them, in the order of the page.
NAMES = [f"{role}-{number}" for role in ("r-node", "s-node", "router") for number in range(4)]
ADDRESSES = {"client": "10.0.0.1"} | {name: f"10.0.0.{i}" for i, name in enumerate(NAMES, 2)}
START_SECONDS = 90
N_STREAMS = 8


class Names:
    """The /etc/hosts of all pods."""

    def __init__(self, path: Path):
        self.path = path
        self._lines: list[str] = []
        self._write()

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._write()

    def remove(self, line: str) -> None:
        self._lines.remove(line)
        self._write()

    def _write(self) -> None:
        self.path.write_text("\n".join(["127.0.0.1 localhost", *self._lines, ""]))


class Pod:
    """A pod whose container runs, and is ready."""

    def __init__(self, role: str, number: int, folder: Path, hosts: Names):
        name = f"{role}-{number}"
        workload = workloads()[role]
        self.ready_seconds = workload.get("minReadySeconds", 0)
        self._spec, self._hosts, self._address = workload["template"]["spec"], hosts, ADDRESSES[name]
        (self._container,) = self._spec["containers"]
        self._line = f"{self._address} {SERVICES[role]}"
        self._machine = machine(name, hosts)
        (program,) = self._container.get("command", ["fastdecode-node"])
        words = shlex.join(self._container["args"])
        for there, here in CHANGES.items():
            words = words.replace(there, here.format(folder))
        self.log = folder / f"{name}.log"
        self._machine.run(f"{PYTHON} -m {PROGRAMS[program]} {words} {MORE[role]} > {self.log} 2>&1 &")
        self._machine.run("pid=$!")
        self._wait_until_ready()
        hosts.add(self._line)

    def _wait_until_ready(self) -> None:
        """Ask what the readinessProbe asks."""
        probe, (port,) = self._container["readinessProbe"], self._container["ports"]
        at = f"{self._address}:{port['containerPort']}"
        if "httpGet" in probe:
            ask = f"curl -skf https://{at}{probe['httpGet']['path']} -o /dev/null"
        else:
            ask = f"bash -c '</dev/tcp/{at.replace(':', '/')}' 2>/dev/null"
        deadline = time.monotonic() + START_SECONDS
        while self._machine.run(f"{ask} && echo ready || kill -0 $pid").strip() != "ready":
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def end(self) -> None:
        """End it as the kubelet does; its container must end by itself, and within the grace."""
        began = time.monotonic()
        self._hosts.remove(self._line)
        if "lifecycle" in self._container:
            time.sleep(self._container["lifecycle"]["preStop"]["sleep"]["seconds"])
        self._machine.run("kill -TERM $pid && wait $pid")
        assert time.monotonic() - began < self._spec["terminationGracePeriodSeconds"]
        self.close()

    def close(self) -> None:
        self._machine.close()


def machine(name: str, hosts: Names) -> namespaces.Machine:
    """A machine that knows the names."""
    found = namespaces.Machine(name)
    found.run(f"mount --bind {hosts.path} /etc/hosts")
    return found


def test_an_upgrade_pod_by_pod_loses_no_stream():
    with contextlib.ExitStack() as stack:
        stack.enter_context(namespaces.network(ADDRESSES))
        folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # every machine has a /tmp of its own
        stack.callback(shutil.rmtree, folder)
        secrets_of_the_page(folder)
        shutil.copytree(model_dir(), folder / "chat")
        hosts = Names(folder / "hosts")

        def started(role: str, number: int) -> Pod:
            pod = Pod(role, number, folder, hosts)
            stack.callback(pod.close)
            return pod

        running = {role: [started(role, number) for number in range(2)] for role in ("r-node", "s-node", "router")}
        client = machine("client", hosts)
        stack.callback(client.close)
        key = (folder / "metrics-key").read_text()
        words = f"https://fastdecode:8443/v1 {folder}/ca.crt {key} {N_STREAMS} {folder}/stop"
        client.run(f"{PYTHON} {ROOT}/tests/helpers/nodes/steady_streams.py {words} > {folder}/streams 2>&1 &")
        wait_for(folder / "streams", "calm")
        # A Deployment starts a pod before it ends one, a StatefulSet ends the pod with the highest number first.
        for number, old in enumerate(running["s-node"], 2):
            started("s-node", number)
            time.sleep(old.ready_seconds)
            old.end()
        assert any("handed_over" in old.log.read_text() for old in running["s-node"])
        for number, old in enumerate(reversed(running["r-node"]), 2):
            old.end()
            time.sleep(started("r-node", number).ready_seconds)
        for number, old in enumerate(running["router"], 2):
            started("router", number)
            old.end()
        (folder / "stop").touch()
        result = orjson.loads(wait_for(folder / "streams", r"{"))
        print(f"{result['ended']} streams")
        assert not result["wrong"] and result["ended"] > N_STREAMS


def wait_for(file: Path, begin: str) -> str:
    """The line of a file that begins so."""
    deadline = time.monotonic() + START_SECONDS
    while not (found := [line for line in file.read_text().splitlines(keepends=True) if line.startswith(begin)]):
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.1)
    return found[0]
