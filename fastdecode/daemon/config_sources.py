"""Reads options from the command line, environment variables and a YAML file; the first source that has one counts.

The environment variable of an option is FASTDECODE_ and its name (--max-queued: `FASTDECODE` + `_MAX_QUEUED`). In the
file, an option's key is its name, with - or _.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn

from fastdecode.daemon.option_values import argument
from fastdecode.text.did_you_mean import did_you_mean

_PREFIX = "FASTDECODE_"
#: Variables that are no options: of the kernels, the tests and the scripts.
_OTHER_VARIABLES = frozenset(
    _PREFIX + name
    for name in (
        *("CALLS", "CLUSTER_EVENTS", "COMPILED", "CYCLES", "FUZZ_S", "ISA", "LLAMA_SERVER", "LONG_CONTEXT"),
        *("NAMESPACES", "OTHER_PYTHON", "RDMA_ALL", "RDMA_HOST", "RDMA_VM", "RDMA_WIRE", "SLOW", "STEPS", "STREAMS"),
        *("VLLM_PYTHON", "WRITE_DOCS"),
    )
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, because a block of usage hides the line that counts."""

    source = ""  # the source of the arguments, if it is not the command line
    help_option = "--help"  # lists all options

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does, but a mistyped option is answered with the one that may be meant."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message and end with status 2."""
        source = f"{self.source}: " if self.source else ""
        hint = f"{self.prog} {self.help_option} lists the options"
        print(f"{self.prog}: error: {source}{message} ({hint})", file=sys.stderr)
        sys.exit(2)


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return _PREFIX + name.upper()


def check_environment(fields: Sequence[Field[Any]], environment: Mapping[str, str]) -> None:
    """Raise ValueError for a variable that looks like an option's and is none."""
    known = {variable(f.name) for f in fields} | _OTHER_VARIABLES
    for name in environment:
        if name.startswith(_PREFIX) and name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"the environment variable {name} is no option of fastdecode{hint}")


def from_environment(fields: Sequence[Field[Any]], role: str, environment: Mapping[str, str]) -> list[str]:
    """The options of `role` that the environment sets, as a command line; a variable that only the other role reads is
    skipped. Raises ValueError."""
    args: list[str] = []
    for f in fields:
        text = environment.get(variable(f.name))
        if text is None or f.metadata["role"] not in (role, "sr"):
            continue
        if isinstance(f.default, bool):
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError(f"{variable(f.name)} must be true or false, not {text!r}")
            args += [flag(f.name)] if text.lower() in _TRUE else []
        else:
            args += option_words(f, text.replace(",", " ").split() if isinstance(f.default, tuple) else [text])
    return args


def from_file(fields: Sequence[Field[Any]], path: Path) -> list[str]:
    """The options that a YAML file sets, as a command line. Raises ValueError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"is not YAML: {where}{error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError("must be a mapping of options and values")
    return from_mapping(fields, content)


def from_mapping(fields: Sequence[Field[Any]], content: Mapping[Any, Any]) -> list[str]:
    """Options and their values, by the options' names with - or _, as a command line. Raises ValueError."""
    known = {f.name: f for f in fields if f.name != "config"}
    args: list[str] = []
    for key, value in content.items():
        f = known.get(str(key).replace("-", "_"))
        if f is None:
            raise ValueError(f"there is no option {key!r}{did_you_mean(str(key).replace('-', '_'), known)}")
        if value is None:
            continue
        if value is False and "off" in (f.default, *(f.metadata["choices"] or ())):
            value = "off"  # which YAML reads as false
        if isinstance(f.default, bool) or isinstance(value, bool):
            if not isinstance(value, bool) or not isinstance(f.default, bool):
                raise ValueError(f"{key}: must {'' if isinstance(f.default, bool) else 'not '}be true or false")
            args += [flag(f.name)] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict) or (len(values) != 1 and not isinstance(f.default, tuple)):
            raise ValueError(f"{key}: must be one value")
        args += option_words(f, [str(v) for v in values])
    return args


def option_words(f: Field[Any], values: Sequence[str]) -> list[str]:
    """The option of a field with `values`, as words of a command line."""
    if f.metadata["many"]:
        return [flag(f.name), *values] if values else []
    return [word for value in values for word in (flag(f.name), value)]


def add_argument(group: argparse._ActionsContainer, f: Field[Any]) -> None:
    """Add the option of a field to a parser, or to a group of one."""
    meta = f.metadata
    if isinstance(f.default, bool):
        group.add_argument(flag(f.name), action="store_true", default=None, help=meta["help"])
        return

    help_text = meta["help"]
    if f.default not in (None, ()):
        help_text += f" (default: {f.default})"
    group.add_argument(
        flag(f.name),
        action="append" if isinstance(f.default, tuple) and not meta["many"] else "store",
        nargs="+" if meta["many"] else None,
        type=argument(meta["parse"]),
        choices=meta["choices"],
        metavar=meta["metavar"],
        default=None,
        help=help_text,
    )


def merged(parser: Parser, fields: Sequence[Field[Any]], argv: Sequence[str] | None) -> dict[str, Any]:
    """The options that are given, from all sources. Raises ValueError."""
    given, in_file = _parsed(parser, argv), {}
    check_environment(fields, os.environ)
    if path := given.get("config") or os.environ.get(variable("config")):
        try:
            arguments = from_file(fields, Path(path))
        except ValueError as error:
            raise ValueError(f"--config {path}: {error}") from None
        in_file = _parsed(parser, arguments, str(path))
    # The role decides which variables count, so it must be known from all sources first.
    role = given.get("role") or os.environ.get(variable("role")) or in_file.get("role", "s")
    return in_file | _parsed(parser, from_environment(fields, role, os.environ), "environment") | given


def _parsed(parser: Parser, argv: Sequence[str] | None, source: str = "") -> dict[str, Any]:
    parser.source = source
    parsed = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    parser.source = ""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()}
