"""What several commands share: lists of numbers on a command line, the forms of a result, and a thread's CPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from fastdecode.kernels import _native


def numbers(text: str) -> list[int]:
    """The numbers of an option such as "1,8,64". Raises ValueError."""
    return [int(part) for part in text.split(",")]


def refuse_unsupported(isas: list[str]) -> None:
    """Ends the program if the processor lacks one of the instruction sets `isas`. The parser accepts any, so that a
    command is well-formed or not on every machine alike."""
    supported = _native.isa_supported()
    for isa in isas:
        if isa not in supported:
            raise SystemExit(f"--isa {isa}: this processor has {', '.join(supported)}")


def read_kept(path: Path | None, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The result that an earlier run with `settings` has kept in a file; None without one. Raises ValueError for a run
    of other settings."""
    if path is None or not path.exists():
        return None
    result = orjson.loads(path.read_bytes())
    if not isinstance(result, dict) or result.get("settings") != settings:
        raise ValueError(f"{path} has runs of other settings")
    return result


def keep(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result so far into the file, unless `path` is None. A run that is killed leaves the file whole."""
    if path is not None:
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
        unfinished.replace(path)


def print_result(
    args: argparse.Namespace, result: dict[str, Any], print_table: Callable[[dict[str, Any]], None]
) -> None:
    """Print `result` as one JSON object if --json is given, else as a table."""
    if args.json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        print_table(result)


@contextmanager
def pinned(cpu: int | None) -> Iterator[None]:
    """Pin this thread to `cpu` meanwhile; threads that it has started before are not affected."""
    before = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
