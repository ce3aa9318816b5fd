"""Builds the R-engine, the pool of threads and the sums over ranks without Python under ThreadSanitizer, and loads them
from many threads at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sources.folders import ENGINE, INCLUDES, ROOT

#: Only the scalar kernels: the vector kernels share the code that threads run, and take long to compile.
SOURCES = [
    ROOT / "tests/c/race_engine.c",
    *(path for path in ENGINE if path.parent.name != "attention" or path.stem in ("attention_scalar", "select")),
]
SECONDS = int(os.environ.get("FASTDECODE_FUZZ_S", "0"))


pytestmark = pytest.mark.timeout(600 + 3 * SECONDS)


def build(folder: Path, name: str, sources: list[Path], sanitizers: str = "thread") -> Path:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    # gcc warns that ThreadSanitizer does not understand fences. They only order wake-ups, no data.
    flags = ["-std=gnu11", "-g1", "-O2", "-Wno-tsan", f"-fsanitize={sanitizers}", *INCLUDES]
    subprocess.run(["gcc", *flags, *sources, "-pthread", "-lm", "-o", folder / name], check=True)
    return folder / name


def counts(program: Path, threads: int, seconds: int) -> list[int]:
    """The numbers that a program prints. It runs for `seconds`, unless the environment says for how many."""
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    argv = [program, str(threads), str(SECONDS or seconds)]
    run = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return [int(part.split()[0]) for part in run.stdout.split(",")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("race"), "race_engine", SOURCES)


@pytest.mark.parametrize("threads", [1, 3, 10])
def test_calls_of_several_links_race_control_calls_and_links_that_come_and_go(engine: Path, threads: int) -> None:
    calls, controls, links = counts(engine, threads, 5)
    assert calls > 200 and controls > 1000 and links > 5


@pytest.mark.parametrize("threads", [2, 5])
def test_each_part_of_a_loop_runs_once(tmp_path: Path, threads: int) -> None:
    sources = [ROOT / "tests/c/race_parallel.c", ROOT / "kernels/cpu/parallel.c"]
    loops, taken = counts(build(tmp_path, "race_parallel", sources), threads, 2)
    assert loops > 1000 and taken > 100


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_ranks_race_through_their_sums(tmp_path: Path, sanitizers: str) -> None:
    names = ("cpu/parallel", "cpu/isa", "decoder/reduction", "decoder/rank_watch", "decoder/decoder_scalar")
    sources = [ROOT / "tests/c/race_reduction.c", *(ROOT / f"kernels/{name}.c" for name in names)]
    sums, shared = counts(build(tmp_path, "race_reduction", sources, sanitizers), 3, 2)
    assert sums > 100 and shared > 20
