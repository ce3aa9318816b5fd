"""Compiles the products of 16-bit weights without Python, and gives them those of an ISA that multiplies all outputs at
once, which few machines have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from sources.folders import INCLUDES, ROOT

pytestmark = pytest.mark.quick


def test_products_are_shared_among_threads_by_their_sizes(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    sources = [ROOT / "tests/c/dense16_tasks.c", *ROOT.glob("kernels/linears/dense16*.c")]
    sources += [ROOT / f"kernels/cpu/{name}.c" for name in ("isa", "parallel")]
    program = tmp_path / "dense16_tasks"
    flags = ["-std=gnu11", "-Wall", "-DFD_QUICK_BUILD", "-fsanitize=address,undefined", *INCLUDES]
    subprocess.run(["gcc", *flags, *sources, "-pthread", "-lm", "-o", program], check=True)
    subprocess.run([program], check=True)
