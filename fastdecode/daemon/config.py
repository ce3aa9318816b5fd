"""The configuration of a node: its options, checked, and what they lead to.

A bad value and an option of the other role are errors at start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode import __version__
from fastdecode.daemon.config_checks import check_options
from fastdecode.daemon.config_files import find_model, read_key, read_secret
from fastdecode.daemon.config_sources import Parser, add_argument, flag, merged, option_words
from fastdecode.daemon.option_help import add_help
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.options import NodeOptions
from fastdecode.demo import model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(NodeOptions):
    """The options of a node that can run. Raises ConfigError for options that contradict each other."""

    def __post_init__(self) -> None:
        check_options(self)

    def model_path(self) -> Path:
        """The model directory or GGUF file that --model names; without --model, the directory of the demo model.

        Raises ConfigError if there is no such model.
        """
        return model_dir() if self.model is None else find_model(self.model)

    def read_secret(self) -> bytes | None:
        """The shared secret, without surrounding white space; None without --secret-file. Raises ConfigError."""
        return read_secret(self.secret_file)

    def read_api_keys(self) -> tuple[str, ...]:
        """The API's keys; () without --api-key-file. Raises ConfigError."""
        keys = read_key(self.api_key_file, "--api-key-file") or b""
        try:
            return tuple(key for line in keys.decode().splitlines() if (key := line.strip()))
        except UnicodeDecodeError:
            raise ConfigError(f"--api-key-file {self.api_key_file} is not text") from None

    def to_args(self, names: Sequence[str] | None = None) -> list[str]:
        """The options of these fields as a command line, without the options that have their default. Without names:
        all but --config."""
        if names is None:
            names = [name for name in _FIELDS if name != "config"]
        args = []
        for name in names:
            value = getattr(self, name)
            if value == _DEFAULTS[name]:
                continue
            if value is True:
                args.append(flag(name))
            elif isinstance(value, tuple) and isinstance(_DEFAULTS[name], tuple):
                pairs = (v if isinstance(v, tuple) else (v,) for v in value)
                args += option_words(_FIELDS[name], ["=".join(map(str, pair)) for pair in pairs])
            else:
                args += [flag(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return args

    @classmethod
    def from_args(cls, argv: Sequence[str] | None = None) -> NodeConfig:
        """Parse a command line (default: sys.argv), with the environment and --config behind it. Prints an error and
        exits with status 2 for a bad one."""
        parser = Parser(prog="fastdecode-node", allow_abbrev=False, add_help=False)
        parser.help_option = "--help-all"
        parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
        add_help(parser, dataclasses.fields(cls))
        for f in dataclasses.fields(cls):
            add_argument(parser, f)
        try:
            return cls(**merged(parser, dataclasses.fields(cls), argv))
        except ValueError as error:
            parser.error(str(error))


_FIELDS = {f.name: f for f in dataclasses.fields(NodeConfig)}
_DEFAULTS = {name: f.default for name, f in _FIELDS.items()}
