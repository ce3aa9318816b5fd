"""Control frames: 4 bytes of little-endian length, then one message as JSON (`messages.py`), over a stream socket.

Once the two ends share keys, a MAC of 32 bytes follows the JSON (session.Seal); the length counts it.

A FrameSocket reads one frame at a time and never reads ahead. So the socket can serve another purpose after any frame:
file descriptors can follow, or the C pump can take the socket over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from .base import LinkDown
from .messages import Message, ProtocolError, decode, encode
from .session import MAC_BYTES, Seal

#: Longest frame in bytes that this end accepts, before and after the peer has proved that it knows the secret.
MAX_FRAME_BEFORE_AUTH = 64 << 10
MAX_FRAME_AFTER_AUTH = 1 << 20


class FrameSocket:
    """A non-blocking stream socket that carries control frames. One task may read at a time; any task may write."""

    def __init__(self, sock: socket.socket):
        """Takes ownership of `sock`."""
        sock.setblocking(False)
        self.sock = sock
        self.max_frame = MAX_FRAME_BEFORE_AUTH
        self._own_seal: Seal | None = None
        self._peer_seal: Seal | None = None
        self._unsent = bytearray()
        self._write_lock = asyncio.Lock()

    def seal(self, own: Seal, peer: Seal) -> None:
        """Put a MAC behind every frame from now on, and demand one behind every frame of the peer."""
        self._own_seal, self._peer_seal = own, peer

    async def read(self) -> Message:
        """Read the next message. Raises ProtocolError (a bad frame), LinkDown (the connection has ended)."""
        size = int.from_bytes(await self._read_exactly(4, True), "little")
        if size > self.max_frame:
            raise ProtocolError(f"a control frame of {size} bytes is longer than the {self.max_frame} allowed")
        body = await self._read_exactly(size, False)
        return decode(self._peer_seal.open(body) if self._peer_seal else body)

    async def _read_exactly(self, n: int, at_boundary: bool) -> bytes:
        data = bytearray()
        while len(data) < n:
            try:
                part = await asyncio.get_running_loop().sock_recv(self.sock, n - len(data))
            except OSError as error:
                raise LinkDown(f"the control connection broke: {os.strerror(error.errno or 0)}") from None
            if not part:
                if at_boundary and not data:
                    raise LinkDown("the peer closed the connection")
                raise ProtocolError("the control connection ended within a frame")
            data += part
        return bytes(data)

    async def write(self, message: Message) -> None:
        """Send a message. Raises LinkDown.

        If the caller is cancelled, the next `write` sends the rest, because a frame that is cut short, or left out of
        the seal's count, would end the connection.
        """
        body = encode(message)
        size = len(body) + (MAC_BYTES if self._own_seal else 0)
        if size > MAX_FRAME_AFTER_AUTH:
            raise ValueError(f"a {message.TYPE} of {size} bytes is longer than the {MAX_FRAME_AFTER_AUTH} allowed")
        if self._own_seal:
            body = self._own_seal.close(body)
        self._unsent += size.to_bytes(4, "little") + body  # in the order of the seal's counter
        async with self._write_lock:
            try:
                while self._unsent:
                    await self._send_some()
            except OSError as error:
                raise LinkDown(f"the control connection broke: {os.strerror(error.errno or 0)}") from None

    async def _send_some(self) -> None:
        try:
            del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            await self.writable()

    async def writable(self) -> None:
        """Wait until the socket can take bytes."""
        loop = asyncio.get_running_loop()
        await self._ready(loop.add_writer, loop.remove_writer)

    async def readable(self) -> None:
        """Wait until the socket has bytes, or has ended."""
        loop = asyncio.get_running_loop()
        await self._ready(loop.add_reader, loop.remove_reader)

    async def _ready(self, add: Callable[..., None], remove: Callable[[socket.socket], bool]) -> None:
        ready = asyncio.Event()
        add(self.sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self.sock)

    def end_writing(self) -> None:
        """Shut down the writing half of the connection, so that the peer reads its end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; no task may be reading or writing. Idempotent."""
        self.sock.close()
