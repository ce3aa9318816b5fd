"""Builds the R-engine without Python under AddressSanitizer and UBSan and lets tests/c/fuzz_engine.c loose on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The engine and its kernels, without the CPython module over them.
SOURCES = [p for p in sorted(ROOT.glob("kernels/*.c")) if p.name != "module.c" and not p.name.startswith("py_")]
SOURCES.append(ROOT / "tests/c/fuzz_engine.c")
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
FLAGS = ["-std=gnu11", "-O1", SANITIZERS, "-fno-sanitize-recover=all"]


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.timeout(300)
def test_hostile_calls_trip_no_sanitizer_and_cost_others_nothing(tmp_path):
    def build(source: Path) -> Path:
        target = tmp_path / f"{source.stem}.o"
        subprocess.run(["gcc", *FLAGS, "-I", ROOT / "kernels", "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, SOURCES))
    program = tmp_path / "fuzz_engine"
    subprocess.run(["gcc", SANITIZERS, *objects, "-pthread", "-lm", "-o", program], check=True)
    environment = os.environ | {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = subprocess.run([program], capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    answers = [int(line.split()[0]) for line in run.stdout.splitlines()]
    assert len(answers) == 5 and min(answers) > 50, run.stdout  # the fuzzer gets through to every kind of answer
