"""The directory of a cluster: what each node has reported last.

It holds nothing that nodes do not tell it again within a second, so it may be lost at any time. For a while after its
start it says that it has not settled: nodes then add to what they know, and drop nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastdecode.cluster.reach import Reach

#: A node whose last report is older than this is gone.
_GONE_SECONDS = 5.0
_SETTLED_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A node's report."""

    name: str  # r0, s1, p0, router0
    role: str  # "r", "s", "p" (a prefill S-node) or "router"
    state: str  # starting, running, restarting or leaving; silent: it has not answered a command
    machine: str  # address of its machine
    ray_node: str  # Ray's id of the machine
    url: str = ""  # of an S-node or the router
    prefill_url: str = ""  # of a prefill S-node: where other S-nodes ask it for prompts
    reach: Reach | None = None  # of an R-node
    starts: int = 0  # of its process
    pid: int | None = None
    load: dict[str, Any] = field(default_factory=dict)  # of an S-node or a prefill S-node: fields of /health
    listed: bool = False  # others may use it


@dataclass(frozen=True, slots=True)
class View:
    """What the directory knows."""

    entries: tuple[Entry, ...]
    settled: bool


class Directory:
    """The last report of each node, for a few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began = clock()
        self._entries: dict[str, tuple[float, Entry]] = {}

    def report(self, entry: Entry) -> View:
        """Take a node's report. Returns the view."""
        self._entries[entry.name] = self._clock(), entry
        return self.view()

    def forget(self, name: str) -> None:
        """Drop a node that has ended for good."""
        self._entries.pop(name, None)

    def view(self) -> View:
        now = self._clock()
        self._entries = {name: (at, e) for name, (at, e) in self._entries.items() if now - at < _GONE_SECONDS}
        entries = in_order(entry for _, entry in self._entries.values())
        return View(entries, now - self._began >= _SETTLED_SECONDS)


def in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries by role and number."""
    return tuple(sorted(entries, key=lambda e: (e.role, len(e.name), e.name)))
