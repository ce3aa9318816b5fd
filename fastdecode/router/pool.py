"""The S-nodes behind a router: which of them answer, how busy they are, and which one a request goes to.

A request goes to the S-node that has seen the longest beginning of its prompt, because the S-node's prefix cache may
still have it, as long as that one is not much busier than the others; else to the least busy one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from fastdecode.api.continuation import HEADER, router_proof
from fastdecode.daemon.discovery import NodeSet, readings
from fastdecode.daemon.tasks import cancel

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 1.0  # between two questions to an S-node
_HEALTH_TIMEOUT = 3.0
#: The most requests by which an S-node may exceed the least busy one and still get a prompt whose prefix it has seen.
_AFFINITY_SLACK = 4
#: The bytes of a block of a prompt, about one KV page of English, and the most blocks that are compared.
BLOCK_BYTES = 512
_MAX_BLOCKS = 256
#: Blocks that an S-node is remembered to have seen.
_REMEMBERED = 1 << 16


def prefix_keys(text: bytes) -> list[bytes]:
    """A key for each whole block of a prompt, which stands for the prompt up to the end of that block."""
    keys, state = [], hashlib.blake2b(digest_size=16)
    for end in range(BLOCK_BYTES, min(len(text), BLOCK_BYTES * _MAX_BLOCKS) + 1, BLOCK_BYTES):
        state.update(text[end - BLOCK_BYTES : end])
        keys.append(state.digest())
    return keys


def why_lost(error: Exception) -> str:
    """Why a request to an S-node has failed, as a clause."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is refused ({reason.rstrip('.')}); --s-node-ca names the certificates that may sign it"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "it does not speak TLS as its https URL says"
    if isinstance(error, aiohttp.ClientConnectorError):
        number, cause = error.os_error.errno or 0, error.os_error
        return f"cannot connect: {os.strerror(number) if number > 0 else cause.strerror or cause}"
    return str(error) or type(error).__name__


@dataclass(eq=False, slots=True)
class SNode:
    """One S-node as the router sees it."""

    url: str  # http://host:port
    healthy: bool = False
    trusting: bool = False  # it has this router's secret, so that its streams can go on elsewhere
    why_not: str = "it has not been asked yet"
    requests: int = 0  # that this router waits for
    other_requests: int = 0  # that other clients wait for, by the S-node's last answer to /health
    task: asyncio.Task[None] | None = None
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return self.requests + self.other_requests

    def known(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the S-node has seen."""
        n = 0
        while n < len(keys) and keys[n] in self.seen:
            n += 1
        return n

    def remember(self, keys: Sequence[bytes]) -> None:
        """Note that the S-node gets a prompt with these blocks."""
        for key in keys:
            self.seen[key] = None
            self.seen.move_to_end(key)
        while len(self.seen) > _REMEMBERED:
            self.seen.popitem(last=False)


class Pool:
    """All S-nodes of a router, as their set (daemon/discovery.py) changes. Belongs to one event loop."""

    def __init__(
        self, nodes: NodeSet, session: aiohttp.ClientSession, secret: bytes | None = None, tls_name: str | None = None
    ):
        """`secret`: that of the S-nodes, which the router proves to them; None: it has none.
        `tls_name`: the name in the certificates of S-nodes at https URLs; None: the host of the URL."""
        self.s_nodes: list[SNode] = []
        self.tls_name = tls_name
        self._proof = {} if secret is None else {HEADER: router_proof(secret, b"")}
        self._nodes, self._session = nodes, session
        self._turn = 0
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to ask the S-nodes how they are, and to follow the set."""
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = (self._following, *(s_node.task for s_node in self.s_nodes))
        await cancel(*(task for task in tasks if task is not None))

    def choose(self, keys: Sequence[bytes], tried: Collection[SNode] = ()) -> SNode | None:
        """The S-node for a prompt with these blocks; None if no S-node can take it except those in `tried`."""
        able = [s_node for s_node in self.s_nodes if s_node.healthy and s_node not in tried]
        if not able:
            return None
        self._turn += 1
        turn = self._turn % len(able)
        able = able[turn:] + able[:turn]  # equal ones take turns
        least = min(able, key=lambda s_node: s_node.load)
        best = max(able, key=lambda s_node: (s_node.known(keys), -s_node.load))
        chosen = best if best.known(keys) and best.load <= least.load + _AFFINITY_SLACK else least
        chosen.remember(keys)
        return chosen

    def suspect(self, s_node: SNode, why: str) -> None:
        """Send an S-node nothing more until it answers /health again."""
        if s_node.healthy or why != s_node.why_not:
            log.warning("S-node %s: %s", s_node.url, why)
        s_node.healthy, s_node.why_not = False, why

    def _accept(self, s_node: SNode, *, trusting: bool) -> None:
        """Send requests to an S-node from now on. `trusting`: it has this router's secret."""
        if not s_node.healthy:
            log.info("S-node %s takes requests", s_node.url)
        if self._proof and not trusting and (s_node.trusting or not s_node.healthy):
            log.warning("S-node %s lacks this router's secret: its streams end if it is lost", s_node.url)
        s_node.healthy, s_node.trusting, s_node.why_not = True, trusting, ""

    async def _follow(self) -> None:
        async for urls in readings(self._nodes, "S-nodes"):
            self._take(urls)

    def _take(self, urls: Sequence[str]) -> None:
        known = {s_node.url for s_node in self.s_nodes}
        for s_node in [s for s in self.s_nodes if s.url not in urls]:
            log.info("S-node %s has left the set", s_node.url)
            self.s_nodes.remove(s_node)  # the requests that it has go on
            if s_node.task is not None:
                s_node.task.cancel()
        for url in urls:
            if url not in known:
                log.info("S-node %s joins the set", url)
                self.s_nodes.append(s_node := SNode(url))
                s_node.task = asyncio.create_task(self._ask(s_node))

    async def _ask(self, s_node: SNode) -> None:
        """Ask an S-node for its health, over and over."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT)
        while True:
            try:
                asking = self._session.get(
                    f"{s_node.url}/health", headers=self._proof, timeout=timeout, server_hostname=self.tls_name
                )
                async with asking as answer:
                    body = orjson.loads(await answer.read())
                    status = str(body["status"])
                    if answer.status != 200:
                        self.suspect(s_node, status)
                    elif (trust := body.get("router")) == "refused":
                        self.suspect(s_node, "answers only routers that prove its secret (--secret-file)")
                    else:
                        s_node.other_requests = max(0, int(body["running"]) + int(body["waiting"]) - s_node.requests)
                        self._accept(s_node, trusting=trust == "trusted")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.suspect(s_node, f"does not answer: {why_lost(error)}")
            except (ValueError, KeyError, TypeError):
                self.suspect(s_node, "its /health is not that of an S-node")
            await asyncio.sleep(_HEALTH_SECONDS)
