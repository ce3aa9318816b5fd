"""Compiles the joints (kernels/decoder/joint.c) without Python, and looks at the addresses that products get."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from sources.folders import INCLUDES, ROOT

pytestmark = pytest.mark.quick


def test_a_steps_products_read_and_write_whole_lines(tmp_path: Path) -> None:
    """malloc's memory may begin 16 bytes into a line. AMX stored no output of a step past the caches then."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    sources = [ROOT / "tests/c/joint_lines.c", *(ROOT / f"kernels/decoder/{name}.c" for name in ("joint", "product"))]
    program = tmp_path / "joint_lines"
    flags = ["-std=gnu11", "-Wall", "-fsanitize=address,undefined", *INCLUDES]
    subprocess.run(["gcc", *flags, *sources, "-lm", "-o", program], check=True)
    subprocess.run([program], check=True)
