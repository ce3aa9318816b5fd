"""Transports by URL scheme: add a line here for a new one."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType

from . import handshake
from .base import Hello, Link, LinkDown, LinkService, Server, TransportError

SCHEMES = {"shm": ".shm", "tcp": ".tcp", "rdma": ".rdma"}

#: Unless told otherwise. A small reply over shared memory takes tens of microseconds.
SPIN_US = 50


def _module(url: str) -> ModuleType:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise TransportError(f"{url!r} does not begin with a known transport, which are {known}")
    return importlib.import_module(SCHEMES[scheme], __package__)


def _check_secret(secret: bytes | None) -> None:
    if secret is not None and not secret.strip():
        raise TransportError("the shared secret is empty")


async def connect(url: str, hello: Hello, secret: bytes | None, *, spin_us: int | None = None) -> Link:
    """Open a link to the R-node at `url`. `spin_us`: how long a waiter spins before it sleeps.

    Raises LinkRefused, LinkDown, TransportError.
    """
    _check_secret(secret)
    try:
        async with asyncio.timeout(handshake.DEADLINE_S):
            return await _module(url).connect(url, hello, secret, spin_us=SPIN_US if spin_us is None else spin_us)
    except TimeoutError:
        raise LinkDown(f"{url} did not finish the hand-shake within {handshake.DEADLINE_S:.0f} s") from None


async def serve(url: str, service: LinkService, secret: bytes | None, *, insecure: bool = False) -> Server:
    """Serve links at `url`. Raises TransportError if it cannot listen there, or should not (`insecure`: see tcp.py)."""
    _check_secret(secret)
    return await _module(url).serve(url, service, secret, insecure=insecure)
