"""The C compiles without a warning, the extension modules included. Nothing is built, so this takes seconds."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sources.folders import INCLUDES, ROOT, source_files

pytestmark = pytest.mark.quick

SOURCES = source_files(ROOT, ("region", "kernels", "transports", "tests/c", "tests/gpu"), "c")
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fsyntax-only"]
FLAGS += [*INCLUDES, f"-I{sysconfig.get_path('include')}"]
#: verbs_abi.c needs libibverbs' headers: tests/rdma/test_rdma.py compiles it where they are.
NEEDS_MORE = {"verbs_abi.c"}


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=pytest.mark.tools)])
def test_c_compiles_without_a_warning(compiler: str) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"needs {compiler}")

    def complaints(source: Path) -> str:
        return subprocess.run([compiler, *FLAGS, source], capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(complaints, [path for path in SOURCES if path.name not in NEEDS_MORE]))
    assert len(said) > 30
    assert not any(said), "\n".join(said)
