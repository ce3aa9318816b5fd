"""Control frames: 4 bytes of little-endian length, then one message as JSON (`messages.py`), over a stream socket.

A socket is read exactly a frame at a time, never ahead. So a connection can change hands after any frame: descriptors
can follow on it, or the C pump can take it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from .base import LinkDown
from .messages import Message, ProtocolError, decode, encode

#: Longest frame taken from a peer that has not shown that it knows the secret, and from one that has.
CAP_BEFORE_AUTH = 64 << 10
CAP_AFTER_AUTH = 1 << 20


class FrameSocket:
    """A non-blocking stream socket that carries control frames. One task reads; any may write."""

    def __init__(self, sock: socket.socket):
        """Takes the socket over."""
        sock.setblocking(False)
        self.sock = sock
        self.cap = CAP_BEFORE_AUTH
        self._writing = asyncio.Lock()

    async def read(self) -> Message:
        """The next message. Raises ProtocolError (the frame is bad), LinkDown (the connection is over)."""
        size = int.from_bytes(await self._read_exactly(4, True), "little")
        if size > self.cap:
            raise ProtocolError(f"a control frame of {size} bytes is longer than the {self.cap} allowed")
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
        if len(body) > CAP_AFTER_AUTH:
            raise ValueError(f"a {message.TYPE} of {len(body)} bytes is longer than the {CAP_AFTER_AUTH} allowed")
        async with self._writing:
            try:
                await asyncio.get_running_loop().sock_sendall(self.sock, len(body).to_bytes(4, "little") + body)
            except OSError as error:
                raise LinkDown(f"the control connection broke: {os.strerror(error.errno or 0)}") from None

    def end_writing(self) -> None:
        """Tell the peer that no more will come."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; no task may be reading or writing. Idempotent."""
        self.sock.close()
