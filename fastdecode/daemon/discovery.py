"""A set of nodes: a fixed list, a file that is watched, or a host name with several addresses.

An S-node has a set of R-nodes, a router has a set of S-nodes. A node that joins or leaves a file or a name is taken up
or given up while the S-node or the router runs (rnode_links.py, router/pool.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from fastdecode.daemon import option_values
from fastdecode.transports.registry import SCHEMES

if TYPE_CHECKING:
    from fastdecode.daemon.config import NodeConfig

log = logging.getLogger(__name__)

#: Seconds between two looks at a file, and between two questions to the resolver.
_FILE_SECONDS = 0.5
_DNS_SECONDS = 2.0
#: Answers in a row without an address, after which it has left the name. One answer may be cut short.
_MISSED_ANSWERS = 3


class DiscoveryError(Exception):
    """The set cannot be read now; the message is a sentence for the user."""


class NodeSet(Protocol):
    """A set of nodes."""

    interval: float | None  # seconds between two calls of `read`; None: the set never changes

    async def read(self) -> Sequence[str]:
        """The nodes' URLs now, without duplicates. Raises DiscoveryError; the caller then keeps the set it has."""
        ...


async def readings(nodes: NodeSet, name: str) -> AsyncGenerator[Sequence[str], None]:
    """The URLs of a set now, and again after each interval, until the set cannot change. While it cannot be read, the
    log says once that the `name`, such as "R-nodes", stay as they are."""
    logged = ""
    while True:
        try:
            urls = await nodes.read()
        except DiscoveryError as error:
            if str(error) != logged:
                logged = str(error)
                log.warning("the set of %s stays as it is: %s", name, logged)
        else:
            logged = ""
            yield urls
        if nodes.interval is None:
            return
        await asyncio.sleep(nodes.interval)


class FixedSet:
    """The URLs that the command line gives."""

    interval: float | None = None

    def __init__(self, urls: Sequence[str]):
        self._urls = urls

    async def read(self) -> Sequence[str]:
        return self._urls


class FileSet:
    """The URLs of nodes in a file, one a line or one an item of a YAML list; `#` begins a comment.

    The file may be written in place or replaced. A changed file counts once two looks in a row have found it the same,
    so that a file that is still being written is left alone.
    """

    interval: float | None = _FILE_SECONDS

    def __init__(self, path: Path, schemes: Collection[str] = SCHEMES, *, may_be_empty: bool = False):
        self._path, self._schemes, self._may_be_empty = path, schemes, may_be_empty
        self._content: tuple[str, ...] | DiscoveryError | None = None  # of the file that was parsed last
        self._taken: tuple[int, int, int] | None = None  # inode, time of change and size of that file
        self._seen: tuple[int, int, int] | None = None  # those of the file at the last look

    async def read(self) -> Sequence[str]:
        try:
            stat = os.stat(self._path)
            now, before = (stat.st_ino, stat.st_mtime_ns, stat.st_size), self._seen
            self._seen = now
            if now != self._taken and (now == before or self._taken is None):
                text = self._path.read_bytes()
                self._taken = now
                self._content = parse_list(text.decode(), self._schemes, may_be_empty=self._may_be_empty)
        except OSError as error:
            raise DiscoveryError(f"{self._path}: {error.strerror}") from None
        except ValueError as error:
            self._content = DiscoveryError(f"{self._path}: {error}")
        assert self._content is not None, "a file that could be read was parsed"
        if isinstance(self._content, DiscoveryError):
            raise DiscoveryError(str(self._content))
        return self._content


def parse_list(text: str, schemes: Collection[str] = SCHEMES, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """The URLs of a file: lines, or a YAML list; each of one of `schemes`.

    Raises ValueError, also for a list without URLs unless it `may_be_empty`.
    """
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is neither lines nor YAML: {' '.join(str(error).split())}") from None
    items = content.split() if isinstance(content, str) else content or []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError("is not a list of URLs")
    for item in items:
        option_values.url(item)
        if urlsplit(item).scheme not in schemes:
            raise ValueError(f"{item!r} does not begin with one of {', '.join(schemes)}")
    if not items and not may_be_empty:
        raise ValueError("names no node")
    return tuple(dict.fromkeys(items))


class DnsSet:
    """One node at each address of a host name, such as that of a headless service of Kubernetes."""

    interval: float | None = _DNS_SECONDS

    def __init__(self, url: str):
        """`url`: scheme://host:port."""
        parts = urlsplit(url)
        self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        self._missed: Counter[str] = Counter()  # answers in a row that lacked the address

    async def read(self) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise DiscoveryError(f"{self._host}: {error.strerror or error}") from None
        addresses = {str(address[0]) for *_, address in found}
        for address in [known for known in self._missed if known not in addresses]:
            self._missed[address] += 1
            if self._missed[address] >= _MISSED_ANSWERS:
                del self._missed[address]
        for address in addresses:
            self._missed[address] = 0
        return [f"{self._scheme}://{bracketed(a)}:{self._port}" for a in sorted(self._missed)]


def bracketed(address: str) -> str:
    """An IP address as a URL has it (RFC 3986, section 3.2.2)."""
    return f"[{address}]" if ":" in address else address


def r_node_set(config: NodeConfig) -> NodeSet:
    """The set that the options name; `config.uses_r_nodes` is true. A team of R-nodes counts as one R-node."""
    if config.r_nodes_file is not None:
        return FileSet(config.r_nodes_file)
    if config.r_nodes_dns is not None:
        return DnsSet(config.r_nodes_dns)
    return FixedSet((" + ".join(config.r_node),) if config.parts > 1 else config.r_node)
