"""One name for one thing: a class name stands in one room, and seven words have one meaning (docs/glossary.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from sources.folders import ROOT

pytestmark = pytest.mark.quick

GLOSSARY = ROOT / "docs/glossary.md"
#: A row of the glossary under this heading names a class that may stand in two rooms, and says why.
TWO_ROOMS = "## Classes of two rooms"

#: A term of the glossary: which identifiers have it, or have a word that it replaces; and for folders and files the
#: identifiers that may have it there, because they mean what the glossary says or are names of others (Ray's, the wire
#: protocol's). An identifier is matched without its case.
Word = tuple[str, Mapping[str, str]]
WORDS: dict[str, Word] = {
    "RoPE": ("rotat", {"transports": "rotated"}),
    "Hadamard transform": ("walsh|fwht", {}),
    "staggered pipeline": ("stagger", {}),
    "to migrate, migration": ("bulk|transfer(?!_config)|hand_?over|giver", {}),
    "placement": (
        "(?<!re)(?<!in)plac(e|ing)",
        {
            "engine": "_?place(d|r|s|ment)?|placed_on|fail_unplaced|(forget|_same)_place",
            "cluster": ".*placement.*",
            "spart/hf": "placement",
        },
    ),
    "part": ("(?<!s)(?<!r)part_t$", {"kernels/engine": "fd_part_t", "kernels/decoder": "part_t"}),
    "balance": (
        "balanc",
        {
            "engine": "_?rebalance(r|_seconds)?",
            "spart": ".*",
            "bench": "balance(_for)?",
            "daemon": "balance(_for|_digest)?",
            "plan": "rebalance|balance|(r_nodes|sockets)_in_balance",
        },
    ),
}
#: A comment or a string of C.
_NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def rooms(root: Path) -> list[Path]:
    """The folders of the package, links to folders beside the package included."""
    return sorted(path for path in (root / "fastdecode").iterdir() if path.is_dir() and path.name != "__pycache__")


def classes_of_two_rooms(root: Path) -> dict[str, list[str]]:
    """The rooms of each class name that stands in more than one."""
    found: dict[str, set[str]] = defaultdict(set)
    for room in rooms(root):
        for path in [*room.rglob("*.py"), *room.rglob("*.pyi")]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].add(room.name)
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def allowed_in_two_rooms(glossary: str) -> set[str]:
    """The class names of the glossary's list of exceptions."""
    _, _, section = glossary.partition(TWO_ROOMS + "\n")
    rows = re.findall(r"^\|(.+?)\|.*[a-z]", section.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def identifiers(path: Path) -> set[str]:
    """The names in a file of Python or C, without its comments and strings."""
    text = path.read_text()
    if path.suffix in (".c", ".h", ".cu"):
        return set(re.findall(r"[A-Za-z_]\w*", _NO_CODE.sub(" ", text)))
    return {token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == 1}


def misused(root: Path, words: Mapping[str, Word]) -> Iterator[str]:
    """Each identifier that has a word and may not, with its file."""
    for room in rooms(root):
        for path in sorted(p for p in room.rglob("*") if p.suffix in (".py", ".pyi", ".c", ".h", ".cu")):
            name, found = str(path.relative_to(root / "fastdecode")), sorted(identifiers(path))
            for word, (pattern, meant) in words.items():
                may = [rule for where, rule in meant.items() if name == where or name.startswith(where + "/")]
                for identifier in (i for i in found if re.search(pattern, i, re.IGNORECASE)):
                    if not any(re.fullmatch(rule, identifier, re.IGNORECASE) for rule in may):
                        yield f"{name}: {identifier} ({word})"


def types_of_two_files(root: Path) -> dict[str, list[str]]:
    """The files of each C type name fd_..._t that is defined in more than one."""
    found: dict[str, list[str]] = defaultdict(list)
    for room in ("region", "kernels", "transports"):
        for path in sorted(p for p in (root / room).rglob("*") if p.suffix in (".c", ".h")):
            for name in re.findall(r"^\} (fd_\w+_t);", path.read_text(), re.MULTILINE):
                found[name].append(str(path.relative_to(root)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_class_name_stands_in_two_rooms():
    found, allowed = classes_of_two_rooms(ROOT), allowed_in_two_rooms(GLOSSARY.read_text())
    assert {name: where for name, where in found.items() if name not in allowed} == {}
    assert allowed <= found.keys(), "the glossary excuses a class that stands in one room"


def test_no_type_of_c_is_two_structs():
    assert types_of_two_files(ROOT) == {}


def test_words_have_one_meaning():
    assert list(misused(ROOT, WORDS)) == []


@pytest.mark.parametrize("word", WORDS)
def test_the_glossary_gives_a_word_one_row(word: str) -> None:
    assert len(re.findall(rf"^\| {word} \| .+ \|", GLOSSARY.read_text(), re.MULTILINE)) == 1


# ---- the test of the test ----


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "fastdecode/engine/a.py": "class Load: ...\nclass Own: ...\ndef place(): rebalance  # balance, rotate\n",
        "fastdecode/api/b.py": "def f():\n    class Load: ...\n    'rotate'\n",
        "kernels/c.h": "/* rotate */ typedef struct {\n    int x; // place\n} fd_load_t;\n",
        "kernels/d.pyi": "class Own: ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "fastdecode/kernels").symlink_to("../kernels")
    return tmp_path


def test_a_class_of_two_rooms_is_found(tree: Path) -> None:
    assert classes_of_two_rooms(tree) == {"Load": ["api", "engine"], "Own": ["engine", "kernels"]}


def test_an_exception_is_read_from_the_glossary() -> None:
    page = f"| `A` | b |\n{TWO_ROOMS}\n\n| Class | Why |\n|---|---|\n| `Load` | same |\n\n## Next\n\n| `B` | c |\n"
    assert allowed_in_two_rooms(page) == {"Load"}
    assert allowed_in_two_rooms("# Glossary\n| `A` | b |\n") == set()


def test_a_struct_of_two_files_is_found(tree: Path) -> None:
    assert types_of_two_files(tree) == {}
    (tree / "kernels/e.c").write_text("typedef struct {\n} fd_load_t;\n")
    assert types_of_two_files(tree) == {"fd_load_t": ["kernels/c.h", "kernels/e.c"]}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("fastdecode/engine/a.py", "def rotate(q): ...", "engine/a.py: rotate (RoPE)"),
        ("kernels/c.h", "static void fd_rotate(void);", "kernels/c.h: fd_rotate (RoPE)"),
        ("kernels/c.h", "typedef int fd_place_t;", "kernels/c.h: fd_place_t (placement)"),
        ("fastdecode/api/b.py", "self.place = 1", "api/b.py: place (placement)"),
        ("fastdecode/engine/a.py", "def balance(): ...", "engine/a.py: balance (balance)"),
        ("fastdecode/engine/a.py", "class StaggeredRun: ...", "engine/a.py: StaggeredRun (staggered pipeline)"),
        ("fastdecode/engine/a.py", "bulk = 1", "engine/a.py: bulk (to migrate, migration)"),
        ("kernels/c.h", "} row_part_t;", "kernels/c.h: row_part_t (part)"),
    ],
)
def test_a_word_with_another_meaning_is_found(tree: Path, file: str, text: str, fault: str) -> None:
    assert list(misused(tree, WORDS)) == []
    with (tree / file).open("a") as out:
        out.write(text + "\n")
    assert list(misused(tree, WORDS)) == [fault]
