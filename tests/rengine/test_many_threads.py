"""How the work of a step is cut for any number of threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from attention.rengine_peer import KV_FP16, Geometry, Link
from sources.folders import INCLUDES, ROOT

from fastdecode.kernels import _native


def test_the_cuts_of_a_step_are_exact_for_1_to_512_threads(tmp_path: Path) -> None:
    program = tmp_path / "cut_line"
    sources = [ROOT / "tests/c/cut_line.c", *sorted((ROOT / "kernels/cache").glob("*.c"))]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", "-std=gnu11", "-O1", *sanitizers, *INCLUDES, *sources, "-o", program], check=True)
    run = subprocess.run([program, "20000"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "20000 steps cut\n"), run.stderr


@pytest.mark.parametrize("threads, tokens", [(96, 750), (128, 1000)])
def test_more_threads_than_the_work_needs(threads: int, tokens: int) -> None:
    """Items shrink towards the end of a call, down to nothing where threads are many and work is little."""
    engine = _native.REngine(threads, 1 << 30, spin_us=0)
    g = Geometry(max_rows=1024, n_layers=1, n_q_heads=32, n_kv_heads=8, head_size=64)
    link = Link(engine, g, KV_FP16, n_pages=64 * 8, max_seqs=64)
    try:
        for seq_index in range(64):
            link.fill(seq_index, tokens)
        link.step(0, [(seq_index, 1, True) for seq_index in range(64)])
    finally:
        link.close()
        engine.close()


def test_work_that_is_stopped_after_every_unit_gives_the_same_bits(tmp_path: Path) -> None:
    program = tmp_path / "stops"
    kernels = [ROOT / f"kernels/attention/{name}.c" for name in ("attention_scalar", "select")]
    kernels += sorted((ROOT / "kernels/cache").glob("*.c"))
    flags = ["-std=gnu11", "-O1", "-DFD_QUICK_BUILD", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [ROOT / "tests/c/stops.c", *kernels]
    subprocess.run(["gcc", *flags, *INCLUDES, *sources, "-lm", "-o", program], check=True)
    run = subprocess.run([program, "240"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    steps, merged, copied, stops = (int(part.split()[0]) for part in run.stdout.split(","))
    assert (steps, merged, copied) == (240, 1, 1) and stops > 1000
