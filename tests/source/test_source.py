"""The source itself: linted, and imports that point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

#: What each part of the package may import of the others. The wiring (node, snode, rnode, bench) may import anything.
MAY_IMPORT = {
    "kernels": set(),
    "transports": set(),
    "fastdecode/demo": set(),
    "fastdecode/text": set(),
    "fastdecode/spart": {"transports"},
    "fastdecode/engine": {"spart", "transports"},
    "fastdecode/api": {"engine"},
}
#: Modules without a folder of their own that anybody may use.
COMMON = {"", "text"}


def test_ruff_is_silent():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def imported_parts(path: Path) -> set[str]:
    """First components below `fastdecode` of everything a file imports, type checking included."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [
                f"{node.module}.{alias.name}" if node.module == "fastdecode" else node.module for alias in node.names
            ]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("fastdecode.")}
    return parts


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder):
    own = folder.rpartition("/")[2]
    files = list((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        parts = imported_parts(path) - COMMON - {own, "__version__"}
        assert parts <= MAY_IMPORT[folder], f"{path} imports {parts - MAY_IMPORT[folder]}"
