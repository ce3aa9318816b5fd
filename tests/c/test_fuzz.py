"""Builds the R-engine and the TCP pump without Python under sanitizers and runs the fuzzers of tests/c on them.

With clang they are libFuzzer targets; without it gcc builds them with a driver that makes pseudo-random inputs. A run
is short and begins with the same inputs every time; FASTDECODE_FUZZ_S=600 lets each go on for ten minutes.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sources.folders import ENGINE, INCLUDES, ROOT

pytestmark = pytest.mark.tools

PORT = [ROOT / "transports" / name for name in ("port.c", "await.c", "tcp_pump.c", "tcp_receive.c", "rdma_poster.c")]
SECONDS = int(os.environ.get("FASTDECODE_FUZZ_S", "0"))
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
#: FD_QUICK_BUILD, because all-inlined kernels with the sanitizers' checks in them take minutes to compile.
FLAGS = ["-std=gnu11", "-g1", "-O2", "-DFD_QUICK_BUILD", SANITIZERS, "-fno-sanitize-recover=all", *INCLUDES]


@functools.cache
def clang() -> str | None:
    """A clang that has libFuzzer."""
    for name in ("clang", *(f"clang-{version}" for version in range(22, 13, -1))):
        if path := shutil.which(name):
            command = [path, "-fsanitize=fuzzer,address", "-x", "c", "-", "-o", "/dev/null"]
            empty = "int LLVMFuzzerTestOneInput(const void *d, long n) { return 0; }"
            if subprocess.run(command, input=empty, text=True, capture_output=True).returncode == 0:
                return path
    return None


@pytest.fixture(scope="module")
def link_fuzzer(tmp_path_factory):
    """A function that links a fuzzer of tests/c; the code that the fuzzers share is compiled once."""
    if not (compiler := clang() or shutil.which("gcc")):
        pytest.skip("needs clang or gcc")
    folder = tmp_path_factory.mktemp("objects")

    @functools.cache
    def build(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        driver = ["-fsanitize=fuzzer-no-link", "-DFD_LIBFUZZER"] if clang() else []
        subprocess.run([compiler, *FLAGS, *driver, "-c", source, "-o", target], check=True)
        return target

    def link(name: str, sources: list[Path]) -> Path:
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(build, [*sources, ROOT / f"tests/c/{name}.c"]))
        driver = ["-fsanitize=fuzzer"] if clang() else []
        subprocess.run([compiler, SANITIZERS, *driver, *objects, "-pthread", "-lm", "-o", folder / name], check=True)
        return folder / name

    return link


def fuzz(program: Path, inputs: int) -> list[int]:
    """Run a fuzzer. Returns the counts that it prints."""
    if clang():
        corpus = program.parent / f"{program.name}-corpus"
        corpus.mkdir()
        rng = random.Random(1)
        for i in range(inputs // 2):
            (corpus / str(i)).write_bytes(rng.randbytes(rng.randrange(100, 4000)))
        enough = [f"-max_total_time={SECONDS}"] if SECONDS else [f"-runs={inputs}"]
        argv = [program, "-seed=1", "-max_len=4096", "-timeout=60", *enough, corpus]
    else:
        argv = [program, str(inputs), "1", str(SECONDS)]
    environment = os.environ | {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=program.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    return [int(line.split()[0]) for line in run.stdout.splitlines()]


@pytest.mark.timeout(600 + SECONDS)
def test_hostile_steps_trip_no_sanitizer_and_cost_others_nothing(link_fuzzer):
    answers = fuzz(link_fuzzer("fuzz_engine", ENGINE), 80)
    assert len(answers) == 5 and min(answers) > 30  # the fuzzer reaches every kind of answer


@pytest.mark.timeout(600 + SECONDS)
def test_hostile_bytes_on_a_data_connection_end_their_link_and_nothing_else(link_fuzzer):
    counts = fuzz(link_fuzzer("fuzz_pump", ENGINE + PORT), 80)
    assert len(counts) == 5 and min(counts) > 30
