"""What a peer may send that it should not: each is refused, readably, and costs nobody else anything.

The callers here are written from the comments of handshake.py, frames.py and tcp_pump.h alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from link_driver import LARGE, SMALL, Driver, hello

from fastdecode.rnode import RNode
from fastdecode.transports import handshake, server
from fastdecode.transports._native import Port
from fastdecode.transports.base import ACT_DTYPES, PROTOCOL_VERSION, Geometry, LinkDown, LinkRefused, TransportError
from fastdecode.transports.region import Region, geometry_tuple, region_layout
from fastdecode.transports.registry import connect

KV_BYTES = 64 << 20
SECRET = b"a secret of the two nodes"
HANG_S = 20.0
NEW_STEP = 1


# ---- peers without manners ----


class Caller:
    """A connection to an R-node, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, url: str, **options: int) -> Caller:
        if url.startswith("shm://"):
            return cls(*await asyncio.open_unix_connection(url.removeprefix("shm://")))
        host, port = url.removeprefix("tcp://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), **options))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def say(self, message: object) -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.send(struct.pack("<I", len(body)) + body)

    async def hear(self) -> dict:
        async with asyncio.timeout(HANG_S):
            (size,) = struct.unpack("<I", await self.reader.readexactly(4))
            return json.loads(await self.reader.readexactly(size))

    async def heard_last(self) -> bytes:
        """All that comes until the node closes the connection."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:  # it closed with our bytes unread
                return b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def said(geometry: Geometry = SMALL, **changes: object) -> dict:
    """A HELLO without a secret."""
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
        "region_bytes": region_layout(geometry).region_bytes,
        "kv_dtype": "fp32",
        "windows": [0] * geometry.n_layers,
        "softmax_scale": 0.25,
        "kv_bytes": 8 << 20,
        "max_seqs": 4,
    }
    return message | changes


def mac(secret: bytes, role: bytes, s_nonce: str, r_nonce: str, message: dict) -> str:
    body = json.dumps(message | {"mac": None}, sort_keys=True, separators=(",", ":")).encode()
    text = b"\0".join([b"fastdecode", role, s_nonce.encode(), r_nonce.encode(), body])
    return hmac.new(secret, text, "sha256").hexdigest()


# ---- the node they meet, and the one who must not notice ----


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[RNode]:
    node = RNode(threads=1, kv_bytes=KV_BYTES, name="test", spin_us=20)
    node.shm, node.tcp = await node.serve([f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0"], None)
    yield node
    await node.close()


@pytest.fixture
async def bystander(node: RNode) -> AsyncIterator[None]:
    """Another S-node, over TCP, that goes on decoding, checked against float64, while a test does what it does."""
    asks = hello()
    link = await connect(node.tcp, asks, None)
    driver = Driver(link, asks)
    stop, steps = threading.Event(), [0]

    def decode() -> None:
        while not stop.is_set():
            driver.step(0, [(0, 1, True)])
            steps[0] += 1
            if driver.shadows[0].length == 60:
                future = asyncio.run_coroutine_threadsafe(driver.free_seq(0), loop)
                future.result(HANG_S)
            time.sleep(0.001)

    loop = asyncio.get_running_loop()
    work = asyncio.create_task(asyncio.to_thread(decode))
    yield
    before = steps[0]
    async with asyncio.timeout(HANG_S):
        while steps[0] < before + 10:
            assert not work.done() or work.result()
            await asyncio.sleep(0.01)
        stop.set()
        await work
    await link.close()
    assert node.kv_free == KV_BYTES  # nobody has left a lease behind


# ---- hand-shake ----


async def refusal(url: str, *messages: object) -> str:
    """The reason in the REFUSED that the messages are answered with, after which the node hangs up."""
    caller = await Caller.dial(url)
    assert (await caller.hear())["type"] == "CHALLENGE"
    for message in messages:
        caller.say(message)
    answer = await caller.hear()
    assert answer.keys() == {"type", "reason"} and answer["type"] == "REFUSED"
    assert await caller.heard_last() == b""
    await caller.close()
    return answer["reason"]


async def test_wrong_version_names_both(node, bystander):
    other = said(version=PROTOCOL_VERSION + 41) | {"a field": "of the future"}
    reason = await refusal(node.tcp, other)
    assert str(PROTOCOL_VERSION + 41) in reason and f"this end {PROTOCOL_VERSION}" in reason
    assert "version" in await refusal(node.shm, {"type": "HELLO"})
    assert "version" in await refusal(node.shm, {"type": "ATTACH", "version": "1", "token": "00" * 32})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_slots": 0}, "slots is not within 1..16"),
        ({"n_slots": 17}, "slots is not within 1..16"),
        ({"max_rows": 0}, "rows per call"),
        ({"max_rows": 2**32 - 1}, "rows per call"),
        ({"n_layers": 1025, "windows": []}, "layers"),
        ({"n_q_heads": 2**31}, "query heads"),
        ({"n_kv_heads": 3}, "multiple of KV heads"),
        ({"n_kv_heads": 8}, "KV heads is not within"),
        ({"head_size": 12}, "head size"),
        ({"head_size": 264}, "head size"),
        ({"n_slots": 16, "max_rows": 65536, "n_q_heads": 1024, "n_kv_heads": 1024, "head_size": 256}, "more than the"),
        ({"region_bytes": 4096}, "lay regions out differently: 4096 bytes at the S-node, 61440 here"),
        ({"windows": [0]}, "1 attention windows for 2 layers"),
        ({"windows": [0, 0, 0]}, "3 attention windows for 2 layers"),
        ({"max_seqs": 0}, "0 sequences"),
        ({"max_seqs": 2**31}, "2147483648 sequences"),
        ({"kv_bytes": 32767}, "32767 bytes wanted"),
        ({"kv_bytes": 0}, "0 bytes wanted"),
    ],
)
async def test_insane_geometry_and_unfulfillable_wishes(node, bystander, changes, says):
    assert says in await refusal(node.tcp, said(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonce", "5a" * 31),
        ("nonce", "zz" * 32),
        ("nonce", 7),
        ("mac", 7),
        ("mac", "short"),
        ("n_slots", "2"),
        ("n_slots", True),
        ("n_slots", 2.0),
        ("n_slots", -1),
        ("n_slots", None),
        ("max_rows", 2**32),
        ("max_rows", 10**40),
        ("act_dtype", "fp8"),
        ("act_dtype", 0),
        ("kv_dtype", ["fp32"]),
        ("windows", {"0": 0}),
        ("windows", [0, "0"]),
        ("windows", [0, -1]),
        ("windows", [0] * 1025),
        ("softmax_scale", "1"),
        ("softmax_scale", 0),
        ("softmax_scale", -1.0),
        ("softmax_scale", True),
        ("kv_bytes", 2**60),
        ("kv_bytes", 1.5),
    ],
)
async def test_wrong_field_types_and_ranges(node, bystander, field, value):
    reason = await refusal(node.shm, said(**{field: value}))
    assert reason.startswith(f"HELLO.{field}: expected ") and len(reason) < 300


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"type": NaN}', "not JSON"),
        (b"[" * 30000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        ({}, "unknown control message type None"),
        ({"type": "EXEC"}, "unknown control message type 'EXEC'"),
        ({"type": ["HELLO"]}, "unknown control message type"),
        ({"type": "x" * 60000}, "unknown control message type"),
        (said() | {"also": 1}, "HELLO: unknown field 'also'"),
        ({k: v for k, v in said().items() if k != "windows"}, "HELLO: missing field 'windows'"),
        ({"type": "PING", "id": 1}, "expected HELLO or ATTACH, got PING"),
        ({"type": "FREE", "id": 1, "handles": []}, "expected HELLO or ATTACH, got FREE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_frames_that_are_no_messages(node, bystander, message, says):
    reason = await refusal(node.tcp, message)
    assert says in reason and len(reason) < 300


@pytest.mark.parametrize("size", [(64 << 10) + 1, 2**31, 2**32 - 1])
async def test_oversized_frames_before_the_secret(node, bystander, size):
    caller = await Caller.dial(node.tcp)
    await caller.hear()
    caller.send(struct.pack("<I", size))
    assert f"{size} bytes is longer than the 65536 allowed" in (await caller.hear())["reason"]
    assert await caller.heard_last() == b""
    await caller.close()


@pytest.mark.parametrize("n", [1, 3, 4, 50])
async def test_truncated_frames(node, bystander, n):
    caller = await Caller.dial(node.tcp)
    await caller.hear()
    caller.send((struct.pack("<I", 100) + b"{" * 100)[:n])
    caller.writer.write_eof()
    assert "within a frame" in (await caller.hear())["reason"]
    await caller.close()


async def test_who_hangs_up_at_once(node, bystander):
    for _ in range(20):
        await (await Caller.dial(node.tcp)).close()
        await (await Caller.dial(node.shm)).close()


async def test_slow_hand_shake_has_a_deadline(node, bystander, monkeypatch):
    monkeypatch.setattr(handshake, "DEADLINE_S", 0.2)
    caller = await Caller.dial(node.tcp)
    await caller.hear()
    caller.send(b"\x10")
    assert "took longer than" in (await caller.hear())["reason"]
    assert await caller.heard_last() == b""
    await caller.close()
    never_attached = await Caller.dial(node.tcp)
    await never_attached.hear()
    never_attached.say(said())
    assert (await never_attached.hear())["type"] == "WELCOME"
    assert "data connection did not come" in (await never_attached.hear())["message"]
    await never_attached.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_many_slow_hand_shakes_keep_nobody_out(node, bystander, transport):
    url = getattr(node, transport)
    idle = [await Caller.dial(url) for _ in range(server.MAX_PENDING + 8)]
    link = await connect(url, hello(), None)
    await link.close()
    for caller in idle[:8]:
        assert b"REFUSED" not in await caller.heard_last()  # dropped then, rather than late
    for caller in idle:
        await caller.close()


async def test_s_side_gives_a_silent_r_node_a_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "DEADLINE_S", 0.2)
    late = pytest.raises(LinkDown, match="did not finish the hand-shake")
    with socket.create_server(("127.0.0.1", 0)) as listener, late:
        await connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", hello(), None)


# ---- secrets ----


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RNode]:
    node = RNode(threads=1, kv_bytes=KV_BYTES, name="guarded")
    node.shm, node.tcp = await node.serve([f"shm://{tmp_path}/g.sock", "tcp://127.0.0.1:0"], SECRET)
    yield node
    await node.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_same_secret_opens_a_link(guarded, transport):
    link = await connect(getattr(guarded, transport), hello(), SECRET)
    driver = Driver(link, hello())
    await asyncio.to_thread(driver.step, 0, [(0, 2, True)])
    await link.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_secrets_that_do_not_fit(node, guarded, transport):
    for there, secret, says in [
        (guarded, None, "asks for a shared secret and this side was given none"),
        (guarded, SECRET + b"!", "the shared secrets of the two nodes differ"),
        (node, SECRET, "has no shared secret, this side was given one"),
    ]:
        with pytest.raises(LinkRefused, match=says) as refused:
            await connect(getattr(there, transport), hello(), secret)
        assert SECRET.decode() not in str(refused.value)
    assert guarded.kv_free == KV_BYTES


async def test_proofs_that_prove_nothing(guarded):
    """No MAC; a made-up one; one for another challenge, another role, another HELLO; an overheard one."""

    async def answered(make_mac) -> dict:
        caller = await Caller.dial(guarded.tcp)
        challenge = await caller.hear()
        assert challenge["needs_secret"] is True
        message = said()
        caller.say(message | {"mac": make_mac(message, challenge["nonce"])})
        answer = await caller.hear()
        if answer["type"] == "REFUSED":
            assert await caller.heard_last() == b""
        else:
            mine = mac(SECRET, b"R", message["nonce"], challenge["nonce"], answer)
            assert answer["mac"] == mine  # it proves itself as well
        await caller.close()
        return answer

    proofs = []

    def right(message, nonce):
        proofs.append(mac(SECRET, b"S", message["nonce"], nonce, message))
        return proofs[-1]

    assert (await answered(right))["type"] == "WELCOME"
    for wrong, says in [
        (lambda m, n: None, "asks for a shared secret"),
        (lambda m, n: "00" * 32, "differ"),
        (lambda m, n: proofs[0], "differ"),
        (lambda m, n: mac(SECRET, b"R", m["nonce"], n, m), "differ"),
        (lambda m, n: mac(SECRET, b"S", m["nonce"], "00" * 32, m), "differ"),
        (lambda m, n: mac(SECRET, b"S", m["nonce"], n, m | {"kv_bytes": 1}), "differ"),
    ]:
        answer = await answered(wrong)
        assert answer["type"] == "REFUSED" and says in answer["reason"]
    # An unproven caller learns nothing of what the node would grant.
    assert "shared secret" in await refusal(guarded.tcp, said(kv_bytes=0))


class FakeRNode:
    """Speaks the R side of TCP, as `answer_hello` and `answer_attach` tell it to."""

    def __init__(self, needs_secret: bool = False):
        self.challenge = {
            "type": "CHALLENGE",
            "version": PROTOCOL_VERSION,
            "nonce": "c4" * 32,
            "needs_secret": needs_secret,
            "node": "fake",
        }
        self.welcome = {
            "type": "WELCOME",
            "mac": None,
            "token": "70" * 32,
            "n_pages": 4,
            "max_seqs": 4,
            "page_bytes": 32768,
            "isa": "scalar",
            "threads": 1,
            "node": "fake",
        }
        self.reply = b""

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Caller(reader, writer)
        try:
            peer.say(self.challenge)
            if (await peer.hear())["type"] == "HELLO":
                peer.say(self.welcome)
            else:
                peer.say({"type": "OK", "id": 0, "stats": None})
                await reader.readexactly(16 + 64)  # a call
                peer.send(self.reply)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await peer.close()


@pytest.mark.parametrize("proof", [None, "00" * 32])
async def test_impostor_that_does_not_know_the_secret(proof):
    fake = FakeRNode(needs_secret=True)
    fake.welcome["mac"] = proof
    async with fake as url:
        with pytest.raises(LinkRefused, match="could not prove that it knows the shared secret"):
            await connect(url, hello(), SECRET)


async def test_r_node_of_another_version_or_none_at_all():
    fake = FakeRNode()
    fake.challenge = {"type": "CHALLENGE", "version": PROTOCOL_VERSION + 1, "news": True}
    async with fake as url:
        with pytest.raises(LinkRefused, match=f"peer has {PROTOCOL_VERSION + 1}, this end {PROTOCOL_VERSION}"):
            await connect(url, hello(), None)
    fake = FakeRNode()
    fake.challenge = {"type": "PING", "id": 1}
    async with fake as url:
        with pytest.raises(LinkRefused, match="is it an R-node"):
            await connect(url, hello(), None)
    fake = FakeRNode()
    fake.welcome["n_pages"] = 0
    async with fake as url:
        with pytest.raises(TransportError, match=r"WELCOME\.n_pages"):
            await connect(url, hello(), None)


# ---- an open link ----


async def opened(url: str, geometry: Geometry = SMALL, **changes: object) -> tuple[Caller, str]:
    caller = await Caller.dial(url)
    await caller.hear()
    caller.say(said(geometry, **changes))
    welcome = await caller.hear()
    assert welcome["type"] == "WELCOME", welcome
    return caller, welcome["token"]


async def attached(url: str, token: str, **options: int) -> Caller:
    caller = await Caller.dial(url, **options)
    await caller.hear()
    caller.say({"type": "ATTACH", "version": PROTOCOL_VERSION, "token": token})
    assert (await caller.hear())["type"] == "OK"
    return caller


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_tokens_that_open_nothing(node, bystander, transport):
    url = getattr(node, transport)
    control, token = await opened(url)
    for wrong in ("00" * 32, token[:-1] + ("0" if token[-1] != "0" else "1")):
        message = {"type": "ATTACH", "version": PROTOCOL_VERSION, "token": wrong}
        assert "no link waits for this token" in await refusal(url, message)
    data = await attached(url, token)
    again = {"type": "ATTACH", "version": PROTOCOL_VERSION, "token": token}
    assert "no link waits for this token" in await refusal(url, again)
    control.say({"type": "PING", "id": 5})
    assert await control.hear() == {"type": "OK", "id": 5, "stats": None}
    await control.close()
    await data.heard_last()
    await data.close()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"{}", "unknown control message type"),
        (b"nonsense", "not JSON"),
        ({"type": "FREE", "id": 1, "handles": [[0, -1]]}, "FREE.handles: expected a list of at most"),
        ({"type": "FREE", "id": 1, "handles": [[0, 1, 2]]}, "FREE.handles"),
        ({"type": "FREE", "id": 1, "handles": 7}, "FREE.handles"),
        ({"type": "TRIM", "id": 1, "seq": 0, "tag": 1, "length": 2**32}, "TRIM.length"),
        ({"type": "FORK", "id": "1", "src": 0, "src_tag": 1, "dst": 1, "dst_tag": 1, "length": 1}, "FORK.id"),
        ({"type": "STATS", "id": -1}, "STATS.id"),
        ({"type": "PING"}, "PING: missing field 'id'"),
        ({"type": "WELCOME"}, "WELCOME: missing field"),
        ({"type": "OK", "id": 1, "stats": None}, "OK has no place on an open link"),
        (said(), "HELLO has no place on an open link"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_requests_end_their_link(node, bystander, message, says):
    control, token = await opened(node.shm)
    data = await attached(node.shm, token)
    control.say(message)
    error = await control.hear()
    assert (error["type"], error["id"]) == ("ERROR", 0) and says in error["message"]
    assert await control.heard_last() == b""
    await control.close()
    await data.close()


async def test_oversized_frames_on_an_open_link(node, bystander):
    control, _ = await opened(node.shm)
    control.send(struct.pack("<I", (1 << 20) + 1))
    assert "longer than the 1048576 allowed" in (await control.hear())["message"]
    await control.close()


# ---- data frames over TCP ----

MAGIC = 0x4D524644
ROW = struct.pack("<6I", 0, 1, 0, 1, 1, 0)
Q_BYTES = SMALL.n_q_heads * SMALL.head_size * 4
KV_ROW_BYTES = 2 * SMALL.n_kv_heads * SMALL.head_size * 4


def call(
    seq: int = 1, flags: int = NEW_STEP, layer: int = 0, counts: tuple[int, int, int] = (1, 1, 1), reserved: int = 0
) -> bytes:
    return struct.pack("<QIIIII9I", seq, flags, layer, *counts, reserved, *[0] * 8)


def frame(header: bytes, rest: bytes, slot: int = 0, magic: int = MAGIC, length: int | None = None) -> bytes:
    length = len(header) + len(rest) if length is None else length
    return struct.pack("<IIQ", magic, slot, length) + header + rest


ONE_ROW = ROW + bytes(Q_BYTES + KV_ROW_BYTES)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (frame(call(), ONE_ROW, magic=MAGIC + 1), "magic number"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 64, "magic number"),
        (frame(call(), ONE_ROW, slot=2), "slot beyond the region"),
        (frame(call(), ONE_ROW, slot=2**32 - 1), "slot beyond the region"),
        (frame(call(), ONE_ROW, length=64), "length does not match"),
        (frame(call(), ONE_ROW, length=64 + len(ONE_ROW) + 1), "length does not match"),
        (frame(call(), ONE_ROW, length=2**64 - 1), "length does not match"),
        (frame(call(counts=(1, 2, 1)), ONE_ROW), "length does not match"),
        (frame(call(counts=(1, 2**32 - 1, 1)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 33, 1)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 0, 0)), ONE_ROW), "rows outside the slot"),
        (frame(call(counts=(1, 1, 2)), ONE_ROW), "more attending rows"),
        (frame(call(counts=(2**31, 1, 1)), ONE_ROW), "row table longer"),
        (frame(call(layer=2), ONE_ROW), "layer beyond the model"),
        (frame(call(flags=3), ONE_ROW), "unknown call flag"),
        (frame(call(reserved=1), ONE_ROW), "reserved field"),
        (frame(call(seq=2), ONE_ROW), "out of order"),
        (frame(call(seq=0), ONE_ROW), "out of order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lying_data_frames_end_their_link(node, bystander, data, says):
    control, token = await opened(node.tcp)
    caller = await attached(node.tcp, token)
    caller.send(data)
    error = await control.hear()
    assert (error["type"], error["id"]) == ("ERROR", 0) and says in error["message"]
    assert await control.heard_last() == b""
    await caller.heard_last()
    await caller.close()
    await control.close()


@pytest.mark.parametrize("n", [1, 15, 16, 79, 80, 81, 103, 104, 500])
async def test_data_frames_cut_short_end_their_link(node, bystander, n):
    control, token = await opened(node.tcp)
    caller = await attached(node.tcp, token)
    caller.send(frame(call(), ONE_ROW)[:n])
    caller.writer.write_eof()
    assert "within a frame" in (await control.hear())["message"]
    await caller.close()
    await control.close()


async def test_data_connection_closed_between_frames_ends_the_link(node, bystander):
    control, token = await opened(node.tcp)
    caller = await attached(node.tcp, token)
    await caller.close()
    assert "closed the data connection" in (await control.hear())["message"]
    await control.close()


async def test_a_row_table_that_points_outside_the_lease_is_answered(node, bystander):
    """Not the transport's business: the R-engine refuses the call and the link lives on."""
    control, token = await opened(node.tcp)
    caller = await attached(node.tcp, token)
    caller.send(frame(call(), struct.pack("<6I", 2**32 - 1, 1, 0, 1, 1, 0) + ONE_ROW[24:]))
    caller.send(frame(call(), ONE_ROW, slot=1))
    replies = {}
    async with asyncio.timeout(HANG_S):
        for _ in range(2):
            magic, slot, length = struct.unpack("<IIQ", await caller.reader.readexactly(16))
            assert magic == MAGIC
            reply = await caller.reader.readexactly(length)
            replies[slot] = (*struct.unpack_from("<QII", reply), length)
    assert replies == {0: (1, 2, 0, 256), 1: (1, 0, 1, 256 + Q_BYTES)}
    await control.close()
    await caller.heard_last()
    await caller.close()


async def test_a_peer_that_reads_no_replies_holds_up_only_itself(node, bystander):
    """Its replies fill the sockets; then a call for the slot whose reply is still on its way is refused."""
    control, token = await opened(node.tcp, LARGE, kv_bytes=32 << 20, max_seqs=32)
    with socket.create_connection(("127.0.0.1", int(node.tcp.rpartition(":")[2]))) as sock:
        sock.setblocking(False)
        caller = Caller(*await asyncio.open_connection(sock=sock))
        await caller.hear()
        caller.say({"type": "ATTACH", "version": PROTOCOL_VERSION, "token": token})
        assert (await caller.hear())["type"] == "OK"
        caller.writer.transport.pause_reading()
        rows = LARGE.max_rows
        row_bytes = (LARGE.n_q_heads + 2 * LARGE.n_kv_heads) * LARGE.head_size * 4
        said_why = None
        async with asyncio.timeout(HANG_S):
            for seq in range(32):  # at 2 MiB each
                table = struct.pack("<6I", seq, 1, 0, rows, 1, 0)
                caller.send(frame(call(seq + 1, counts=(1, rows, rows)), table + bytes(rows * row_bytes)))
                served = False
                while not served and said_why is None:
                    control.say({"type": "STATS", "id": 1})
                    answer = await control.hear()
                    said_why = answer.get("message")
                    served = said_why is None and answer["stats"]["calls"] > seq
                if said_why:
                    break
        assert said_why and "last call is not answered" in said_why
        caller.writer.transport.abort()
        await asyncio.sleep(0)
    await control.close()


# ---- replies that lie, S side ----


def reply(seq: int = 1, status: int = 0, rows: int = 1, message: bytes = b"") -> bytes:
    return struct.pack("<QIIQQ224s", seq, status, rows, 1, 2, message)


O_ROW = bytes(Q_BYTES)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (frame(reply(), O_ROW, magic=7), "magic number"),
        (frame(reply(), O_ROW, slot=9), "slot beyond the region"),
        (frame(reply(), O_ROW, slot=1), "answers no call"),
        (frame(reply(seq=2), O_ROW), "answers no call"),
        (frame(reply(seq=0), O_ROW), "answers no call"),
        (frame(reply(rows=2), O_ROW * 2), "rows do not match"),
        (frame(reply(rows=2**32 - 1), O_ROW), "rows do not match"),
        (frame(reply(status=2), O_ROW), "rows do not match"),
        (frame(reply(), O_ROW, length=256), "length does not match"),
        (frame(reply(), O_ROW, length=2**63), "length does not match"),
        (frame(reply(status=99, rows=0), b""), "unknown status"),
        (frame(reply(), O_ROW) * 2, "answers no call"),
        (frame(reply(), O_ROW)[:300], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_lying_replies_end_the_link(data, says):
    fake = FakeRNode()
    fake.reply = data
    async with fake as url:
        link = await connect(url, hello(), None)
        link.post(0, 0, 1, 1, 1, False)
        if says is None:  # the rest does not come; nor does anything out of the half that did
            with pytest.raises(LinkDown, match="no reply"):
                await asyncio.to_thread(link.wait, 0, 0.2)
        else:
            async with asyncio.timeout(HANG_S):
                if data.count(struct.pack("<I", MAGIC)) < 2:
                    with pytest.raises(LinkDown, match=says):
                        await asyncio.to_thread(link.wait, 0, HANG_S)
                assert says in str(await link.closed())
        await link.close()


async def test_a_refusals_message_need_not_be_text():
    fake = FakeRNode()
    fake.reply = frame(reply(status=6, rows=0, message=b"\xff" * 224), b"")
    async with fake as url:
        link = await connect(url, hello(), None)
        link.post(0, 0, 1, 1, 1, False)
        with pytest.raises(TransportError, match="\ufffd" * 223):
            await asyncio.to_thread(link.wait, 0, HANG_S)
        await link.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (reply(seq=2), "does not carry its call's number"),
        (reply(rows=3), "rows do not match"),
        (reply(status=1), "rows do not match"),
        (reply(status=2**32 - 1, rows=0), "unknown status"),
    ],
)
def test_lying_replies_in_shared_memory(answer, says):
    region = Region.create(SMALL)
    wake = os.eventfd(0)
    port = Port(region.view, geometry_tuple(SMALL), 0, wake_fd=wake)
    port.post(0, 0, 1, 1, 1, True)
    slot = region.layout.slot(0)
    region.view[slot + 256 : slot + 512] = answer
    region.view[slot + 128 : slot + 136] = struct.pack("<Q", 1)
    with pytest.raises(ConnectionError, match=says):
        port.wait(0, HANG_S)
    with pytest.raises(ConnectionError, match=says):
        port.post(1, 0, 1, 1, 1, True)
    port.close()
    os.close(wake)
    region.close()


# ---- regions ----


def test_a_region_that_is_not_what_it_should_be():
    other = Geometry(2, 64, 2, 4, 2, 16, "fp32")
    region = Region.create(SMALL)
    with pytest.raises(TransportError, match="this end expects"):
        Region.adopt(os.dup(region.fd), other)
    with pytest.raises(TransportError, match="another geometry"):
        Region.adopt(os.dup(region.fd), Geometry(2, 32, 3, 4, 2, 16, "fp32"))
    region.view[4:8] = struct.pack("<I", PROTOCOL_VERSION + 1)
    with pytest.raises(TransportError, match=f"version {PROTOCOL_VERSION + 1}"):
        Region.adopt(os.dup(region.fd), SMALL)
    region.view[0:4] = b"none"
    with pytest.raises(TransportError, match="magic number"):
        Region.adopt(os.dup(region.fd), SMALL)
    region.close()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, region.layout.region_bytes)
    with pytest.raises(TransportError, match="not sealed"):
        Region.adopt(unsealed, SMALL)


def test_a_region_cannot_be_resized():
    region = Region.create(SMALL)
    for size in (0, region.layout.region_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    region.close()


@pytest.mark.parametrize("act_dtype", ACT_DTYPES)
def test_layouts_agree_with_the_r_engines(act_dtype):
    from fastdecode.kernels import _native

    geometry = Geometry(3, 100, 5, 12, 4, 24, act_dtype)
    layout = region_layout(geometry)
    assert _native.region_layout(geometry_tuple(geometry)) == tuple(
        getattr(layout, name) for name in type(layout).__dataclass_fields__
    )
