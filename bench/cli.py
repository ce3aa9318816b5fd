"""`fastdecode-bench`: one command for each question.

Progress goes to stderr. Results go to stdout: as a table, or as one JSON object with --json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from fastdecode import __version__
from fastdecode.transports.base import TransportError

_COMMANDS = (
    "serve",
    "compare",
    "decode",
    "spart",
    "states",
    "reduction",
    "attention",
    "transport",
    "speculate",
    "perplexity",
    "soak",
    "checkpoint",
)
_MODULES = {name: f"fastdecode.bench.{name}" for name in _COMMANDS}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    run_command("fastdecode-bench", __doc__, _MODULES, argv)


def run_command(program: str, description: str | None, modules: dict[str, str], argv: Sequence[str] | None) -> None:
    """Run a program of several commands, each a module with COMMAND (name and help), `add_arguments` and `run`.
    HAS_RESULT False: it prints no result, and so has no --json.

    Errors that are the user's to mend end the program with their message.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Only the command asked for is imported, because most import torch, which some do without.
    wanted = [name for name in modules if [name] == list(argv[:1])] or modules
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (import_module(modules[name]) for name in wanted):
        name, help_text = module.COMMAND
        command = commands.add_parser(name, help=help_text, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(command)
        if getattr(module, "HAS_RESULT", True):
            command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (TransportError, ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{program} {args.command}: {error}")


if __name__ == "__main__":
    main()
