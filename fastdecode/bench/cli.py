"""`fastdecode-bench`: one subcommand a question.

Progress goes to stderr, results to stdout: a table, or one object with --json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from fastdecode.transports.base import TransportError

_COMMANDS = ("serve", "decode", "attention", "transport", "perplexity", "accuracy", "checkpoint")


def main(argv: Sequence[str] | None = None) -> None:
    """Console script."""
    argv = sys.argv[1:] if argv is None else argv
    # Others than the one asked for are left alone: most bring torch along, which `transport` does without.
    wanted = [name for name in _COMMANDS if [name] == list(argv[:1])] or _COMMANDS
    parser = argparse.ArgumentParser(prog="fastdecode-bench", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (import_module(f"fastdecode.bench.{name}") for name in wanted):
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
