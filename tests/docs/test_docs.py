"""What README.md and docs/ say is there: commands, options, files, metrics and the glossary's names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sources.folders import ROOT

from fastdecode.bench import cli as bench_cli
from fastdecode.daemon.config import NodeConfig
from fastdecode.engine.stats import EngineStats, NodeStats
from fastdecode.plan import cli as plan_cli
from fastdecode.service.metrics import Metrics

pytestmark = pytest.mark.quick

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: Pages whose options, named alone between backticks, are those of fastdecode-node.
NODE_PAGES = ("api", "glossary", "memory", "operations", "rdma", "security", "sharing")
PROGRAMS = {"fastdecode-bench": bench_cli, "fastdecode-plan": plan_cli}
#: What ends a command within a shell's line.
_OPERATORS = {"|", "||", "&", "&&", ";", ">", "<", ">>", "(", ")"}


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_figures_of_the_readme_stand_in_performance_md():
    readme, performance = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
    rows = [row.split("|")[2] for row in readme.split("## Figures")[1].splitlines() if row.startswith("| ")]
    figures = {figure for row in rows for figure in re.findall(r"\d+(?:\.\d+)?", row)}
    assert len(figures) > 12
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d|\.\d)", performance), figure


def test_the_page_on_installing_bounds_torch_as_the_package_does():
    """A newer CPU build would be replaced, by default with the one for CUDA."""
    [bound] = re.findall(r'"torch>=[\d.]+,(<[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"pip install 'torch{bound}' --index-url" in (ROOT / "docs/install.md").read_text()


# ---- commands ----


def commands(text: str, program: str) -> list[list[str]]:
    """The arguments of each call of `program` in a page's code: fenced, or between backticks."""
    fenced = [re.sub(r"^\s*#.*$", "", block, flags=re.M) for block in re.findall(r"```sh\n(.*?)```", text, re.S)]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = []
    for code in [*fenced, *inline]:
        for line in code.replace("\\\n", " ").splitlines():
            # A command in quotes (`sh -c "..."`) is a command, too.
            for part in [line, *re.findall(r'"([^"]*)"', line)]:
                found += _calls(part, program)
    return found


def _calls(line: str, program: str) -> list[list[str]]:
    lexer = shlex.shlex(re.sub(r"\b2>", ">", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe in a sentence
        return []
    calls = []
    while program in words:
        words = words[words.index(program) + 1 :]
        ends = [i for i, word in enumerate(words) if word in _OPERATORS]
        calls.append(words[: ends[0]] if ends else words)
    return calls


def test_commands_are_found_in_every_form():
    page = """
```sh
# prog comment
X=1 prog --a 2 \\
    --b 2>/dev/null &
run sh -c "prog quoted" > prog.txt   # prog comment
```
`prog inline`, it's `other`
"""
    assert commands(page, "prog") == [["--a", "2", "--b"], ["quoted"], ["inline"]]


def test_every_fastdecode_node_command_is_accepted():
    found = [(page.name, call) for page in PAGES for call in commands(page.read_text(), "fastdecode-node")]
    assert len(found) > 10
    for name, call in found:
        if not {"--help", "--help-all"} & set(call):
            try:
                NodeConfig.from_args(call)
            except SystemExit:
                pytest.fail(f"{name}: fastdecode-node {shlex.join(call)}")


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_of_the_other_programs_is_accepted(program, monkeypatch):
    found = [(page.name, call) for page in PAGES for call in commands(page.read_text(), program) if call]
    assert len(found) > 3
    for name, call in found:
        accepted = []
        monkeypatch.setattr(f"{PROGRAMS[program]._MODULES[call[0]]}.run", accepted.append)
        try:
            PROGRAMS[program].main(call)
        except SystemExit:
            pytest.fail(f"{name}: {program} {shlex.join(call)}")
        assert accepted


def test_every_option_that_a_page_names_exists():
    options = {"--" + name.replace("_", "-") for name in NodeConfig.__dataclass_fields__} | {"--help", "--help-all"}
    for page in [
        ROOT / "README.md",
        *(ROOT / "docs" / f"{name}.md" for name in NODE_PAGES),
    ]:
        for code in re.findall(r"`(--[a-z][^`\n]*)`", page.read_text()):
            assert code.split()[0] in options, f"{page.name}: {code}"


# ---- files, names and metrics ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_paths_in_code_exist(page: Path):
    """What looks like a path between backticks, and begins with a folder of the repository, is there."""
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for code in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text()):
        if code.split("/")[0] in rooms:
            assert (ROOT / code).exists(), f"{page.name} names {code}"


def test_glossary_names_are_those_of_the_code():
    sources = [p for room in ("region", "kernels", "transports", "fastdecode") for p in (ROOT / room).rglob("*.*")]
    code = "\n".join(p.read_text() for p in sources if p.suffix in (".py", ".pyi", ".c", ".h"))
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = line.strip("|").split("|")
        if not line.startswith("|") or len(cells) != 3:
            continue
        for name in re.findall(r"`([^`]+)`", cells[2] + cells[0]):
            if "/" in name:
                assert (ROOT / name).exists() or (ROOT / "fastdecode" / name).exists(), name
            elif not name.startswith(("--", "fastdecode-")):  # options and commands have tests of their own
                assert re.search(rf"\b{re.escape(name)}\b", code), f"{name} is in no source file"


def test_operations_lists_every_metric():
    node = NodeStats("u", "n", "avx2", 1, True, 1, 1, 0, 0, 0, 1, 1, 0.0, 0, 0, 0, 0, 0.0)
    text = Metrics("m", lambda: EngineStats(0, 0, 0.0, [node])).render().decode()
    exposed = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):  # the client's time stamps
            exposed[family.name + ("_total" if family.type == "counter" else "")] = family.type
    table = re.findall(r"^\| `(fastdecode:\w+)` \| (\w+) \|", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert dict(table) == exposed
