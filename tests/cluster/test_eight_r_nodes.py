"""1, 2, 4 and 8 R-nodes on machines that share nothing: the capacity, and where the sequences are placed."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from wire import namespaces

from fastdecode.demo import model_dir

pytestmark = namespaces.marks

NAMES = {"s": "10.0.1.1"} | {f"r{i}": f"10.0.1.{i + 2}" for i in range(8)}
SEQUENCES = 256
#: Clients that stream for as long as the model allows, with prompts of 10 to 200 words.
LOAD = f"""
import json, random, threading, urllib.request
def ask(i):
    words = " ".join(random.Random(i).choices(["one", "two", "three", "four", "five"], k=10 + 19 * i % 190))
    body = dict(model="chat", prompt=words, max_tokens=600, temperature=0, ignore_eos=True)
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                                     {{"Content-Type": "application/json"}})
    urllib.request.urlopen(request).read()
for i in range({SEQUENCES}):
    threading.Thread(target=ask, args=(i,)).start()
"""


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


def test_capacity_grows_with_the_r_nodes_and_loads_are_even(machines):
    node = Path(sys.executable).parent / "fastdecode-node"
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        shutil.copytree(model_dir(), folder / "chat")
        (folder / "load.py").write_text(LOAD)
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
                    f"{node} --role s --model {folder}/chat --r-nodes-file {known} --s-threads 1 "
                    f"--max-batch-size {SEQUENCES} >{folder}/s.log 2>&1 &"
                )
            alive = "curl -s http://127.0.0.1:8000/metrics | grep -c '^fastdecode:r_node_alive{.*} 1'"
            wait(s, f"[ $({alive}) = {n} ]")
            capacities.append(sum(metric(s, "r_node_pages_max")))
        print("pages:", capacities)
        assert capacities == [n * capacities[0] for n in (1, 2, 4, 8)]
        s.run(f"{sys.executable} {folder}/load.py >{folder}/load.log 2>&1 &")
        wait(s, f"curl -s http://127.0.0.1:8000/metrics | grep -q '^fastdecode:num_requests_running{{.*}} {SEQUENCES}'")
        tokens = "curl -s http://127.0.0.1:8000/metrics | sed -n 's/^fastdecode:generation_tokens_total{.*} //p'"
        wait(s, f"[ $({tokens} | cut -d. -f1) -ge {300 * SEQUENCES} ]")
        loads = metric(s, "r_node_kv_bytes_used")
        print("sequences:", metric(s, "r_node_sequences"), "cached bytes:", loads)
        mean = sum(loads) / len(loads)
        assert len(loads) == 8 and all(abs(load - mean) <= 0.05 * mean for load in loads), loads
    finally:
        for log in sorted(folder.glob("*.log")):
            print(log.name, log.read_text()[-1500:], sep="\n")
        shutil.rmtree(folder)
