"""Dependencies point one way, and in no circle: among the package's modules and folders, and among the C files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sources.dependencies import Graph, Rooms, circle, folders, forbidden, include_graph, python_graph
from sources.folders import ROOT

pytestmark = pytest.mark.quick

#: Each room and the rooms that it may import from. A room names only rooms above it.
PYTHON = {
    "region": [],
    "kernels": ["region"],
    "transports": ["region"],
    "gguf": [],
    "demo": [],
    "text": ["demo", "gguf"],
    "spart": ["region", "kernels", "transports", "gguf"],
    "engine": ["region", "transports", "spart"],
    "service": ["text", "engine"],
    "api": ["text", "engine", "service"],
    "daemon": ["region", "kernels", "transports", "gguf", "text", "demo", "spart", "engine", "service", "api"],
    "router": ["api", "daemon"],
    "cluster": ["transports", "daemon", "router"],
    "bench": [
        "region",
        "kernels",
        "transports",
        "gguf",
        "text",
        "demo",
        "spart",
        "engine",
        "service",
        "api",
        "daemon",
    ],
    "plan": ["region", "kernels", "transports", "demo", "spart", "engine", "daemon", "bench"],
}
#: The folder whose own modules import from folders that import from them.
CIRCULAR = "fastdecode.spart"
C = {
    "region": [],
    "kernels/cpu": ["region"],
    "kernels/attention": ["region", "kernels/cpu"],
    "kernels/cache": ["region", "kernels/attention"],
    "kernels/gpu": ["region", "kernels/cache"],
    "kernels/engine": ["region", "kernels/cpu", "kernels/attention", "kernels/cache", "kernels/gpu"],
    "kernels/linears": ["region", "kernels/cpu"],
    "kernels/decoder": ["region", "kernels/cpu"],
    "kernels/sampling": ["region", "kernels/cpu"],
    "kernels/py": [
        "region",
        "kernels/cpu",
        "kernels/attention",
        "kernels/cache",
        "kernels/gpu",
        "kernels/engine",
        "kernels/linears",
        "kernels/decoder",
        "kernels/sampling",
    ],
    "transports": ["region"],
}


def faults_of_python(root: Path) -> list[str]:
    graph = python_graph(root, "fastdecode")
    for imported in graph.values():
        imported.discard("fastdecode")  # the version
    faults = [f"fastdecode imports {name}" for name in sorted(graph.pop("fastdecode"))]
    rooms = {f"fastdecode.{room}": [f"fastdecode.{other}" for other in others] for room, others in PYTHON.items()}
    return faults + forbidden(graph, rooms) + circle(graph) + circle_of_folders(root, graph)


def circle_of_folders(root: Path, graph: Graph) -> list[str]:
    return circle({name: imported for name, imported in folders(graph, root).items() if name != CIRCULAR})


def faults_of_c(root: Path) -> list[str]:
    graph = include_graph(root, C)
    return forbidden(graph, C) + circle(graph)


@pytest.mark.parametrize("rooms", [PYTHON, C], ids=["python", "c"])
def test_a_room_names_only_rooms_above_it(rooms: Rooms) -> None:
    above: set[str] = set()
    for room, others in rooms.items():
        assert set(others) <= above
        above.add(room)


def test_the_map_of_the_rooms_names_these_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(?:fastdecode/)?(\w+)/` \|.*\| ([\w, ]*)\|$", page, re.MULTILINE)
    table = {room: [other.strip() for other in imports.split(",") if other.strip()] for room, imports in rows}
    assert {room: sorted(imports) for room, imports in table.items()} == {
        room: sorted(imports) for room, imports in PYTHON.items()
    }


def test_python_imports_point_one_way() -> None:
    assert not faults_of_python(ROOT)


def test_c_includes_point_one_way() -> None:
    assert not faults_of_c(ROOT)


# ---- the test of the test: a small tree, right at first, and faults put into it ----

TREE = {
    "fastdecode/__init__.py": "__version__ = '1'",
    "fastdecode/engine/__init__.py": "",
    "fastdecode/engine/engine.py": "import fastdecode.transports.base\nfrom .state import sequence",
    "fastdecode/engine/request.py": "from . import stats\nfrom ..transports.base import Link",
    "fastdecode/engine/state/__init__.py": "",
    "fastdecode/engine/state/sequence.py": "from fastdecode import __version__",
    "fastdecode/engine/stats.py": "",
    "fastdecode/api/__init__.py": "from .server import serve",
    "fastdecode/api/server.py": "from fastdecode.engine import engine",
    "transports/__init__.py": "",
    "transports/base.py": "import os",
    "kernels/__init__.py": "",
    "kernels/_native.pyi": "",
    "region/region.h": "#include <stdint.h>",
    "kernels/attention/attention.h": '#include "region/region.h"',
    "kernels/cache/pages.h": '#pragma once\n#include "attention/attention.h"',
    "kernels/cache/pages.c": '#include "pages.h"',
    "transports/pump.c": '# include "../region/region.h"',
}
#: A file of the tree, what is added to it, and each file that the fault must name.
PYTHON_FAULTS = {
    "upward": ("fastdecode/engine/stats.py", "import fastdecode.api.server", "fastdecode.api.server"),
    "upward in a function": (
        "transports/base.py",
        "def f():\n    from fastdecode.engine.stats import Stats",
        "fastdecode.engine.stats",
    ),
    "upward for type checking": (
        "transports/base.py",
        "if TYPE_CHECKING:\n    from ..engine import stats",
        "fastdecode.engine.stats",
    ),
    "past a layer": (
        "fastdecode/api/server.py",
        "from fastdecode.transports import base",
        "fastdecode.transports.base",
    ),
    "sideways": ("transports/base.py", "from fastdecode.kernels import _native", "fastdecode.kernels._native"),
    "circle": (
        "fastdecode/engine/stats.py",
        "from fastdecode.engine.request import Request",
        "fastdecode.engine.stats",
    ),
    "circle by relative imports": (
        "fastdecode/engine/stats.py",
        "from .request import Request",
        "fastdecode.engine.stats",
    ),
    "circle of folders": (
        "fastdecode/engine/state/sequence.py",
        "from fastdecode.engine.stats import Stats",
        "fastdecode.engine.state",
    ),
    "no room": ("fastdecode/loose.py", "", "fastdecode.loose is in no room"),
    "the package's own __init__": (
        "fastdecode/__init__.py",
        "import fastdecode.engine.stats",
        "fastdecode.engine.stats",
    ),
}
C_FAULTS = {
    "upward": ("kernels/attention/attention.h", '#include "cache/pages.h"', "kernels/cache/pages.h"),
    "upward by a path": ("region/region.h", '#include "../transports/pump.h"', "transports/pump.h"),
    "kernels to transports": ("kernels/cache/pages.c", '  #  include "transports/pump.h"', "transports/pump.h"),
    "transports to kernels": ("transports/pump.c", '#include "attention/attention.h"', "kernels/attention/attention.h"),
    "circle": ("transports/pump.h", '#include "pump.h"', "transports/pump.h"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (TREE | {"transports/pump.h": ""}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for room in ("kernels", "transports"):
        (tmp_path / "fastdecode" / room).symlink_to(f"../{room}")
    return tmp_path


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def test_a_tree_without_faults_passes(tree: Path) -> None:
    assert python_graph(tree, "fastdecode")["fastdecode.engine.request"] == {
        "fastdecode.engine.stats",
        "fastdecode.transports.base",
    }
    assert include_graph(tree, C)["transports/pump.c"] == {"region/region.h"}
    assert not faults_of_python(tree)
    assert not faults_of_c(tree)


@pytest.mark.parametrize(("file", "text", "named"), PYTHON_FAULTS.values(), ids=PYTHON_FAULTS)
def test_a_fault_in_python_is_found(tree: Path, file: str, text: str, named: str) -> None:
    add(tree / file, text)
    assert named in " ".join(faults_of_python(tree))


@pytest.mark.parametrize(("file", "text", "named"), C_FAULTS.values(), ids=C_FAULTS)
def test_a_fault_in_c_is_found(tree: Path, file: str, text: str, named: str) -> None:
    add(tree / file, text)
    assert named in " ".join(faults_of_c(tree))


def test_a_circle_of_headers_within_a_room_is_found(tree: Path) -> None:
    add(tree / "transports/pump.h", '#include "port.h"')
    add(tree / "transports/port.h", '#include "pump.h"')
    assert {"transports/pump.h", "transports/port.h"} == set(faults_of_c(tree))


@pytest.mark.parametrize("quoted", ["elsewhere.h", "region.h", "region/elsewhere.h", "attention.h"])
def test_an_include_that_does_not_name_the_room_of_its_file_is_an_error(tree: Path, quoted: str) -> None:
    add(tree / "transports/pump.c", f'#include "{quoted}"')
    with pytest.raises(AssertionError, match=quoted):
        faults_of_c(tree)
