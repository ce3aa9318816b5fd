"""The page of results, in Markdown."""

from __future__ import annotations

from typing import Any


def markdown(proof: dict[str, Any]) -> str:
    """All parts with their status, then the numbers of each."""
    note = "A simulated driver: no time and no rate below means anything.\n\n" if proof["simulated"] else ""
    overview = _table(["part", "status", "seconds", ""], [[part[key] for key in _OVERVIEW] for part in proof["parts"]])
    return f"# fastdecode on {proof['card']}\n\n{note}{overview}" + "".join(map(_part, proof["parts"]))


_OVERVIEW = ("name", "status", "seconds", "reason")


def _part(part: dict[str, Any]) -> str:
    results = part["results"]
    text = f"\n## {part['name']}\n\n"
    if facts := [[key, value] for key, value in results.items() if not _is_cells(value)]:
        text += _table(["", ""], facts)
    for name, cells in results.items():
        if _is_cells(cells):
            columns = list(dict.fromkeys(column for cell in cells for column in cell))
            text += f"\n{name}:\n\n" + _table(columns, [[cell.get(column, "") for column in columns] for cell in cells])
    return text


def _is_cells(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(cell, dict) for cell in value)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {number}" for key, number in value.items())
    return " ".join(str(value).replace("|", "\\|").split())
