"""Which modules of the package import which, and which C files include which; circles and upward imports among them."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

#: What a file depends on; both are modules ("fastdecode.engine.stats") or both are paths ("region/region.h").
Graph = dict[str, set[str]]
#: Each room (a folder), and the other rooms that its files may depend on.
Rooms = Mapping[str, Collection[str]]

_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def python_graph(root: Path, package: str) -> Graph:
    """Every module of the folder `root / package` and the modules of it that the module imports: at its top, in its
    functions, and for type checking alone. Symbolic links to folders are followed.
    """
    files = dict(_modules(root, package))
    return {module: _imports(module, path, files) - {module} for module, path in files.items()}


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    for folder, _, names in os.walk(root / package, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(module: str, path: Path, files: Mapping[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = node.level - (path.stem == "__init__")  # a package counts itself as its first level
            parents = module.split(".")[: -above or None] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            # `from package import name`: the module `name` where there is one, else a name in package/__init__.py.
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names]
        else:
            continue
        found.update(name for name in names if name in files)
    return found


def include_graph(root: Path, rooms: Iterable[str]) -> Graph:
    """Every C file in the folders `rooms` of `root`, and the files of those folders that it includes."""
    files = {path.relative_to(root).as_posix(): path for room in rooms for path in (root / room).glob("*.[ch]")}
    return {
        file: {_included(file, quoted, files) for quoted in _QUOTED_INCLUDE.findall(path.read_text())}
        for file, path in files.items()
    }


def _included(file: str, quoted: str, paths: Collection[str]) -> str:
    """The path of the file that `file` includes as `quoted`: one beside it, or one of another room, whose name the
    include begins with ("region/region.h", "cpu/parallel.h").
    """
    beside = os.path.normpath(os.path.join(os.path.dirname(file), quoted))
    found = [path for path in (beside, quoted, f"kernels/{quoted}") if path in paths]
    assert found, f'{file} includes "{quoted}", which is neither beside it nor in the room that it names'
    return found[0]


def circle(graph: Graph) -> list[str]:
    """The files of one circle, with the first file again at the end; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def folders(graph: Graph, root: Path) -> Graph:
    """The folders of a graph of modules, a package's `__init__` in its own folder, and the other folders that the
    modules of each import from."""

    def folder(module: str) -> str:
        return module if (root / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]

    found: Graph = {folder(module): set() for module in graph}
    for module, imported in graph.items():
        found[folder(module)] |= {folder(name) for name in imported} - {folder(module)}
    return found


def forbidden(graph: Graph, rooms: Rooms) -> list[str]:
    """A sentence for each dependency that `rooms` does not allow, and for each file that is in no room."""
    sentences = []
    for file, dependencies in sorted(graph.items()):
        room = _room_of(file, rooms)
        if room is None:
            sentences.append(f"{file} is in no room")
            continue
        allowed = {room, *rooms[room]}
        sentences += [
            f"{file} may not depend on {dependency}"
            for dependency in sorted(dependencies)
            if _room_of(dependency, rooms) not in allowed
        ]
    return sentences


def _room_of(file: str, rooms: Rooms) -> str | None:
    """The room of a module ("fastdecode.engine.stats" is in "fastdecode.engine") or of a path."""
    return next((room for room in rooms if file == room or file.startswith((f"{room}.", f"{room}/"))), None)
