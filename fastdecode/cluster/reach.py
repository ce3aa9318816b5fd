"""How an S-node reaches an R-node: shared memory on one machine, RDMA where both ends have it, else TCP."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from fastdecode.cluster.config import ClusterError
from fastdecode.transports.rdma_devices import list_ports

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """A number of this machine's run. Containers of one machine share it, though they may share no files."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def has_rdma() -> bool:
    """True if this machine has an RDMA port that is up, and the library that drives it."""
    if not any(port.active for port in list_ports()):
        return False
    try:
        import pyverbs  # noqa: F401
    except ImportError:
        return False
    return True


def address_in(network: str) -> str:
    """This machine's address in a network: that from which the kernel would send to the network's first address.
    Raises ClusterError."""
    wanted = ipaddress.ip_network(network)
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        try:
            probe.connect((str(next(iter(wanted.hosts()))), 9))
            address = str(probe.getsockname()[0])
        except OSError:
            address = ""
    if not address or ipaddress.ip_address(address) not in wanted:
        raise ClusterError(f"network: the machine {socket.gethostname()} has no address in {network}")
    return address


@dataclass(frozen=True, slots=True)
class Reach:
    """The addresses of an R-node."""

    tcp: str
    rdma: str | None
    socket: str  # path of its Unix socket
    boot: str
    user: int

    @property
    def urls(self) -> list[str]:
        """All of its URLs."""
        return [f"shm://{self.socket}", self.tcp, *([self.rdma] if self.rdma else [])]

    def url(self, transport: str, *, rdma: bool) -> str:
        """The URL for an S-node of this process's machine and user, as --r-nodes-file has it. `rdma`: has_rdma().

        A URL of shared memory is followed by # and the URL at which R-nodes of other machines can bring sequences.
        """
        same_host = self.boot == boot_id() and self.user == os.getuid() and Path(self.socket).is_socket()
        if transport == "auto" and same_host:
            return f"shm://{self.socket}#{self.tcp}"
        if transport == "auto" and self.rdma and rdma:
            return self.rdma
        return self.tcp
