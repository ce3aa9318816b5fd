"""What a wheel contains: an editable install, which most work is done in, hides a package that is missing from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from sources.folders import ROOT

pytestmark = pytest.mark.quick

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def files() -> list[Path]:
    """The files of the package, relative to the checkout; fastdecode has links to folders beside it. The benchmarks'
    results stand beside their code and are in no wheel.
    """
    return [
        Path(folder, name).relative_to(ROOT)
        for folder, _, names in os.walk(ROOT / "fastdecode", followlinks=True)
        for name in names
        if "__pycache__" not in folder and Path(folder) != ROOT / "fastdecode/bench/results"
    ]


def test_every_folder_of_modules_is_listed_once():
    folders = {".".join(path.parent.parts) for path in files() if path.suffix == ".py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders)


def test_every_other_file_that_is_read_at_run_time_is_listed():
    """Sources in C and the extensions made from them are not package data."""
    for path in files():
        if path.suffix in (".py", ".pyi", ".c", ".h", ".so"):
            continue
        listed = [
            pattern
            for package, patterns in SETUPTOOLS["package-data"].items()
            for pattern in patterns
            if fnmatch(str(path), f"{package.replace('.', '/')}/{pattern}")
        ]
        assert listed, f"{path} is in no wheel"


def test_a_package_index_shows_readme_without_links_to_files():
    """They lead nowhere there. The name of every link is still there."""
    command = [sys.executable, "setup.py", "-q", "--long-description"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    assert "docs/operations.md" not in shown and "operations" in shown and "<!--" not in shown
