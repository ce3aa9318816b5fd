"""`fastdecode-bench`: one command for each question.

Progress goes to stderr. Results go to stdout: as a table, or as one JSON object with --json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from fastdecode.transports.base import TransportError

_COMMANDS = (
    "serve",
    "schedule",
    "decode",
    "spart",
    "attention",
    "rpart",
    "transport",
    "links",
    "perplexity",
    "accuracy",
    "soak",
    "checkpoint",
)
#: The modules that are not called like their commands.
_MODULES = {"rpart": "dispatch"}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    argv = sys.argv[1:] if argv is None else argv
    # Only the command asked for is imported, because most import torch, which `transport` does without.
    wanted = [name for name in _COMMANDS if [name] == list(argv[:1])] or _COMMANDS
    parser = argparse.ArgumentParser(prog="fastdecode-bench", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (import_module(f"fastdecode.bench.{_MODULES.get(name, name)}") for name in wanted):
        name, help_text = module.COMMAND
        command = commands.add_parser(name, help=help_text, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (TransportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"fastdecode-bench {args.command}: {error}")


if __name__ == "__main__":
    main()
