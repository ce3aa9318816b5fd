"""The steps of docs/adding-a-*.md, taken to the letter in a copy of the tree."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sources.folders import ROOT

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "results")


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


def copy_tree(page: Path, tree: Path) -> None:
    """Make a copy of the tree at `tree`, changed as `page` says."""
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_LEFT_OUT)
    for room in ("region", "kernels", "transports"):  # built in place only where fastdecode is installed editable
        built = Path(str(importlib.import_module(f"fastdecode.{room}._native").__file__))
        shutil.copy(built, tree / room)
    follow(page, tree)


def run_tests(tree: Path, *arguments: str) -> str:
    """The output of pytest in the tree; its tests must pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.timeout(600)
def test_the_transport_of_the_page_passes_the_conformance_suite(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_tree(ROOT / "docs/adding-a-transport.md", tree)
    output = run_tests(tree, "tests/transports", "-k", "unix")
    assert re.search(r"^[2-9]\d passed", output, re.M), output[-1000:]


@pytest.mark.timeout(600)
def test_the_model_family_of_the_page_equals_transformers(tmp_path: Path) -> None:
    page, tree = ROOT / "docs/adding-a-model.md", tmp_path / "tree"
    copy_tree(page, tree)
    *_, step_7 = re.findall(r"^pytest ((?:.*\\\n)*.* -k starcoder2)$", page.read_text(), re.M)
    output = run_tests(tree, *step_7.replace("\\\n", "").split())
    assert re.search(r"^[2-9]\d passed", output, re.M), output[-1000:]


# ---- docs/adding-a-kv-format.md, docs/adding-an-isa.md ----

KERNELS = ROOT / "kernels/attention"
ISA_PAGE = (ROOT / "docs/adding-an-isa.md").read_text()
#: The files that the page's tables of primitives call by these names.
DEFINED_IN = {
    "AVX2": ["../cpu/vec_avx2.h", "kv_avx2.h", "attention_avx2.c"],
    "AVX-512": ["../cpu/vec_avx512.h", "kv_avx512.h", "attention_avx512.c"],
    "VNNI": ["kv_vnni.h"],
    "AMX": ["attention_amx.c"],
    "NEON": ["../cpu/vec_neon.h", "attention_neon.c"],
}


@pytest.mark.timeout(600)
def test_the_kv_format_of_the_page_equals_float64_on_every_isa(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_tree(ROOT / "docs/adding-a-kv-format.md", tree)
    setup = (tree / "setup.py").read_text()
    assert setup.count('"-O3"') == 1
    (tree / "setup.py").write_text(setup.replace('"-O3"', '"-O1", "-DFD_QUICK_BUILD"'))  # seconds instead of a minute
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    built = subprocess.run(build, cwd=tree, capture_output=True, text=True)
    assert built.returncode == 0 and "warning" not in built.stderr, built.stderr[-4000:]
    output = run_tests(tree, "tests/kernels", "tests/rengine/test_rengine.py", "-k", "fp8")
    assert re.search(r"^\d{2,3} passed", output, re.M), output[-1000:]


@pytest.mark.quick
def test_the_page_lists_every_primitive_and_override_that_the_templates_use() -> None:
    templates = "".join(
        path.read_text() for path in ROOT.glob("kernels/*/*_simd.h") if path.parent.name in ("attention", "cpu")
    )
    used = set(re.findall(r"\b((?:vec|kv)_\w+|tile_vecs|block_rows|interleave4)\(", templates))
    used -= {"vec_exp2", "vec_exp2_of_float", "kv_store_weights"}  # which are the templates' own
    used |= set(re.findall(r"^#if(?:n?def) (FD_(?:OWN|HAS|PREFETCH)_\w+)", templates, re.M))
    assert len(used) > 60
    assert used <= set(re.findall(r"\b\w+\b", ISA_PAGE))


@pytest.mark.quick
def test_the_page_says_in_which_files_a_primitive_is_defined() -> None:
    rows = re.findall(
        r"^\| `(?:FD_(?:OWN|HAS)\w+` \| `)?(\w+)\(.*\| ((?:AVX2|AVX-512|VNNI|AMX|NEON)[^|]*) \|$", ISA_PAGE, re.M
    )
    assert len(rows) == 19
    for name, told in rows:
        defined = {
            isa
            for isa, files in DEFINED_IN.items()
            if any(re.search(rf"^FD_INLINE .*\b{name}\(", (KERNELS / file).read_text(), re.M) for file in files)
        }
        assert set(told.split(", ")) == defined, name
