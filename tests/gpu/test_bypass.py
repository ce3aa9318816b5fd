"""The bypass as a whole on the simulated driver: its own exchange, streams, graphs and driver module.

torch's operations run on the CPU, as host functions of the captured graphs (tests/helpers/gpu/bypass_on_driver.py); the
module that captures with torch on a GPU (fastdecode/spart/exchange/graph.py) is the only one replaced.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu import cuda_driver
from models.checkpoints import make_checkpoint
from nodes.forked import run_script
from sources.compiled import compile_all

pytestmark = pytest.mark.tools

SCRIPTS = Path(__file__).parents[1] / "helpers/gpu"


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


def run(libraries: Path, *arguments: str, script: str = "bypass_on_driver.py") -> Any:
    """What the script prints."""
    environment = os.environ | {"FASTDECODE_COMPILED": str(libraries)}
    return run_script(SCRIPTS / script, *arguments, env=environment)


@pytest.mark.parametrize(("queues", "n_links"), [(1, 2), (8, 1), (32, 2)])
def test_tokens_are_those_of_the_cpu(queues, n_links, libraries):
    """Two mini-batches, prompts in chunks, tokens drawn within the graphs and behind them."""
    [found] = run(libraries, str(queues), str(n_links), str(make_checkpoint("llama-gqa")), "1")
    assert len(found["captured"]) == 2 and all(found["captured"])
    assert found["equal"] == [True] and found["fault"] == [""] and found["failed"] == []


def test_engines_of_one_process_give_everything_back(libraries):
    """One engine, then two at once. The driver refuses memory that is registered already."""
    found = run(libraries, "8", "1", str(make_checkpoint("llama-gqa")), "1", "2")
    assert [one["equal"] for one in found] == [[True], [True, True]]
    assert [one["fault"] for one in found] == [[""], ["", ""]]
    assert [one["left"] for one in found] == [{}, {}]


def test_the_decode_benchmark_takes_the_bypass(libraries):
    """The split system in two mini-batches, and its S-Part alone over links that answer by themselves."""
    found = run(libraries, str(make_checkpoint("llama-gqa")), script="decoding_on_driver.py")
    assert found["exchanges"] == ["bypass", "bypass"] and found["failed"] == []
    assert len(found["captured"]) == 4 and all(found["captured"])
    assert found["left"] == {}


def test_sequences_are_cut_at_every_page_border(libraries):
    """Their pages in the driver's memory, and the page kernels in its graphs, which are compiled for the host."""
    found = run(libraries, "driver", "fp16", str(make_checkpoint("llama-gqa")), script="lying_cuts.py")
    assert found["equal"] and found["cuts"] == found["waited"] == 2


@pytest.mark.parametrize(("case", "alive"), [("refilled", 1), ("two killed while refilling", 0)])
def test_an_engine_moves_cuts_and_loses_r_nodes(case, alive, libraries):
    """Spilled and refilled while sequences decode, then a FORK; see tests/spart/test_resident.py."""
    found = run(libraries, case, "driver", str(make_checkpoint("llama-gqa")), script="lying_resident.py")
    assert found["equal"] and found["left"] == 0 and found["captured"] and found["merged"] and found["copied"]
    assert found["spilled"] and bool(found["refilled"]) == bool(alive) == (not found["recomputed"])
    assert sum(found["alive"][1:]) == alive
