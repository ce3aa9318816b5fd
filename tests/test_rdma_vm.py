"""What this machine may lack, in a virtual one with Soft-RoCE devices and two NUMA nodes (tests/rdma/guest.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "rdma"))
import guest

BOOT_S = 1500.0


@pytest.mark.timeout(BOOT_S + 60)
def test_rdma_links_and_numa_nodes_in_a_virtual_machine():
    try:
        guest.check()
    except guest.NotHere as error:
        pytest.skip(str(error))
    assert importlib.util.find_spec("fastdecode.transports._native")
    here = Path(__file__).parent
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=300", "--durations=15"]
    files = [str(here / f"test_{name}.py") for name in ("numa", "transports", "rdma_links")]
    status, output = guest.run([*pytest_, "-k", "rdma or numa", *files], BOOT_S)
    assert status == 0, output[-8000:]
    assert " passed" in output
