"""The tests of RDMA links in a virtual machine with Soft-RoCE devices (tests/rdma/guest.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "rdma"))
import guest

BOOT_S = 1500.0


@pytest.mark.timeout(BOOT_S + 60)
def test_rdma_links_in_a_virtual_machine():
    try:
        guest.check()
    except guest.NotHere as error:
        pytest.skip(str(error))
    assert importlib.util.find_spec("fastdecode.transports._native")
    here = Path(__file__).parent
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=300", "--durations=15"]
    status, output = guest.run(
        [*pytest_, "-k", "rdma", str(here / "test_transports.py"), str(here / "test_rdma_links.py")], BOOT_S
    )
    assert status == 0, output[-8000:]
    assert " passed" in output
