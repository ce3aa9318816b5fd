"""Streams whose S-node's host vanishes: its network goes down, and nothing says that its processes are gone.

The S-node's host and that of all others are network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import orjson
from nodes.many_streams import N_STREAMS
from sources.folders import ROOT
from wire import namespaces

pytestmark = namespaces.marks

LOST, OTHERS = "10.0.0.1", "10.0.0.2"
PYTHON = shlex.quote(sys.executable)


def started(machine: namespaces.Machine, folder: Path, name: str, words: str, ready: str) -> None:
    """Start a program on a machine, and wait until its log says `ready`."""
    (log := folder / f"{name}.log").touch()
    machine.run(f"{PYTHON} -m {words} --secret-file {folder}/secret > {log} 2>&1 &")
    deadline = time.monotonic() + 60
    while not re.search(ready, log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def begun(machine: namespaces.Machine, folder: Path, name: str) -> Path:
    """Begin streams, and wait for their first tokens. Returns the file that gets their texts."""
    script = ROOT / "tests/helpers/nodes/many_streams.py"
    (out := folder / f"{name}.json").touch()
    first = folder / f"{name}.begun"
    machine.run(f"{PYTHON} {script} http://{OTHERS}:8000/v1 {N_STREAMS} {first} > {out} &")
    machine.run(f"for i in $(seq 600); do [ -e {first} ] && break; sleep 0.1; done; [ -e {first} ]")
    return out


def ended(out: Path) -> dict:
    deadline = time.monotonic() + 120
    while not out.read_text().endswith("\n"):
        assert time.monotonic() < deadline, "the streams did not end"
        time.sleep(0.1)
    return orjson.loads(out.read_text())


def metric(machine: namespaces.Machine, name: str) -> float:
    text = machine.run(f"curl -s http://{OTHERS}:8001/metrics")
    return sum(float(value) for value in re.findall(rf"^fastdecode:{name}{{.*}} (.*)$", text, re.MULTILINE))


def test_streams_go_on_with_their_k_and_v():
    with contextlib.ExitStack() as stack:
        stack.enter_context(namespaces.network({"lost": LOST, "others": OTHERS}))
        folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # every machine has a /tmp of its own
        stack.callback(shutil.rmtree, folder)
        (folder / "secret").write_bytes(os.urandom(32))
        (folder / "secret").chmod(0o600)
        lost, others = namespaces.Machine("lost"), namespaces.Machine("others")
        stack.callback(lost.close)
        stack.callback(others.close)
        r_nodes = ""
        for port in (7300, 7301):
            url = f"tcp://{OTHERS}:{port}"
            node = f"fastdecode.daemon.node --role r --listen {url} --kv-memory 256MiB --threads 1"
            started(others, folder, f"r{port}", node, url)
            r_nodes += f" --r-node {url}"
        s_node = f"fastdecode.daemon.node --s-threads 1 --dtype bf16 --kv-dtype int8{r_nodes}"
        started(lost, folder, "s0", f"{s_node} --host {LOST} --port 8001", "Serving")
        started(others, folder, "s1", f"{s_node} --host {OTHERS} --port 8001", "Serving")
        urls = f"--s-node http://{LOST}:8001 --s-node http://{OTHERS}:8001"
        router = f"fastdecode.router.main --host {OTHERS} {urls}"
        started(others, folder, "router", router, r"takes requests(?s:.)*takes requests")
        calm = ended(begun(others, folder, "calm"))
        running = begun(others, folder, "lost")
        namespaces.run("ip", "-n", "fd-lost", "link", "set", "eth0", "down")
        disturbed = ended(running)
        print(f"{N_STREAMS} streams: the longest pause was {disturbed['pause']:.2f} s")
        assert disturbed["texts"] == calm["texts"]
        assert metric(others, "adopted_total") > 0 == metric(others, "adoptions_failed_total")
