"""The tests of RDMA links in virtual machines with Soft-RoCE devices (tests/rdma/guest.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "rdma"))
import guest
from rnode_process import KV_BYTES
from test_rdma_hosts import PULL_THE_PLUG

HERE = Path(__file__).parent
BOOT_S = 120.0
TESTS_S = 1500.0

pytestmark = pytest.mark.timeout(BOOT_S + TESTS_S)

#: Where the conformance suite has its R-node, and what is done to the wire first.
NETEM = "for i in va vb; do tc qdisc add dev $i root netem delay 100us reorder 95% loss 0.1%; done"
PATHS = {"wire": ("10.8.0.2", ":"), "loopback": ("127.0.0.1", ":"), "wire that loses and reorders": ("10.8.0.2", NETEM)}


@pytest.fixture(autouse=True)
def here() -> None:
    try:
        guest.check()
    except guest.NotHere as error:
        pytest.skip(str(error))


def suite_of(*arguments: str) -> str:
    """A command for a guest."""
    return f"exec {sys.executable} -m pytest -v -p no:cacheprovider -o timeout=300 --durations=8 {' '.join(arguments)}"


def passed(status: int | None, output: str) -> None:
    assert status == 0, output[-8000:]
    assert " passed" in output
    assert " failed" not in output


@pytest.mark.parametrize("path", PATHS)
def test_conformance(path):
    """What every link does; on the first path also what is RDMA's own."""
    files = ["test_transports.py", "test_link_faults.py"]
    if path == "wire":
        files.append("test_rdma_links.py")
    elif "FASTDECODE_RDMA_ALL" not in os.environ:
        pytest.skip("takes minutes, and FASTDECODE_RDMA_ALL is not set")
    host, first = PATHS[path]
    suite = suite_of("-k", "rdma", *(str(HERE / name) for name in files))
    passed(*guest.run(["sh", "-c", f"{first}; export FASTDECODE_RDMA_HOST={host}; {suite}"], BOOT_S + TESTS_S))


def test_two_machines_and_one_loses_its_power(tmp_path):
    socket = tmp_path / "wire"
    url = "rdma://10.9.0.1:7300"
    wire = f"addr.type=unix,addr.path={socket}"
    r_node = [sys.executable, str(HERE / "rnode_process.py"), url, str(KV_BYTES)]
    r_host = guest.Guest(r_node, f"stream,server=on,{wire}", 1)
    s_host = None
    try:
        suite = suite_of("-k", "rdma", *(str(HERE / name) for name in ("test_transports.py", "test_rdma_hosts.py")))
        assert r_host.says(url, BOOT_S), r_host.end()
        s_host = guest.Guest(["sh", "-c", f"export FASTDECODE_R_NODE={url}; {suite}"], f"stream,server=off,{wire}", 2)
        assert s_host.says(PULL_THE_PLUG, BOOT_S + TESTS_S), s_host.end()
        r_host.end()
        passed(*s_host.end(TESTS_S))
    finally:
        for host in (r_host, s_host):
            if host:
                host.end()
