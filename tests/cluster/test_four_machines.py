"""The page "From nothing to four machines" of docs/cluster.md, word for word, on four machines that share nothing.

A machine is a network namespace on a switch that delays frames, with a /tmp, processes and Ray of its own. So no shared
memory joins two machines. Before the cluster goes down, an R-node, the S-node and a raylet are killed. Paths and sizes
of the page are replaced by those of this computer, numbers are in fp32 so that recomputed tokens are equal, and the
virtual environment exists already.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import orjson
from sources.folders import ROOT
from wire import namespaces

from fastdecode.demo import model_dir

pytestmark = namespaces.marks

NAMES = {"head": "10.0.0.1", "r1": "10.0.0.2", "r2": "10.0.0.3", "r3": "10.0.0.4"}


def page() -> tuple[list[str], str, list[str]]:
    """The lines of step 2 of the page, cluster.yaml, and the commands of step 4."""
    text = (ROOT / "docs/cluster.md").read_text().split("## From nothing to four machines")[1].split("\n## ")[0]
    ray, up = re.findall(r"```sh\n(.*?)```", text, re.S)[1:3]
    [config] = re.findall(r"```yaml\n(.*?)```", text, re.S)
    rows = re.findall(r"^\| `(fastdecode-cluster [^`]*)`", text, re.M)
    return ray.strip().splitlines(), config, [up.strip(), *rows]


def test_the_page_as_a_new_user_would_follow_it():
    lines, config, commands = page()
    assert "--head" in lines[2] and "--address" in lines[3]
    assert [command.split()[1] for command in commands] == ["up", "scale", "drain", "drain", "logs", "status", "down"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(namespaces.network(NAMES))
        folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # every machine has a /tmp of its own
        stack.callback(shutil.rmtree, folder)
        shutil.copytree(model_dir(), folder / "chat")
        secret, token = folder / "secret", folder / "ray-token"
        for file in (secret, token):
            file.write_text(os.urandom(32).hex())
            file.chmod(0o600)
        places = {"/opt/fastdecode/bin": str(Path(sys.executable).parent), "/etc/fastdecode/secret": str(secret),
                  "/etc/fastdecode/ray-token": str(token),
                  "/models/chat": str(folder / "chat")}  # fmt: skip
        sizes = {
            "cpus: 16": "cpus: 1",
            "cpus: 4, gpus: 1": "cpus: 1",
            "200GiB": "256MiB",
            "32GiB": "1GiB",
            "{model: ": "{dtype: fp32, kv-dtype: fp32, model: ",
        }
        for old, new in (places | sizes).items():
            assert any(old in text for text in [*lines, config])
            config = config.replace(old, new)
            lines = [line.replace(old, new) for line in lines]
        (folder / "cluster.yaml").write_text(config)
        machines: dict[str, namespaces.Machine] = {}
        for name in NAMES:
            machines[name] = namespaces.Machine(name)
            stack.callback(machines[name].close)
            for line in (*lines[:2], lines[2 if name == "head" else 3]):
                machines[name].run(line)
        head, far = machines["head"], machines["r3"]
        head.run(f"cd {folder}")
        ask = ("curl -s http://10.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "
               """'{"model": "chat", "prompt": "It was", "max_tokens": 40, "temperature": 0}'""")  # fmt: skip
        texts = []
        for command in commands:
            if command.split()[1] == "down":
                continue
            before = {}
            if (machine := command.split()[-1]) in NAMES.values():
                before = machines_of(head.run("fastdecode-cluster scale routers=4"))
                assert len({there for name, there in before.items() if name.startswith("router")}) == 4
            table = head.run(command)
            if before:
                [drained] = re.findall("drained: (.*)", table)
                assert {*drained.split(", ")} == {name for name, there in before.items() if there == machine}
            if command.split()[1] == "logs":
                assert "Serving chat" in table
                continue
            texts.append(orjson.loads(far.run(ask))["choices"][0]["text"])
            if command.split()[1] in ("up", "status"):
                machine_of = machines_of(table)
                assert {"s0", "router0"} <= machine_of.keys(), table
                if command.split()[1] == "up":
                    assert len({machine_of[f"r{i}"] for i in range(3)}) == 3, "R-nodes are spread over machines"
        assert len(set(texts)) == 1 and texts[0]
        by_address = {NAMES[name]: machine for name, machine in machines.items()}
        undisturbed = ended(begun(far))
        for process in ("daemon.node --role r", "daemon.node --role s", "raylet/raylet"):
            machine_of = machines_of(head.run(commands[-2]))
            apart = {machine_of["s0"], machine_of["router0"]}  # the raylet that is killed has R-nodes alone
            of_r_nodes = [machine for name, machine in machine_of.items() if name[1:].isdigit() and name[0] == "r"]
            address = machine_of["s0"] if "role s" in process else min(of_r_nodes, key=apart.__contains__)
            running = begun(far)
            by_address[address].run(f"pkill -9 -f -- '{process}'")
            assert ended(running) == undisturbed, f"{process} at {address} was killed"
        head.run(commands[-1])


def machines_of(table: str) -> dict[str, str]:
    """The machine of each node of a table that runs."""
    rows = [row.split() for row in table.splitlines()[1:] if row]
    return {row[0]: row[2] for row in rows if row[1] == "running"}


def begun(machine: namespaces.Machine) -> namespaces.Machine:
    """Begin a stream of 300 tokens, and wait for the first ones."""
    ask = {"model": "chat", "prompt": "It was", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
    machine.run(
        "rm -f /tmp/stream; curl -sN http://10.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
        f"-d '{orjson.dumps(ask).decode()}' > /tmp/stream & "
        "for i in $(seq 300); do [ $(grep -c ^data /tmp/stream 2>/dev/null) -gt 20 ] && break; sleep 0.1; done"
    )
    return machine


def ended(machine: namespaces.Machine) -> str:
    """The text of the stream that has begun, once it has ended."""
    *events, last = machine.run("wait; grep ^data /tmp/stream").split("\n\n")[0].splitlines()
    assert last == "data: [DONE]", last
    return "".join(orjson.loads(event[len("data: ") :])["choices"][0]["text"] for event in events)
