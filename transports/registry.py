"""The table of transports by URL scheme; `connect`, `dial` and `serve` for any of them. A new transport adds a line."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator
from types import ModuleType

from . import handshake
from .base import Hello, Link, LinkDown, LinkRefused, LinkService, Server, TransportError
from .frames import FrameSocket
from .messages import ProtocolError
from .session import secret_fault

#: URL scheme -> module of this package. A module is imported when its scheme is first used.
SCHEMES = {
    "shm": ".shm",
    "tcp": ".tcp",
    "rdma": ".rdma",
}

#: Default of `spin_us`. A small reply over shared memory takes tens of microseconds.
SPIN_US = 50


def _module(url: str) -> ModuleType:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{s}://" for s in SCHEMES)
        raise TransportError(f"{url!r} does not begin with a known transport, which are {known}")
    return importlib.import_module(SCHEMES[scheme], __package__)


def _check_secret(secret: bytes | None) -> None:
    if secret is not None and (fault := secret_fault(secret)):
        raise TransportError(f"the shared secret {fault}")


async def connect(url: str, hello: Hello, secret: bytes | None, *, spin_us: int | None = None) -> Link:
    """Open a link to the R-node at `url`. A waiter spins for `spin_us` microseconds before it sleeps.

    Raises LinkRefused (the R-node refuses the hand-shake), LinkDown (no R-node answers within handshake.DEADLINE_S),
    TransportError (bad URL, a secret that is empty or too short, or a device that this machine lacks).
    """
    async with _hand_shake(url, secret):
        spin_us = SPIN_US if spin_us is None else spin_us
        link: Link = await _module(url).connect(url, hello, secret, spin_us=spin_us)
        return link


async def probe(url: str, secret: bytes | None) -> None:
    """Return if the R-node at `url` can be reached and would open a link to an S-node with this secret. Raises what
    `connect` raises."""
    async with _hand_shake(url, secret):
        with contextlib.closing(await dial(url)) as conn:
            await handshake.probe(conn, secret)


@contextlib.asynccontextmanager
async def _hand_shake(url: str, secret: bytes | None) -> AsyncIterator[None]:
    """Check the secret, and let the errors of a hand-shake name `url`."""
    _check_secret(secret)
    try:
        async with asyncio.timeout(handshake.DEADLINE_S):
            yield
    except TimeoutError:
        raise LinkDown(f"{url} did not finish the hand-shake within {handshake.DEADLINE_S:.0f} s") from None
    except ProtocolError as error:
        raise ProtocolError(f"{url} does not answer as an R-node: {error}") from None
    except LinkRefused as error:
        raise LinkRefused(f"{url} refuses: {error}") from None


async def dial(url: str) -> FrameSocket:
    """Connect to the R-node at `url`, for something else than a link. Raises LinkDown, LinkRefused, TransportError."""
    conn: FrameSocket = await _module(url).dial_url(url)
    return conn


async def serve(url: str, service: LinkService, secret: bytes | None, *, insecure: bool = False) -> Server:
    """Accept links at `url` for `service`.

    Without a secret, a transport refuses to listen on an address that other machines can reach, unless `insecure` is
    true. Raises TransportError if the transport cannot, or may not, listen at `url`, and for a bad secret.
    """
    _check_secret(secret)
    server: Server = await _module(url).serve(url, service, secret, insecure=insecure)
    return server
