"""1, 2, 4 and 8 R-nodes on machines that share nothing: the capacity of a running S-node."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

import namespaces
import pytest

from fastdecode.demo import model_dir

pytestmark = namespaces.marks

NAMES = {"s": "10.0.1.1"} | {f"r{i}": f"10.0.1.{i + 2}" for i in range(8)}


def metric(machine: namespaces.Machine, name: str) -> list[float]:
    """A metric of each R-node."""
    text = machine.run("curl -s http://127.0.0.1:8000/metrics")
    return [float(value) for value in re.findall(rf"^fastdecode:{name}{{.*}} (\S+)$", text, re.M)]


def wait(machine: namespaces.Machine, condition: str) -> None:
    machine.run(f"for i in $(seq 240); do {condition} && break; sleep 0.25; done; {condition}")


@pytest.fixture(scope="module")
def machines():
    with contextlib.ExitStack() as stack:
        stack.enter_context(namespaces.network(NAMES))
        yield {name: stack.enter_context(contextlib.closing(namespaces.Machine(name))) for name in NAMES}


def test_each_r_node_adds_its_pages_to_a_running_s_node(machines):
    node = Path(sys.executable).parent / "fastdecode-node"
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        shutil.copytree(model_dir(), folder / "chat")
        known = folder / "r-nodes"
        s = machines["s"]
        capacities = []
        for n in (1, 2, 4, 8):
            for i in range(n // 2, n):
                machines[f"r{i}"].run(
                    f"{node} --role r --listen tcp://0.0.0.0:7300 --insecure --threads 1 --kv-memory 128MiB --prefault "
                    f">{folder}/r{i}.log 2>&1 &"
                )
            known.write_text("".join(f"tcp://{NAMES[f'r{i}']}:7300\n" for i in range(n)))
            if n == 1:
                s.run(
                    f"{node} --role s --model {folder}/chat --r-nodes-file {known} --s-threads 1 >{folder}/s.log 2>&1 &"
                )
            alive = "curl -s http://127.0.0.1:8000/metrics | grep -c '^fastdecode:r_node_alive{.*} 1'"
            wait(s, f"[ $({alive}) = {n} ]")
            capacities.append(sum(metric(s, "r_node_pages_max")))
        print("pages:", capacities)
        assert capacities == [n * capacities[0] for n in (1, 2, 4, 8)]
    finally:
        for log in sorted(folder.glob("*.log")):
            print(log.name, log.read_text()[-1500:], sep="\n")
        shutil.rmtree(folder)
