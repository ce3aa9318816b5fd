"""The steps of docs/adding-a-model.md and docs/adding-a-transport.md, taken to the letter in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "bench", "model", "results")


def follow(page: Path, tree: Path) -> None:
    """Make the files and the changes that a page shows in blocks with a file's name for a title."""
    blocks = re.findall(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', page.read_text(), re.M | re.S)
    assert blocks
    for language, name, text in blocks:
        path = tree / name
        if language != "diff":
            path.write_text(text)
            continue
        old, new = (
            "".join(line[1:] + "\n" for line in text.splitlines() if line.startswith(sign)) for sign in ("-", "+")
        )
        assert path.read_text().count(old) == 1, f"{page.name} changes {old!r}, which {name} lacks"
        path.write_text(path.read_text().replace(old, new))


def run_tests(page: Path, tree: Path, *arguments: str) -> str:
    """The output of pytest in a copy of the tree at `tree`, changed as `page` says; its tests must pass."""
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_LEFT_OUT)
    follow(page, tree)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.timeout(300)
def test_the_transport_of_the_page_passes_the_conformance_suite(tmp_path: Path) -> None:
    output = run_tests(ROOT / "docs/adding-a-transport.md", tmp_path / "tree", "tests/transports", "-k", "unix")
    assert re.search(r"^[2-9]\d passed", output, re.M), output[-1000:]


@pytest.mark.timeout(300)
def test_the_model_family_of_the_page_equals_transformers(tmp_path: Path) -> None:
    files = ["tests/spart/test_loader.py", "tests/spart/test_spart.py"]
    output = run_tests(ROOT / "docs/adding-a-model.md", tmp_path / "tree", *files, "-k", "starcoder2")
    assert re.search(r"^[12]\d passed", output, re.M), output[-1000:]
