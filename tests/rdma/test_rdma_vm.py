"""Tests that need RDMA devices or two NUMA nodes, in a virtual machine that has both (tests/rdma/guest.py)."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator

import guest
import pytest
from gpu.functions_on_driver import SMALL_LAYER
from gpu.layers_compiled import compile_layer
from nodes.rnode_process import KV_BYTES, PULL_THE_PLUG
from sources.compiled import compile_all
from sources.folders import ROOT
from wire.link_driver import CYCLES

TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
BOOT_S = 120.0
TESTS_S = 1500.0 + 60.0 * CYCLES
ALL = "FASTDECODE_RDMA_ALL" in os.environ

#: A test may run two guests (guest.run). The limit of a guest ends before that of its test, which then prints the
#: guest's console.
pytestmark = [pytest.mark.tools, pytest.mark.timeout(2 * (BOOT_S + TESTS_S + 60.0))]

#: The address of the R-node in the conformance suite, and a command that prepares the wire.
NETEM = "for i in va vb; do tc qdisc add dev $i root netem delay 100us reorder 95% loss 0.1%; done"
PATHS = {"wire": ("10.8.0.2", ":"), "loopback": ("127.0.0.1", ":"), "wire that loses and reorders": ("10.8.0.2", NETEM)}


@pytest.fixture(autouse=True)
def alone_here() -> Iterator[None]:
    """Skips where there are no guests. One test at a time has some: more of them starve each other."""
    try:
        guest.check()
    except guest.NotHere as error:
        pytest.skip(str(error))
    with (guest.cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def suite_of(*arguments: str) -> str:
    """The command that runs pytest in a guest."""
    return (
        f"exec {sys.executable} -m pytest -v -n0 -p no:cacheprovider -o timeout=600 --durations=8 {' '.join(arguments)}"
    )


def passed(status: int | None, output: str) -> None:
    assert status == 0, output[-8000:]
    assert " passed" in output
    assert " failed" not in output


@pytest.mark.parametrize("path", PATHS)
def test_conformance(path, tmp_path):
    """The conformance suite; on the first path also the tests of RDMA links, of NUMA nodes and of devices."""
    which, files = "rdma", ["transports/test_transports.py", "transports/test_link_faults.py"]
    if path == "wire":
        which = "(rdma or numa)"
        files += ["rdma/test_rdma_links.py", "rengine/test_numa.py"]
        files += ["transports/test_device.py", "gpu/test_replays.py", "gpu/test_gpu_links.py"]
        compile_all(tmp_path)
        compile_layer(SMALL_LAYER, tmp_path)
    if not ALL:
        if path != "wire":
            pytest.skip("takes minutes, and FASTDECODE_RDMA_ALL is not set")
        # One test starts an R-node for every frame, and one an S-node of two ranks.
        which += " and not hand_shake and not each_rank"
    host, first = PATHS[path]
    suite = suite_of("-k", f"'{which}'", *(str(TESTS / name) for name in files))
    given = f"export FASTDECODE_RDMA_HOST={host} FASTDECODE_COMPILED={tmp_path}"
    passed(*guest.run(["sh", "-c", f"{first}; {given}; {suite}"], BOOT_S + TESTS_S))


def test_two_machines_and_one_loses_its_power(tmp_path):
    url = "rdma://10.9.0.1:7300"
    wire = f"addr.type=unix,addr.path={tmp_path}/wire"
    which = "rdma" if ALL else "rdma and (float64 or torn or power)"
    files = ("transports/test_transports.py", "rdma/test_rdma_hosts.py")
    suite = suite_of("-k", f"'{which}'", *(str(TESTS / name) for name in files))
    script = f"{sys.executable} {HELPERS / 'nodes/rnode_process.py'} {url} {KV_BYTES}"
    r_node = ["sh", "-c", f"export PYTHONPATH=$PYTHONPATH:{HELPERS}; exec {script}"]
    hosts = [guest.Guest(r_node, f"stream,server=on,{wire}", 1)]
    try:
        assert hosts[0].says(url, BOOT_S), hosts[0].end()
        s_node = ["sh", "-c", f"export FASTDECODE_R_NODE={url}; {suite}"]
        hosts.append(guest.Guest(s_node, f"stream,server=off,{wire}", 2))
        assert hosts[1].says(PULL_THE_PLUG, BOOT_S + TESTS_S), hosts[1].end()
        hosts[0].end()
        passed(*hosts[1].end(TESTS_S))
    finally:
        for host in hosts:
            host.end()
