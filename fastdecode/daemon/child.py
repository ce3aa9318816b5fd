"""What every child process of a node is started with."""

from __future__ import annotations

import os
import sys
from dataclasses import fields

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_sources import variable


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a Python module."""
    # -P: the child must not import a folder `fastdecode` in the working directory
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """The environment of a child that gets its options by command line: this process's without those options."""
    options = {variable(f.name) for f in fields(NodeConfig)}
    return {name: value for name, value in os.environ.items() if name not in options}
