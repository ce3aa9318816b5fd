"""The RDMA lines of `fastdecode-node --check`."""

from __future__ import annotations

from pathlib import Path

from .base import TransportError
from .rdma_devices import SYSFS, RdmaPort, describe_memlock, list_ports, read_sysfs
from .rdma_endpoint import Verbs, load


def report(root: Path = SYSFS) -> str:
    """A text for users: the first line says whether RDMA is usable, and then each port has a line.

    A port's line gives its state, link layer, MTU and GIDs.
    """
    ports = list_ports(root)
    verbs: Verbs | None = None
    missing = ""
    try:
        verbs = load()
    except TransportError as error:
        missing = str(error)
    if not ports:
        verdict = "no devices" + (f"; {missing}" if missing else "")
    elif missing:
        verdict = f"not usable: {missing}"
    elif not any(port.active for port in ports):
        verdict = "not usable: no port is active"
    else:
        verdict = f"usable, {describe_memlock()}"
    return "\n".join([verdict, *(_describe(port, verbs) for port in ports)])


def _describe(port: RdmaPort, verbs: Verbs | None) -> str:
    state = "active" if port.active else "down"
    layer = "RoCE" if port.ethernet else f"InfiniBand, LID {port.lid}"
    gids = ", ".join(map(str, port.gids)) or "none"
    return f"{port}: {state}, {layer}, MTU {_mtu(port, verbs)}, GIDs {gids}"


def _mtu(port: RdmaPort, verbs: Verbs | None) -> str:
    """The port's active MTU from pyverbs; without pyverbs, the MTU of its network interface."""
    if verbs is not None:
        try:
            return str(verbs.active_mtu(port))
        except TransportError as error:
            return f"unknown ({error})"
    interfaces = {g.interface for g in port.gids if g.interface}
    return ", ".join(f"{read_sysfs(Path('/sys/class/net', i, 'mtu'))} of {i}" for i in sorted(interfaces)) or "unknown"
