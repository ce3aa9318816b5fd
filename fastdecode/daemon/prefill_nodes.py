"""Disaggregated prefill: connections over which one S-node asks another to compute a prompt (engine/migration).

A connection serves one prompt. Its end withdraws the prompt. It uses the hand-shake and the frames of an R-node's
control connection: both ends prove that they know the shared secret, and each frame carries a MAC.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import time
from array import array
from collections.abc import Coroutine, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from fastdecode.daemon.discovery import NodeSet, readings
from fastdecode.daemon.tasks import cancel, run_until, wait_until
from fastdecode.engine.migration.prefill_client import PrefillOrder
from fastdecode.engine.migration.prefill_worker import PrefillWorker
from fastdecode.engine.state.request import EngineError, InvalidParameter, InvalidPrompt
from fastdecode.gguf.file import find_gguf, split_paths
from fastdecode.region.contract import Status
from fastdecode.transports import handshake, tcp
from fastdecode.transports.base import CallRefused, Hello, LinkDown, LinkRefused, TransportError
from fastdecode.transports.connections import ConnectionServer, send_last
from fastdecode.transports.frames import MAX_FRAME_AFTER_AUTH, FrameSocket
from fastdecode.transports.messages import Entrust, ErrorMessage, Ok, PromptMessage, ProtocolError

log = logging.getLogger(__name__)

#: A prefill S-node that has failed is not asked again for this many seconds.
_FAILED_SECONDS = 5.0
#: The longest time that a prompt may take, its wait included, before it is computed by the S-node that decodes.
_ORDER_SECONDS = 300.0
#: Most connections that have not proved the secret, and most connections.
_MOST_UNPROVED = 16
_MOST = 1024
#: Bytes of each end of a weight file that are compared.
_SAMPLE = 64 << 10


def model_digest(path: Path, hello: Hello, balance: str = "") -> str:
    """A digest of what two S-nodes must have in common for one to use the other's pages: the model, the KV-cache's
    format, and the matrices by which K is multiplied (`balance`: see balance_digest). Of weight files it covers the
    sizes and both ends. Returns 64 hexadecimal digits."""
    digest = hashlib.blake2b(balance.encode(), digest_size=32)
    g = hello.geometry
    shape = (g.n_layers, g.n_q_heads, g.n_kv_heads, g.head_size, g.v_size, g.v_in_k, g.index_heads, g.index_size)
    digest.update(repr((shape, hello.kv_dtype, hello.windows, hello.softmax_scale, hello.layers)).encode())
    kinds = ("config.json", "*.safetensors", "*.bin")
    gguf = find_gguf(path)
    files = split_paths(gguf) if gguf is not None else sorted(f for kind in kinds for f in path.glob(kind))
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(data.read(_SAMPLE))
            data.seek(max(0, size - _SAMPLE))
            digest.update(data.read(_SAMPLE))
    return digest.hexdigest()


# ---- the S-node that decodes ----


class RemotePrefillNodes:
    """The prefill S-nodes of this S-node (an engine.migration.prefill_client.PrefillNodes)."""

    def __init__(self, urls: Sequence[str], model: str, secret: bytes | None):
        """`model`: see model_digest."""
        self._model, self._secret = model, secret
        self._prefill = tuple(urls)  # in this order, which decides between equals
        self._waiting = dict.fromkeys(urls, 0)  # tokens of the prompts that each S-node has, by its URL
        self._failed: dict[str, float] = {}  # the time of each S-node's last failure

    async def follow(self, nodes: NodeSet) -> None:
        """Ask the S-nodes of this set, as it changes, until the caller cancels. While the set cannot be read, the last
        reading holds; before the first one, there are no S-nodes."""
        async for urls in readings(nodes, "prefill S-nodes"):
            self.use(urls)

    def use(self, urls: Sequence[str]) -> None:
        """Send prompts to these S-nodes from now on. A prompt under way on another S-node is still completed."""
        self._prefill = tuple(urls)
        self._waiting |= {url: 0 for url in urls if url not in self._waiting}

    def _usable(self) -> list[str]:
        """The prefill S-nodes that have not failed lately."""
        now = time.monotonic()
        return [url for url in self._prefill if now - self._failed.get(url, -_FAILED_SECONDS) >= _FAILED_SECONDS]

    def ready(self) -> bool:
        return bool(self._usable())

    async def prefill(self, order: PrefillOrder) -> None:
        """Let the S-node with the fewest waiting tokens compute a prompt. Raises TransportError."""
        usable = self._usable()
        if not usable:
            raise LinkDown("no prefill S-node can be reached")
        url = min(usable, key=self._waiting.__getitem__)
        self._waiting[url] += len(order.tokens)
        try:
            async with asyncio.timeout(_ORDER_SECONDS):
                await self._ask(url, order)
        except (TransportError, TimeoutError) as error:
            if not (isinstance(error, CallRefused) and error.status == Status.BAD_CALL):
                self._failed[url] = time.monotonic()
            raise LinkDown(f"prefill S-node {url}: {error or 'no answer'}") from None
        finally:
            self._waiting[url] -= len(order.tokens)

    async def _ask(self, url: str, order: PrefillOrder) -> None:
        fields = order._asdict() | {"tokens": array("I", order.tokens).tobytes()}
        try:
            message = msgspec.convert(fields, PromptMessage)
        except msgspec.ValidationError as error:  # a client's cache_salt may be long, which is no failure of the S-node
            raise CallRefused(Status.BAD_CALL, str(error)) from None
        conn = await tcp.dial_url(url)
        try:
            async with asyncio.timeout(handshake.DEADLINE_S):
                await handshake.open_prefill(conn, self._model, self._secret)
                try:
                    await conn.write(message)
                except ValueError as error:
                    raise CallRefused(Status.BAD_CALL, str(error)) from None
            answer = await conn.read()
        finally:
            conn.close()
        if isinstance(answer, ErrorMessage):
            raise CallRefused(answer.status, answer.message)
        if not isinstance(answer, Ok):
            raise ProtocolError(f"it answered PROMPT with {answer.TYPE}")


# ---- the prefill S-node ----


class PrefillServer(ConnectionServer):
    """Takes the prompts of other S-nodes."""

    def __init__(self, sock: socket.socket, url: str, worker: PrefillWorker, model: str, secret: bytes | None):
        """Takes ownership of the listening socket. `model`: see model_digest."""
        super().__init__(url, sock, _MOST_UNPROVED, _MOST)
        self._worker, self._model, self._secret = worker, model, secret
        self._name = f"S-node {socket.gethostname()}"

    @classmethod
    async def listen(cls, url: str, worker: PrefillWorker, model: str, secret: bytes | None) -> PrefillServer:
        """Listen at tcp://host:port. Raises TransportError, also if other machines can reach it and there is no
        secret."""
        host, port = tcp.parse(url)
        sock, netloc = await tcp.listen(url, host, port, secret, False)
        return cls(sock, f"tcp://{netloc}", worker, model, secret)

    async def drain(self, seconds: float) -> None:
        """Wait until the prompts under way are computed, at most `seconds`."""
        await wait_until(lambda: not self._tasks, seconds)

    async def close(self) -> None:
        """Stop listening, and withdraw the prompts that are not computed yet."""
        await self.stop_accepting()
        await cancel(*self._tasks)

    def configure(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the peer has already gone
            tcp.configure(sock)

    def peer_name(self, sock: socket.socket) -> str:
        return "a connection"

    async def begin(self, conn: FrameSocket) -> Coroutine[None, None, None]:
        return self._serve(conn, await self._order(conn))

    async def _order(self, conn: FrameSocket) -> PrefillOrder:
        """Do the hand-shake and read the prompt. Raises LinkRefused, LinkDown, ProtocolError."""
        opening = await handshake.challenge(conn, self._name, Entrust)
        if opening.verify(Entrust, self._secret).model != self._model:
            raise LinkRefused("the two S-nodes serve different models, or have KV-caches of different formats")
        self.note_proof()
        await opening.accept()
        conn.max_frame = MAX_FRAME_AFTER_AUTH
        message = await conn.read()
        if not isinstance(message, PromptMessage):
            raise ProtocolError(f"expected PROMPT, got {message.TYPE}")
        if len(message.tokens) % 4:
            raise ProtocolError("the token ids of PROMPT are not whole")
        return PrefillOrder(**asdict(message) | {"tokens": array("I", message.tokens).tolist()})

    async def _serve(self, conn: FrameSocket, order: PrefillOrder) -> None:
        """Compute a prompt while the other S-node keeps the connection open."""
        try:
            work = await run_until(self._worker.prefill(order), conn.readable())
            if work.cancelled():
                return  # the other S-node has closed the connection, or sends something unexpected
            work.result()
            await send_last(conn, Ok(id=0, stats=None))
        except (EngineError, TransportError) as error:
            log.warning("a prompt of another S-node was not computed: %s", error)
            bad = isinstance(error, InvalidPrompt | InvalidParameter)  # another prefill S-node may succeed
            status = Status.BAD_CALL if bad else Status.INTERNAL
            await send_last(conn, ErrorMessage(id=0, status=status, message=str(error)[:4096]))
        except Exception:
            log.exception("%s: a connection failed", self.url)
