"""RDMA devices as the kernel lists them, and the choice of a port and a GID. Needs no pyverbs.

A port on Ethernet (RoCE) has a GID for each address of its network interface, in both versions of RoCE; version 2 is
routable and the one used here. A port on InfiniBand has a LID within its subnet.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from .base import TransportError

SYSFS = Path("/sys/class/infiniband")
_ROCE_V2 = "RoCE v2"
#: A GID table may have a thousand entries. The kernel fills it from the front, so after a gap as long as this nothing
#: more is looked for.
_GIDS_MAX, _GAP = 1024, 16


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    address: IPv6Address
    type: str  # as the kernel calls it: "RoCE v2", "IB/RoCE v1"
    interface: str  # network interface, or ""

    @property
    def host(self) -> IPv4Address | IPv6Address:
        """The host's address that the GID stands for."""
        return self.address.ipv4_mapped or self.address


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one device."""

    device: str
    number: int
    active: bool
    ethernet: bool
    lid: int
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        return f"{self.device} port {self.number}"


@dataclass(frozen=True, slots=True)
class PortGid:
    """Where a link's queue pair is to be. `gid` is None on InfiniBand, within whose subnet LIDs do."""

    port: RdmaPort
    gid: Gid | None


def _text(path: Path) -> str:
    """What a file of sysfs says, or "": entries come and go, and an empty GID's attributes cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gids(port: Path) -> tuple[Gid, ...]:
    gids: list[Gid] = []
    for index in range(_GIDS_MAX):
        text = _text(port / "gids" / str(index))
        if text.strip("0:"):
            kind, interface = (_text(port / "gid_attrs" / name / str(index)) for name in ("types", "ndevs"))
            gids.append(Gid(index, IPv6Address(text), kind, interface))
        elif index - (gids[-1].index if gids else 0) > _GAP:
            break
    return tuple(gids)


def list_ports(root: Path = SYSFS) -> list[RdmaPort]:
    """All ports of all devices."""
    return [
        RdmaPort(
            device=path.parent.parent.name,
            number=int(path.name),
            active=_text(path / "state").endswith("ACTIVE"),
            ethernet=_text(path / "link_layer") == "Ethernet",
            lid=int(_text(path / "lid") or "0", 16),
            gids=_gids(path),
        )
        for path in sorted(root.glob("*/ports/*"))
    ]


def choose(
    ports: list[RdmaPort], local: str, device: str | None = None, number: int | None = None, gid: int | None = None
) -> PortGid:
    """The port and GID for a link whose control connection has the address `local` at this end.

    That is the address of the interface that routes to the peer, so the RoCE v2 GID that stands for it is the one to
    use. Where there is none, a port is used only if it is the only one or named by `device` (and `number`). Raises
    TransportError.
    """
    if not ports:
        raise TransportError("this machine has no RDMA device")
    fitting = [p for p in ports if device in (None, p.device) and number in (None, p.number)]
    if not fitting:
        wanted = device if number is None else f"{device or 'any device'} port {number}"
        raise TransportError(f"there is no RDMA port {wanted} here, there are {', '.join(map(str, ports))}")
    active = [p for p in fitting if p.active]
    if not active:
        raise TransportError(f"{', '.join(map(str, fitting))} is not active: is its link up?")

    host = ip_address(local.split("%")[0])
    if isinstance(host, IPv6Address) and host.ipv4_mapped:
        host = host.ipv4_mapped
    if gid is None:
        for port in active:
            for entry in port.gids:
                if entry.type == _ROCE_V2 and entry.host == host:
                    return PortGid(port, entry)
    if len(active) > 1:
        raise TransportError(
            f"which RDMA port to use is not clear, as none has {host} for an address: name one of "
            f"{', '.join(map(str, active))} as ?device=NAME&port=NUMBER"
        )
    port = active[0]
    if gid is not None:
        for entry in port.gids:
            if entry.index == gid:
                return PortGid(port, entry)
        raise TransportError(f"{port} has no GID {gid}, it has {', '.join(_show(g) for g in port.gids) or 'none'}")
    if not port.ethernet:
        return PortGid(port, None)
    routable = [g for g in port.gids if g.type == _ROCE_V2 and not g.host.is_link_local]
    if not routable:
        raise TransportError(f"{port} has no RoCE v2 GID with a routable address: give its interface an IP address")
    return PortGid(port, routable[0])


def _show(gid: Gid) -> str:
    return f"{gid.index} ({gid.host}, {gid.type}{', ' + gid.interface if gid.interface else ''})"


# ---- fastdecode-node --check ----


def report(root: Path = SYSFS) -> str:
    """Devices, ports, GIDs, MTU and memlock, with a verdict; for people. The first line is the verdict."""
    from .rdma_endpoint import load

    ports = list_ports(root)
    try:
        verbs = load()
        lacking = ""
    except TransportError as error:
        verbs = None
        lacking = str(error)
    lines = []
    for port in ports:
        state = "active" if port.active else "down"
        mtu = _mtu(verbs, port)
        layer = "RoCE" if port.ethernet else f"InfiniBand, LID {port.lid}"
        lines.append(f"{port}: {state}, {layer}, MTU {mtu}, GIDs {', '.join(map(_show, port.gids)) or 'none'}")
    if not ports:
        verdict = "no devices" + (f"; {lacking}" if lacking else "")
    elif lacking:
        verdict = f"not usable: {lacking}"
    elif not any(port.active for port in ports):
        verdict = "not usable: no port is active"
    else:
        verdict = f"usable, {memlock()}"
    return "\n".join([verdict, *lines])


def _mtu(verbs, port: RdmaPort) -> str:
    """The port's active MTU from the device, or, if that cannot be opened, its interface's."""
    if verbs is not None:
        try:
            return str(verbs.active_mtu(port))
        except TransportError as error:
            return f"unknown ({error})"
    interfaces = {g.interface for g in port.gids if g.interface}
    return ", ".join(f"{_text(Path('/sys/class/net', i, 'mtu'))} of {i}" for i in sorted(interfaces)) or "unknown"


def memlock() -> str:
    """How much memory a process may register, for people."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return "any region may be locked into memory"
    return f"regions of up to {soft >> 10} KiB together may be locked into memory (ulimit -l)"
