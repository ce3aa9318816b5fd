"""Starts nodes as users do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import Node


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """A function that starts a Node with its arguments. All nodes are killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(*argv: str, own_group: bool = False) -> Node:
            node = Node(tmp_path, *argv, own_group=own_group)
            stack.callback(lambda: node.process.poll() is None and node.end(signal.SIGKILL))
            return node

        yield start
