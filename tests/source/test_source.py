"""The text of the source: linted, and no line wider than 120 columns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from sources.folders import ROOT, source_files

pytestmark = pytest.mark.quick

FOLDERS = ("fastdecode", "region", "kernels", "transports", "tests", "bench", "bin", "docs", "examples", "scripts")
WIDTH = 120


def test_ruff_is_silent():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def too_wide(root: Path, folders: Iterable[str]) -> list[str]:
    """The lines of C and Python that are wider than WIDTH, as FILE:LINE."""
    return [
        f"{path.relative_to(root)}:{number}"
        for path in source_files(root, folders, "py", "pyi", "c", "h")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > WIDTH
    ]


def test_no_line_is_too_wide():
    assert not too_wide(ROOT, FOLDERS)


def test_a_line_that_is_too_wide_is_found(tmp_path):
    (tmp_path / "a.py").write_text("#" * 120 + "\n" + "#" * 121 + "\n")
    (tmp_path / "b.h").write_text("/* " + "é" * 118 + "\n")
    assert too_wide(tmp_path, ["."]) == ["a.py:2", "b.h:1"]


def test_every_environment_variable_is_documented():
    sources = source_files(ROOT, FOLDERS, "py", "c", "h", "sh")
    used = {name for path in sources for name in re.findall(r"\bFASTDECODE_[A-Z_]+", path.read_text())}
    table = re.findall(r"^\| `(FASTDECODE_[A-Z_]+)`", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
    assert sorted(used) == sorted(table)
