"""The directory of a cluster: what each node has reported last; and the table of `fastdecode-cluster status`.

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


_HEAD = ("node", "state", "machine", "starts", "load", "KV", "links", "address")


def table(view: View) -> str:
    """A line for each node. The load of an S-node is its requests, running and waiting, of a prefill S-node its
    prompts, and of an R-node the sequences of all S-nodes. KV is the share of the leased pages in use. The links of an
    R-node are the S-nodes' links to it."""
    rows = [_HEAD, *(_row(entry, view) for entry in view.entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(entry: Entry, view: View) -> tuple[str, ...]:
    load, kv, links, address = "", "", "", entry.url
    if entry.role in "sp" and "running" in entry.load:
        load = f"{entry.load['running']}+{entry.load['waiting']}"
        kv = f"{entry.load['kv_cache_usage']:.0%}"
        alive = [node for node in entry.load["nodes"] if node["alive"]]
        links = f"{len(alive)} {'+'.join(sorted({node['url'].partition(':')[0] for node in alive}))}"
    elif entry.role == "r" and entry.reach is not None:
        address = entry.reach.tcp
        leases = links_to(entry, view)
        load = str(sum(lease["sequences"] for lease in leases))
        total = sum(lease["pages_total"] for lease in leases)
        kv = f"{sum(lease['pages_used'] for lease in leases) / total:.0%}" if total else ""
        links = str(len(leases))
    return entry.name, entry.state, entry.machine, str(entry.starts), load, kv, links, address


def links_to(entry: Entry, view: View) -> list[dict[str, Any]]:
    """What the S-nodes, prefill S-nodes included, report of their links to an R-node."""
    urls = entry.reach.urls if entry.reach is not None else []
    nodes = [node for s in view.entries if s.role in "sp" for node in s.load.get("nodes", ())]
    return [node for node in nodes if node["alive"] and node["url"] in urls]
