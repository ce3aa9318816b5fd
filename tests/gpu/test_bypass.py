"""The bypass as a whole on the simulated driver: its own exchange, streams, graphs and driver module.

torch's operations run on the CPU, as host functions of the captured graphs (tests/helpers/gpu/bypass_on_driver.py); the
module that captures with torch on a GPU (fastdecode/spart/exchange/graph.py) is the only one replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import cuda_driver
from models.checkpoints import make_checkpoint
from sources.compiled import compile_all

pytestmark = [pytest.mark.tools, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/bypass_on_driver.py"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the simulated driver."""
    if reason := cuda_driver.missing():
        pytest.skip(reason)
    if cuda_driver.has_driver():
        pytest.skip("this machine has a driver of its own")
    if before := os.environ.get("FASTDECODE_COMPILED"):
        return Path(before)
    folder = tmp_path_factory.mktemp("driver")
    compile_all(folder)
    return folder


@pytest.mark.parametrize(("queues", "n_links"), [(1, 2), (8, 1), (32, 2)])
def test_tokens_are_those_of_the_cpu(queues, n_links, libraries):
    """Two mini-batches, prompts in chunks, tokens drawn within the graphs and behind them."""
    arguments = [str(queues), str(n_links), str(make_checkpoint("llama-gqa"))]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    environment = os.environ | {"FASTDECODE_COMPILED": str(libraries)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert len(found["captured"]) == 2 and all(found["captured"])
    assert found == {"equal": True, "captured": found["captured"], "fault": "", "failed": []}
