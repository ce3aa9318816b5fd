"""TCP ports for processes that must be told theirs, because they take several in a row."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

from session_folder import session_folder

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextlib.contextmanager
def ports_in_a_row(n: int) -> Iterator[int]:
    """The first of n ports of 127.0.0.1. The kernel gives none of them to a socket that takes any port, and no other
    test of the session gets one of them until the end."""
    lowest = int(_RANGE.read_text().split()[0])
    for first in range(lowest - n, 1024, -n):
        with (session_folder() / f"ports-{n}-{first}").open("w") as lock, contextlib.ExitStack() as held:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for port in range(first, first + n):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            held.close()
            yield first
            return
    raise OSError(f"no {n} ports below {lowest} are free")
