"""A TCP proxy before an R-node, which ends or silences a link's data connection while its control connection lives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import Literal


@dataclass
class _Connection:
    to_s_node: asyncio.StreamWriter
    to_r_node: asyncio.StreamWriter
    relays: list[asyncio.Task[None]]


class CutProxy:
    """An async context manager. Links that are opened at `url` lead to the R-node at `r_node_url`."""

    def __init__(self, r_node_url: str):
        self._host, _, self._port = r_node_url.removeprefix("tcp://").rpartition(":")
        self._connections: list[_Connection] = []

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            for relay in connection.relays:
                relay.cancel()
            connection.to_s_node.close()
            connection.to_r_node.close()

    def cut_data(self, how: Literal["RST", "FIN"], towards: Literal["S-node", "R-node", "both"]) -> None:
        """Send an RST or a FIN on the data connection of the first link. Nothing is relayed on it any more."""
        connection = self.silence_data()
        ends = {"S-node": [connection.to_s_node], "R-node": [connection.to_r_node]}
        for writer in ends.get(towards) or [connection.to_s_node, connection.to_r_node]:
            if how == "FIN":
                writer.write_eof()
            else:
                no_linger = struct.pack("ii", 1, 0)  # close() then sends an RST
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
                writer.transport.abort()

    def silence_data(self) -> _Connection:
        """Relay nothing any more on the data connection of the first link, though this machine acknowledges all."""
        connection = self._connections[1]  # a link opens its control connection first
        for relay in connection.relays:
            relay.cancel()
        return connection

    async def _accept(self, from_s_node: asyncio.StreamReader, to_s_node: asyncio.StreamWriter) -> None:
        from_r_node, to_r_node = await asyncio.open_connection(self._host, int(self._port))
        relays = [
            asyncio.create_task(_relay(from_s_node, to_r_node)),
            asyncio.create_task(_relay(from_r_node, to_s_node)),
        ]
        self._connections.append(_Connection(to_s_node, to_r_node, relays))


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
