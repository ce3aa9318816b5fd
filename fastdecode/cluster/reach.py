"""How an S-node reaches an R-node: shared memory on one machine, RDMA where both ends have it, else TCP."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
