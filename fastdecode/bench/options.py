"""The parts of a command line that several commands share: lists of numbers, and the two forms of a result."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import orjson


def numbers(text: str) -> list[int]:
    """The numbers of an option such as "1,8,64". Raises ValueError."""
    return [int(part) for part in text.split(",")]


def print_result(
    args: argparse.Namespace, result: dict[str, Any], print_table: Callable[[dict[str, Any]], None]
) -> None:
    """Print `result` as one JSON object if --json is given, else as a table."""
    if args.json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        print_table(result)
