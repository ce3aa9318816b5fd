"""An R-node bound to a NUMA node, and the ranks of an S-node on one each: the kernel's view of where their threads run
and their memory lies.

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


def in_huge_pages(pid: int) -> set[int]:
    """Where the mappings of weights and of KV-cache begin: madvise has asked for huge pages there."""
    blocks = re.split(r"^(?=\w+-\w+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.M)
    return {int(block.partition("-")[0], 16) for block in blocks if re.search(r"^VmFlags:.* hg\b", block, re.M)}


def bytes_by_node(pid: int, least: int, within: set[int] | None = None) -> dict[int, int]:
    """Bytes on each NUMA node, over the mappings with at least `least` bytes of anonymous memory. Unless `within` is
    None, only mappings that begin there count."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        anonymous, size = re.search(r" anon=(\d+)", line), re.search(r" kernelpagesize_kB=(\d+)", line)
        if within is not None and int(line.split()[0], 16) not in within:
            continue
        if anonymous and size and int(anonymous[1]) * int(size[1]) * 1024 >= least:
            for node, pages in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] = found.get(int(node), 0) + int(pages) * int(size[1]) * 1024
    return found


def cpus_allowed(task: Path) -> set[int]:
    return set(parse_cpu_list(re.search(r"^Cpus_allowed_list:\s+(\S+)", (task / "status").read_text(), re.M)[1]))


async def until_logged(log: Path, pattern: str, process: subprocess.Popen, seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
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
                assert cpus_allowed(task) <= set(node.cpus)
                assert f" bind:{node.number} " in Path(f"/proc/{task.name}/numa_maps").read_text()
            await link.close()
            await until_logged(log, "lease of 63 pages ended after", process)
            assert not bytes_by_node(process.pid, 60 * MIB)
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()


@pytest.mark.skipif(len(NODES) < 2, reason="one NUMA node")
async def test_each_rank_has_a_numa_node_for_its_threads_its_weights_and_its_kv_cache(tmp_path):
    n, log = len(NODES), tmp_path / "log"
    options = ["--tensor-parallel", str(n), "--device", "cpu", "--s-threads", "1", "--threads", "1", "--port", "0"]
    options += ["--kv-memory", f"{64 * n}MiB", "--prefault", "--api-processes", "0"]
    command = [sys.executable, "-m", "fastdecode.daemon.node", *options]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as process:
        try:
            await until_logged(log, r"(?s)(100 %.*){2}http://127\.0\.0\.1", process, 280.0)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for node, pid in zip(NODES, [process.pid, *map(int, children)], strict=True):
                tasks = list(Path(f"/proc/{pid}/task").iterdir())
                attending = [task for task in tasks if (task / "comm").read_text().startswith("fd-r")]
                main = Path(f"/proc/{pid}/task/{pid}")  # the thread of the S-Part comes from it
                assert attending and all(cpus_allowed(task) <= set(node.cpus) for task in [main, *attending])
                ((number, n_bytes),) = bytes_by_node(pid, 0, in_huge_pages(pid)).items()
                assert number == node.number and n_bytes > 65 * MIB  # 63 MiB are the lease's
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()
