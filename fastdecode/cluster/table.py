"""The table of `fastdecode-cluster status`."""

from __future__ import annotations

from typing import Any

from fastdecode.cluster.directory import Entry, View

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
