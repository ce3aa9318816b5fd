"""The C code on aarch64, except for the kernels, which tests/kernels tests.

The emulator keeps this machine's memory order. These tests show that the code builds and works on aarch64, not that its
fences suffice.
"""

from __future__ import annotations

import subprocess

from attention.emulated import EMULATOR, cross_build, cross_compile, needs_emulator
from sources.folders import ENGINE, ROOT

pytestmark = [*needs_emulator]


def test_an_engine_answers_hostile_calls_and_its_other_link_stays_right() -> None:
    program = cross_build([ROOT / "tests/c/fuzz_engine.c", *ENGINE])
    run = subprocess.run([EMULATOR, program, "10"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    answers = [int(line.split()[0]) for line in run.stdout.splitlines()]
    assert len(answers) == 5 and min(answers) > 10, run.stdout


def test_transports_compile_without_a_warning() -> None:
    for name in ("port", "rdma_poster", "tcp_pump"):
        cross_compile(ROOT / f"transports/{name}.c")
