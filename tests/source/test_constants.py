"""region.h is the only copy of its constants: Python reads them from fastdecode.region.contract."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources.folders import ROOT

from fastdecode.region import contract

pytestmark = pytest.mark.quick

NAMES = {name for name in vars(contract) if name.isupper()} | set(contract.Status.__members__)
TABLES = {contract.ACT_DTYPES, contract.KV_DTYPES}


def copies(source: str) -> Iterator[str]:
    """The statements in `source` that assign a literal to a name of a constant, and the literal tables of dtypes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            values = tuple(e.value for e in node.elts if isinstance(e, ast.Constant))
            if values in TABLES:
                yield f"line {node.lineno}: {values}"
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        literal = all(isinstance(n, ast.Constant | ast.BinOp | ast.Tuple) for n in _expressions(node.value))
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if literal and isinstance(name, ast.Name) and name.id.lstrip("_").removeprefix("FD_") in NAMES:
                    yield f"line {node.lineno}: {name.id}"


def _expressions(value: ast.expr) -> Iterator[ast.expr]:
    return (n for n in ast.walk(value) if isinstance(n, ast.expr))


def python_files() -> Iterator[Path]:
    for folder in ("fastdecode", "region", "kernels", "transports", "tests", "bin"):
        yield from (ROOT / folder).rglob("*.py")


def test_python_retypes_no_constant_of_region_h() -> None:
    found = {str(path): list(copies(path.read_text())) for path in python_files() if path != Path(__file__)}
    assert len(found) > 100
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "PAGE_TOKENS = 128",
        "_MAX_SEQS = 1 << 20",
        "FD_MAX_LAYERS: int = 1024",
        "_BAD_SEQUENCE, _OUT_OF_PAGES = 3, 4",
        'choices(["fp32", "fp16", "bf16", "int8", "int4", "int8-int4"])',
        'for act in ("fp32", "fp16", "bf16"): pass',
    ],
)
def test_a_copy_is_found(source: str) -> None:
    assert list(copies(source))


@pytest.mark.parametrize("source", ["MAX_ROWS = _native.MAX_ROWS", "rows = 128", 'both = ("fp16", "bf16")'])
def test_what_is_no_copy_is_let_be(source: str) -> None:
    assert not list(copies(source))
