"""Builds the R-engine without Python under ThreadSanitizer and loads it from many threads at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sources import ENGINE, INCLUDES, ROOT

#: Only the scalar kernels: the vector kernels share the code that threads run, and take long to compile.
SOURCES = [
    ROOT / "tests/c/race_engine.c",
    *(path for path in ENGINE if path.parent.name != "attention" or path.stem in ("attention_scalar", "isa")),
]
SECONDS = int(os.environ.get("FASTDECODE_FUZZ_S", "5"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    target = tmp_path_factory.mktemp("race") / "race_engine"
    # gcc warns that ThreadSanitizer does not understand fences. They only order wake-ups, no data.
    flags = ["-std=gnu11", "-g1", "-O2", "-Wno-tsan", "-fsanitize=thread", *INCLUDES]
    subprocess.run(["gcc", *flags, *SOURCES, "-pthread", "-lm", "-o", target], check=True)
    return target


@pytest.mark.timeout(600 + 3 * SECONDS)
@pytest.mark.parametrize("threads", [1, 3, 10])
def test_calls_of_several_links_race_control_calls_and_links_that_come_and_go(program: Path, threads: int) -> None:
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    argv = [program, str(threads), str(SECONDS)]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS + 180, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    calls, controls, links = (int(part.split()[0]) for part in run.stdout.split(","))
    assert calls > 50 and controls > 100 and links >= 3, run.stdout
