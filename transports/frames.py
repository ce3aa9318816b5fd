"""Control frames: 4 bytes of little-endian length, then one message as JSON (`messages.py`), over a stream socket.

A FrameSocket reads one frame at a time and never reads ahead. So the socket can serve another purpose after any frame:
file descriptors can follow, or the C pump can take the socket over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from .base import LinkDown
from .messages import Message, ProtocolError, decode, encode

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
        self._write_lock = asyncio.Lock()

    async def read(self) -> Message:
        """Read the next message. Raises ProtocolError (a bad frame), LinkDown (the connection has ended)."""
        size = int.from_bytes(await self._read_exactly(4, True), "little")
        if size > self.max_frame:
            raise ProtocolError(f"a control frame of {size} bytes is longer than the {self.max_frame} allowed")
        return decode(await self._read_exactly(size, False))

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
        """Send a message. Raises LinkDown."""
        body = encode(message)
        if len(body) > MAX_FRAME_AFTER_AUTH:
            raise ValueError(f"a {message.TYPE} of {len(body)} bytes is longer than the {MAX_FRAME_AFTER_AUTH} allowed")
        async with self._write_lock:
            try:
                await asyncio.get_running_loop().sock_sendall(self.sock, len(body).to_bytes(4, "little") + body)
            except OSError as error:
                raise LinkDown(f"the control connection broke: {os.strerror(error.errno or 0)}") from None

    def end_writing(self) -> None:
        """Shut down the writing half of the connection, so that the peer reads its end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; no task may be reading or writing. Idempotent."""
        self.sock.close()
