"""The text of the source: linted, no line wider than 120 columns, things named instead of pointed at."""

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


#: Words in place of the name of a thing or of a number. A comment's line may end between two of them.
VAGUE = re.compile(r"\b(?:those[\s*#/]+that|so[\s*#/]+many)\b", re.IGNORECASE)


def vague(root: Path, folders: Iterable[str]) -> list[str]:
    """Where code and pages say VAGUE, as FILE:LINE."""
    paths = source_files(root, folders, "py", "pyi", "c", "h", "cu", "js", "md")
    texts = {path.relative_to(root): path.read_text() for path in [*root.glob("*.md"), *paths]}
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}"
        for path, text in texts.items()
        for found in VAGUE.finditer(text)
    ]


def test_few_sentences_point_at_things_that_they_could_name():
    assert len(vague(ROOT, FOLDERS)) < 10, vague(ROOT, FOLDERS)


def test_a_sentence_that_points_is_found(tmp_path):
    (tmp_path / "a.md").write_text("Pages, and\nthose\nthat are free.")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/b.h").write_text("int x;\n/* So\n * many rows, and so many\n * pages. Those are that. */")
    assert vague(tmp_path, ["docs"]) == ["a.md:2", "docs/b.h:2", "docs/b.h:3"]


def test_the_top_of_the_s_part_has_at_most_eight_files():
    """A reader finds the way by its folders."""
    assert len(list((ROOT / "fastdecode/spart").glob("*.py"))) <= 8


def test_children_import_the_installed_package():
    """Without -P, `python -m` in a checkout imports the folder `fastdecode`, which has no C after `pip install .`."""
    starts = r"(sys\.executable|python\d?),\s*\"-m\""
    sources = source_files(ROOT, ("bench", "fastdecode"), "py")
    assert [path.name for path in sources if re.search(starts, path.read_text())] == []


def test_every_environment_variable_is_documented():
    sources = source_files(ROOT, FOLDERS, "py", "c", "h", "sh")
    used = {name for path in sources for name in re.findall(r"\bFASTDECODE_[A-Z_]+", path.read_text())}
    table = re.findall(r"^\| `(FASTDECODE_[A-Z_]+)`", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
    assert sorted(used) == sorted(table)
