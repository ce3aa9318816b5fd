"""An R-node bound to a NUMA node: the kernel's view of where its threads run and its KV-cache lies.

Most machines have one node; tests/rdma/test_rdma_vm.py runs this in a virtual machine that has two.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdecode.daemon.machine import NumaNode, numa_nodes, parse_cpu_list
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import Hello
from fastdecode.transports.registry import connect

NODES = [node for node in numa_nodes() if os.sched_getaffinity(0).intersection(node.cpus)]
#: A page of fp16 KV-cache has 512 KiB.
GEOMETRY = Geometry(n_slots=1, max_rows=8, n_layers=2, n_q_heads=8, n_kv_heads=8, head_size=128, act_dtype="fp16")
MIB = 1 << 20


def bytes_by_node(pid: int, least: int) -> dict[int, int]:
    """Bytes on each NUMA node, over the mappings with at least `least` bytes of anonymous memory."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        anonymous, size = re.search(r" anon=(\d+)", line), re.search(r" kernelpagesize_kB=(\d+)", line)
        if anonymous and size and int(anonymous[1]) * int(size[1]) * 1024 >= least:
            for node, pages in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] = found.get(int(node), 0) + int(pages) * int(size[1]) * 1024
    return found


async def until_logged(log: Path, pattern: str, process: subprocess.Popen) -> None:
    async with asyncio.timeout(100):
        while not re.search(pattern, log.read_text()):
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.05)


@pytest.mark.skipif(not NODES, reason="this kernel knows no NUMA")
@pytest.mark.parametrize("node", NODES, ids=lambda node: f"node{node.number}")
async def test_an_r_node_stays_on_its_numa_node(node: NumaNode, tmp_path):
    url, log = f"shm://{tmp_path}/r.sock", tmp_path / "log"
    options = ["--threads", "2", "--kv-memory", "64MiB", "--prefault", "--numa-node", str(node.number)]
    command = [sys.executable, "-m", "fastdecode.daemon.node", "--role", "r", "--listen", url, *options]
    with log.open("wb") as out, subprocess.Popen(command, stderr=out, stdin=subprocess.DEVNULL) as process:
        try:
            await until_logged(log, "R-node on", process)
            link = await connect(url, Hello(GEOMETRY, "fp16", (0, 0), 1.0, None, 4), None)
            await until_logged(log, r"prefault: 63\.0 MiB of 63\.0 MiB \(100 %\)", process)
            async with asyncio.timeout(60):
                while not (await link.stats())["roofline"]:  # its measurement has memory of its own
                    await asyncio.sleep(0.05)
            assert bytes_by_node(process.pid, 60 * MIB) == {node.number: 63 * MIB}  # the region counts too
            tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
            assert sum((task / "comm").read_text().startswith("fd-r") for task in tasks) == 2
            for task in tasks:
                allowed = re.search(r"^Cpus_allowed_list:\s+(\S+)", (task / "status").read_text(), re.M)[1]
                assert set(parse_cpu_list(allowed)) <= set(node.cpus)
                assert f" bind:{node.number} " in Path(f"/proc/{task.name}/numa_maps").read_text()
            await link.close()
            await until_logged(log, "lease of 63 pages ended after", process)
            assert not bytes_by_node(process.pid, 60 * MIB)
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()
