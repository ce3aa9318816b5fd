"""The RDMA devices that the kernel lists, and the choice of a port and a GID for a link. This module needs no pyverbs.

A port on Ethernet (RoCE) has one GID for each address of its network interface and each version of RoCE. Links use
version 2, which can be routed. A port on InfiniBand has a LID within its subnet.
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
#: A GID table may have a thousand entries, which the kernel fills from the front. The search of a table ends after this
#: many empty entries in a row.
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
        """The IP address of the network interface that the GID stands for."""
        return self.address.ipv4_mapped or self.address

    def __str__(self) -> str:
        return f"{self.index} ({self.host}, {self.type}{', ' + self.interface if self.interface else ''})"


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
    """The port and GID of a link's queue pair. `gid` is None on InfiniBand, where the LID addresses a port."""

    port: RdmaPort
    gid: Gid | None


def read_sysfs(path: Path) -> str:
    """The content of a sysfs file, or "": entries come and go, and the attributes of an empty GID cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gids(port: Path) -> tuple[Gid, ...]:
    gids: list[Gid] = []
    for index in range(_GIDS_MAX):
        text = read_sysfs(port / "gids" / str(index))
        if text.strip("0:"):
            kind, interface = (read_sysfs(port / "gid_attrs" / name / str(index)) for name in ("types", "ndevs"))
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
            active=read_sysfs(path / "state").endswith("ACTIVE"),
            ethernet=read_sysfs(path / "link_layer") == "Ethernet",
            lid=int(read_sysfs(path / "lid") or "0", 16),
            gids=_gids(path),
        )
        for path in sorted(root.glob("*/ports/*"))
    ]


def choose(
    ports: list[RdmaPort], local: str, device: str | None = None, number: int | None = None, gid: int | None = None
) -> PortGid:
    """The port and GID for a link whose control connection has the IP address `local` at this end.

    `local` belongs to the interface that routes to the peer, so the link uses the RoCE v2 GID of that address. If no
    port has such a GID, a port is chosen only if it is the only active one that `device` and `number` allow. `gid`
    is an index into the GID table and overrides the choice of the GID. Raises TransportError.
    """
    if not ports:
        raise TransportError("this machine has no RDMA device")
    allowed = [p for p in ports if device in (None, p.device) and number in (None, p.number)]
    if not allowed:
        wanted = device if number is None else f"{device or 'any device'} port {number}"
        raise TransportError(f"there is no RDMA port {wanted} here, there are {', '.join(map(str, ports))}")
    active = [p for p in allowed if p.active]
    if not active:
        raise TransportError(f"{', '.join(map(str, allowed))} is not active: is its link up?")

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
            f"no RDMA port has the address {host}, so the choice of a port is not clear: name one of "
            f"{', '.join(map(str, active))} as ?device=NAME&port=NUMBER"
        )
    port = active[0]
    if gid is not None:
        for entry in port.gids:
            if entry.index == gid:
                return PortGid(port, entry)
        raise TransportError(f"{port} has no GID {gid}, it has {', '.join(map(str, port.gids)) or 'none'}")
    if not port.ethernet:
        return PortGid(port, None)
    routable = [g for g in port.gids if g.type == _ROCE_V2 and not g.host.is_link_local]
    if not routable:
        raise TransportError(f"{port} has no RoCE v2 GID with a routable address: give its interface an IP address")
    return PortGid(port, routable[0])


def describe_memlock() -> str:
    """A phrase for users: how much memory this process may register with an RDMA device."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return "any region may be locked into memory"
    return f"regions of up to {soft >> 10} KiB together may be locked into memory (ulimit -l)"
