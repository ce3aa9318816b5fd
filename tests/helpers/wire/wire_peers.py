"""Peers that speak the protocol of links byte by byte, so that tests can break the protocol.

They are written from the comments of handshake.py, session.py, frames.py and tcp_pump.h alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import struct
from typing import Any

from fastdecode.region.contract import PROTOCOL_VERSION, ROW_ATTEND
from fastdecode.region.geometry import Geometry, region_layout
from wire.link_driver import SMALL

HANG_S = 60.0


class Caller:
    """A connection to an R-node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, url: str, **options: Any) -> Caller:
        if url.startswith("shm://"):
            return cls(*await asyncio.open_unix_connection(url.removeprefix("shm://")))
        host, port = url.removeprefix("tcp://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), **options))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def send_message(self, message: object) -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.send(struct.pack("<I", len(body)) + body)

    async def read_message(self) -> dict:
        async with asyncio.timeout(HANG_S):
            (size,) = struct.unpack("<I", await self.reader.readexactly(4))
            return json.loads(await self.reader.readexactly(size))

    async def read_to_end(self) -> bytes:
        """All bytes that arrive until the R-node closes the connection."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:  # the R-node has closed the connection before it read all bytes
                return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def hello_message(geometry: Geometry = SMALL, **changes: object) -> dict:
    """A HELLO message without a secret, with `changes` to its fields."""
    message = {
        "type": "HELLO",
        "version": PROTOCOL_VERSION,
        "nonce": "5a" * 32,
        "mac": None,
        "n_slots": geometry.n_slots,
        "max_rows": geometry.max_rows,
        "n_layers": geometry.n_layers,
        "n_q_heads": geometry.n_q_heads,
        "n_kv_heads": geometry.n_kv_heads,
        "head_size": geometry.head_size,
        "act_dtype": geometry.act_dtype,
        "v_size": geometry.v_size,
        "v_in_k": geometry.v_in_k,
        "index_heads": geometry.index_heads,
        "index_size": geometry.index_size,
        "index_topk": geometry.index_topk,
        "region_bytes": region_layout(geometry).region_bytes,
        "kv_dtype": "fp32",
        "windows": [0] * geometry.n_layers,
        "softmax_scale": 0.25,
        "kv_bytes": 8 << 20,
        "max_seqs": 4,
        "segments": [],
        "kv_layers": [],
        "selections": [],
        "softcaps": [],
        "sinks": "",
        "slopes": "",
        "heads": [],
        "part": [0, 1],
        "rotated": 0,
    }
    return message | changes


def attach_message(token: str, mac: str | None = None) -> dict:
    return {"type": "ATTACH", "version": PROTOCOL_VERSION, "token": token, "mac": mac}


def to_json(message: dict) -> bytes:
    return json.dumps(message, sort_keys=True, separators=(",", ":")).encode()


class Keys:
    """The keys of a link with a shared secret."""

    def __init__(self, secret: bytes, s_nonce: str, r_nonce: str):
        self._prk = hmac.digest(bytes.fromhex(s_nonce) + bytes.fromhex(r_nonce), secret, "sha256")

    def key(self, purpose: str) -> bytes:
        return hmac.digest(self._prk, b"fastdecode " + purpose.encode() + b"\x01", "sha256")

    def proof(self, purpose: str, *messages: dict) -> str:
        """The `mac` of the last message; the others came before it on its connection."""
        *before, message = messages
        text = b"\0".join(map(to_json, [*before, message | {"mac": None}]))
        return hmac.digest(self.key(purpose), text, "sha256").hex()

    def seal(self, role: str, nonce: str, count: int, body: bytes) -> bytes:
        """The body of the `count`-th frame after the hand-shake with its MAC."""
        text = count.to_bytes(8, "little") + body
        return body + hmac.digest(self.key(f"{role} frames {nonce}"), text, "sha256")


async def open_link(
    url: str, geometry: Geometry = SMALL, *, local_addr: tuple[str, int] | None = None, **changes: object
) -> tuple[Caller, str]:
    """Send HELLO with these changes; return the control connection and the token of WELCOME."""
    caller = await Caller.dial(url, **({"local_addr": local_addr} if local_addr else {}))
    await caller.read_message()
    caller.send_message(hello_message(geometry, **changes))
    welcome = await caller.read_message()
    assert welcome["type"] == "WELCOME", welcome
    return caller, welcome["token"]


async def attach(url: str, token: str, **options: int) -> Caller:
    """Send ATTACH; return the data connection."""
    caller = await Caller.dial(url, **options)
    await caller.read_message()
    caller.send_message(attach_message(token))
    assert (await caller.read_message())["type"] == "ATTACHED"
    return caller


class FakeRNode:
    """An R side of TCP: sends `challenge`, `welcome`, a `verdict` on the first step, a `reply` to its first layer."""

    def __init__(self) -> None:
        self.challenge = {
            "type": "CHALLENGE",
            "version": PROTOCOL_VERSION,
            "nonce": "c4" * 32,
            "node": "fake",
        }
        self.welcome = {
            "type": "WELCOME",
            "mac": None,
            "token": "70" * 32,
            "n_pages": 4,
            "max_pages": 4,
            "max_seqs": 4,
            "page_bytes": 32768,
            "full_sections": 1,
            "limited_sections": 0,
            "reach": 0,
            "isa": "scalar",
            "threads": 1,
            "node": "fake",
        }
        self.verdict = verdict()
        self.reply = b""
        self.stats: dict | None = None  # of the answer to every request, if it is to answer

    def answer(self, message: dict) -> dict:
        """The answer to HELLO or ATTACH."""
        return self.welcome if message["type"] == "HELLO" else {"type": "ATTACHED", "mac": None}

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Caller(reader, writer)
        try:
            peer.send_message(self.challenge)
            message = await peer.read_message()
            peer.send_message(self.answer(message))
            while self.stats is not None and message["type"] == "HELLO":
                request = await peer.read_message()
                peer.send_message({"type": "OK", "id": request["id"], "stats": self.stats})
            if message["type"] == "ATTACH":
                await reader.readexactly(24 + 64 + 24)  # ARM with one entry
                peer.send(self.verdict)
                await reader.readexactly(24 + Q_BYTES + KV_ROW_BYTES)  # LAYER with one row
                peer.send(self.reply)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await peer.close()


# ---- data frames ----

MAGIC = 0x4D524644
ROW = struct.pack("<6I", 0, 1, 0, 1, ROW_ATTEND, 0)
Q_BYTES = SMALL.n_q_heads * SMALL.head_size * 4
KV_ROW_BYTES = 2 * SMALL.n_kv_heads * SMALL.head_size * 4


ARM, LAYER, VERDICT, REPLY = range(4)


def arm_header(
    number: int = 1, counts: tuple[int, int, int] = (1, 1, 1), reserved: int = 0, n_layers: int = SMALL.n_layers
) -> bytes:
    return struct.pack("<Q4I10I", number, *counts, n_layers, reserved, *[0] * 9)


def frame(
    kind: int,
    body: bytes,
    slot: int = 0,
    word: int = 0,
    magic: int = MAGIC,
    length: int | None = None,
    reserved: int = 0,
) -> bytes:
    return struct.pack("<IHHIIQ", magic, kind, slot, word, reserved, len(body) if length is None else length) + body


def arm(header: bytes | None = None, table: bytes = ROW, **changes: int) -> bytes:
    """A frame that arms a step: of one row that attends, unless `header` and `table` say otherwise."""
    return frame(ARM, (header or arm_header()) + table, **changes)


def layer(word: int = 1, body: bytes | None = None, **changes: int) -> bytes:
    """A frame that rings a layer: of one row, unless `body` says otherwise."""
    return frame(LAYER, bytes(Q_BYTES + KV_ROW_BYTES) if body is None else body, word=word, **changes)


def report(number: int = 1, status: int = 0, n_layers: int = 0, message: bytes = b"") -> bytes:
    return struct.pack("<QIIQQ224s", number, status, n_layers, 1, 2, message)


def verdict(body: bytes | None = None, **changes: int) -> bytes:
    """The frame of a verdict: that step 1 stands, unless `body` says otherwise."""
    return frame(VERDICT, report() if body is None else body, **changes)


def reply(word: int = 1, body: bytes | None = None, **changes: int) -> bytes:
    """The frame of a reply: one O row, unless `body` says otherwise."""
    return frame(REPLY, bytes(Q_BYTES) if body is None else body, word=word, **changes)
