"""A man in the middle: a TCP proxy before an R-node that reads, holds, changes and makes up control frames."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Literal

from wire.wire_peers import Caller

Sender = Literal["S-node", "R-node"]
#: Called with the connection's number, the sender, the frame's number (each counted from 0) and the frame's body.
#: Returns the bodies to send on in its place.
Interfere = Callable[[int, Sender, int, bytes], Awaitable[list[bytes]]]


class FrameProxy:
    """An async context manager. A link that is opened at `url` has its control connection as connection 0.

    `interfere` sees the frames of the hand-shake of every connection, and all later frames of control connections.
    """

    def __init__(self, r_node_url: str, interfere: Interfere):
        self.r_node_url = r_node_url
        self._interfere = interfere
        self._writers: list[dict[Sender, asyncio.StreamWriter]] = []
        self._relays: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FrameProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        for writers in self._writers:
            for writer in writers.values():
                writer.close()

    def send(self, connection: int, to: Sender, body: bytes) -> None:
        """Send a frame in the name of the other end."""
        self._writers[connection][to].write(struct.pack("<I", len(body)) + body)

    async def _accept(self, from_s_node: asyncio.StreamReader, to_s_node: asyncio.StreamWriter) -> None:
        r_node = await Caller.dial(self.r_node_url)
        number = len(self._writers)
        self._writers.append({"S-node": to_s_node, "R-node": r_node.writer})
        for sender, reader, to in (("S-node", from_s_node, "R-node"), ("R-node", r_node.reader, "S-node")):
            self._relays.append(asyncio.create_task(self._relay(number, sender, reader, to)))

    async def _relay(self, connection: int, sender: Sender, reader: asyncio.StreamReader, to: Sender) -> None:
        writer, number, is_data = self._writers[connection][to], 0, False
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not is_data:
                (size,) = struct.unpack("<I", await reader.readexactly(4))
                body = await reader.readexactly(size)
                is_data = b'"ATTACH' in body  # the last frame of a data connection in either direction
                for part in await self._interfere(connection, sender, number, body):
                    self.send(connection, to, part)
                await writer.drain()
                number += 1
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
