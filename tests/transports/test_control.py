"""Wrong messages from a peer, in the hand-shake and on an open link.

The R-node refuses each with a readable reason, and no other link suffers.
"""

from __future__ import annotations

import base64
import re
import socket
import struct
import tracemalloc

import orjson
import pytest
from wire.link_driver import hello
from wire.wire_peers import Caller, FakeRNode, attach, attach_message, hello_message, open_link

from fastdecode.region.contract import (
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_ROWS,
    MAX_SEQS,
    MAX_SLOTS,
    PROTOCOL_VERSION,
)
from fastdecode.region.geometry import MAX_SLOT_BYTES
from fastdecode.transports import handshake
from fastdecode.transports.base import LinkDown, LinkRefused, TransportError
from fastdecode.transports.frames import MAX_FRAME_BEFORE_AUTH
from fastdecode.transports.messages import ProtocolError, decode
from fastdecode.transports.registry import connect

KV_BYTES = 64 << 20
LARGEST = {
    "n_slots": MAX_SLOTS,
    "max_rows": MAX_ROWS,
    "n_q_heads": MAX_HEADS,
    "n_kv_heads": MAX_HEADS,
    "head_size": MAX_HEAD_SIZE,
}


# ---- hand-shake ----


async def refusal(url: str, *messages: object) -> str:
    """Send the messages; return the reason in REFUSED, after which the R-node must close the connection."""
    caller = await Caller.dial(url)
    assert (await caller.read_message())["type"] == "CHALLENGE"
    for message in messages:
        caller.send_message(message)
    answer = await caller.read_message()
    assert answer.keys() == {"type", "reason"} and answer["type"] == "REFUSED"
    assert await caller.read_to_end() == b""
    await caller.close()
    return answer["reason"]


@pytest.mark.quick
async def test_wrong_version_names_both(r_node, bystander):
    other = hello_message(version=PROTOCOL_VERSION + 41) | {"a field": "of the future"}
    reason = await refusal(r_node.tcp, other)
    assert str(PROTOCOL_VERSION + 41) in reason and f"this end {PROTOCOL_VERSION}" in reason
    assert "version" in await refusal(r_node.shm, {"type": "HELLO"})
    assert "version" in await refusal(r_node.shm, {"type": "ATTACH", "version": "1", "token": "00" * 32})


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"n_slots": 0}, f"slots is not within 1..{MAX_SLOTS}"),
        ({"n_slots": MAX_SLOTS + 1}, f"slots is not within 1..{MAX_SLOTS}"),
        ({"max_rows": 0}, "rows per call"),
        ({"max_rows": 2**32 - 1}, "rows per call"),
        ({"n_layers": MAX_LAYERS + 1, "windows": []}, "layers"),
        ({"n_q_heads": 2**31}, "query heads"),
        ({"n_kv_heads": 3}, "multiple of KV heads"),
        ({"n_kv_heads": 8}, "KV heads is not within"),
        ({"head_size": 12}, "head size"),
        ({"head_size": MAX_HEAD_SIZE + 8}, "head size"),
        (LARGEST, "a call would have"),
        (
            {"max_rows": MAX_ROWS, "n_q_heads": 128, "n_kv_heads": 8, "head_size": 128, "v_size": 128},
            f"more than the {MAX_SLOT_BYTES} allowed",
        ),
        (
            {
                "n_slots": MAX_SLOTS,
                "max_rows": 12000,
                "n_q_heads": 128,
                "n_kv_heads": 8,
                "head_size": 128,
                "v_size": 128,
            },
            "the region would have",
        ),
        ({"region_bytes": 4096}, "lay regions out differently: 4096 bytes at the S-node, 61440 here"),
        ({"windows": [0]}, "1 attention windows for 2 layers"),
        ({"heads": [[4, 2, 16, 16]]}, "heads: 1 given, 2 needed"),
        ({"heads": [[4, 3, 16, 16]] * 2}, "layer 0: query heads are not a multiple of KV heads"),
        (
            {"heads": [[4, 2, 16, 16], [4, 2, 16, 64]]},
            "layer 1: the layer's rows are longer than those of the geometry",
        ),
        ({"windows": [0, 0, 0]}, "3 attention windows for 2 layers"),
        ({"segments": [0]}, "segments: 1 given, 2 needed"),
        ({"kv_layers": [1, 1]}, "a layer shares the K and V of a layer that does not store its own before it"),
        ({"kv_layers": [1, 0]}, "a layer shares the K and V of a layer that does not store its own before it"),
        ({"kv_layers": [0, 2]}, "kv_layers: 2 is not within 0..1"),
        ({"kv_layers": [0]}, "kv_layers: 1 given, 2 needed"),
        ({"selections": [2, 1]}, "layer 0: a layer selects tokens, but the geometry has no indexer"),
        ({"softcaps": [1e39, 0]}, "layer 0: a softcap is not a finite number"),
        ({"softcaps": [1.0] * 3}, "softcaps: 3 given, 2 needed"),
        ({"sinks": "AAAA"}, "sinks: 3 bytes given, 32 aligned bytes needed"),
        ({"slopes": "AAAAAA=="}, "slopes: 4 bytes given, 16 aligned bytes needed"),
        ({"slopes": base64.b64encode(b"\xff" * 16).decode()}, "a slope is not a finite number"),
        ({"sinks": base64.b64encode(b"\xff" * 32).decode()}, "a sink is not a number below infinity"),
        ({"max_seqs": 0}, "0 sequences"),
        ({"max_seqs": MAX_SEQS + 1}, f"{MAX_SEQS + 1} sequences"),
        ({"kv_bytes": 32767}, "32767 bytes wanted"),
        ({"kv_bytes": 0}, "0 bytes wanted"),
    ],
)
async def test_bad_geometry_and_requests_that_cannot_be_granted(r_node, bystander, changes, error_text):
    assert error_text in await refusal(r_node.tcp, hello_message(**changes))


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
        ("segments", [0, -1]),
        ("kv_layers", [0, 2**32]),
        ("selections", [0, "1"]),
        ("index_topk", None),
        ("softcaps", [0, -1.0]),
        ("softcaps", [0, "1"]),
        ("softcaps", [0, True]),
        ("rotated", "1"),
        ("sinks", "not base64!"),
        ("sinks", 7),
        ("slopes", None),
        ("softmax_scale", "1"),
        ("softmax_scale", 0),
        ("softmax_scale", -1.0),
        ("softmax_scale", True),
        ("kv_bytes", 2**60),
        ("kv_bytes", 1.5),
    ],
)
async def test_wrong_field_types_and_ranges(r_node, bystander, field, value):
    reason = await refusal(r_node.shm, hello_message(**{field: value}))
    assert re.search(rf"^HELLO: .* - at `\$\.{field}\b", reason) and len(reason) < 300


@pytest.mark.parametrize(
    ("message", "error_text"),
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
        (hello_message() | {"also": 1}, "HELLO: unknown field 'also'"),
        ({k: v for k, v in hello_message().items() if k != "windows"}, "HELLO: missing field 'windows'"),
        ({"type": "PING", "id": 1}, "expected HELLO, ATTACH, PROBE or DELIVER, got PING"),
        ({"type": "FREE", "id": 1, "handles": []}, "expected HELLO, ATTACH, PROBE or DELIVER, got FREE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_frames_that_are_not_messages(r_node, bystander, message, error_text):
    reason = await refusal(r_node.tcp, message)
    assert error_text in reason and len(reason) < 300


@pytest.mark.parametrize("size", [(64 << 10) + 1, 2**31, 2**32 - 1])
async def test_oversized_frames_before_the_secret(r_node, bystander, size):
    caller = await Caller.dial(r_node.tcp)
    await caller.read_message()
    caller.send(struct.pack("<I", size))
    assert f"{size} bytes is longer than the 65536 allowed" in (await caller.read_message())["reason"]
    assert await caller.read_to_end() == b""
    await caller.close()


@pytest.mark.parametrize("n", [1, 3, 4, 50])
async def test_truncated_frames(r_node, bystander, n):
    caller = await Caller.dial(r_node.tcp)
    await caller.read_message()
    caller.send((struct.pack("<I", 100) + b"{" * 100)[:n])
    caller.writer.write_eof()
    assert "within a frame" in (await caller.read_message())["reason"]
    await caller.close()


async def test_callers_that_hang_up_at_once(r_node, bystander):
    for _ in range(20):
        await (await Caller.dial(r_node.tcp)).close()
        await (await Caller.dial(r_node.shm)).close()


async def test_slow_hand_shake_has_a_deadline(r_node, bystander, monkeypatch):
    monkeypatch.setattr(handshake, "DEADLINE_S", 3.0)
    caller = await Caller.dial(r_node.tcp)
    await caller.read_message()
    caller.send(b"\x10")
    assert "took longer than" in (await caller.read_message())["reason"]
    assert await caller.read_to_end() == b""
    await caller.close()
    never_attached = await Caller.dial(r_node.tcp)
    await never_attached.read_message()
    never_attached.send_message(hello_message())
    assert (await never_attached.read_message())["type"] == "WELCOME"
    assert "data connection did not come" in (await never_attached.read_message())["message"]
    await never_attached.close()


async def test_a_silent_r_node_has_a_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "DEADLINE_S", 0.2)
    late = pytest.raises(LinkDown, match="did not finish the hand-shake")
    with socket.create_server(("127.0.0.1", 0)) as listener, late:
        await connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", hello(), None)


# ---- wrong messages from an R-node ----


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
        with pytest.raises(TransportError, match=r"WELCOME: Expected `int` >= 1 - at `\$\.n_pages"):
            await connect(url, hello(), None)


@pytest.mark.parametrize(
    ("granted", "error_text"),
    [({"max_seqs": 2**32 - 1}, "grants 4294967295 sequences"), ({"n_pages": 2**20}, "bytes of KV-cache, asked for")],
)
async def test_an_r_node_that_grants_more_than_was_asked_for_is_refused(granted, error_text):
    fake = FakeRNode()
    fake.welcome |= granted
    async with fake as url:
        with pytest.raises(LinkRefused, match=error_text):
            await connect(url, hello(), None)


async def test_a_message_nested_deeper_than_python_can_show_is_an_error(r_node, bystander):
    """Before the caller has proved anything."""
    message = orjson.dumps(hello_message(windows="@")).replace(b'"@"', b"[" * 1000 + b"]" * 1000)
    assert "HELLO: Expected `int`, got `array` - at `$.windows" in await refusal(r_node.tcp, message)


@pytest.mark.parametrize("nested", [b"[" * 60_000, b"[" * 1000 + b"]" * 1000, b'{"a":' * 900 + b"1" + b"}" * 900])
async def test_a_challenge_nested_deeply_is_an_error(nested):
    """At the S-node, before the R-node has proved anything."""
    fake = FakeRNode()
    fake.challenge = orjson.dumps(fake.challenge | {"node": "@"}).replace(b'"@"', nested)
    async with fake as url:
        with pytest.raises(TransportError, match=r"not JSON|CHALLENGE: .* - at `\$\.node"):
            await connect(url, hello(), None)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"0.1,", b'"a",', b'{"":[]},', b"[" * 40 + b"]" * 40 + b","])
def test_the_largest_frame_before_the_secret_takes_little_memory(unit):
    body = b"[" + unit * (MAX_FRAME_BEFORE_AUTH // len(unit) - 1) + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="not a JSON object"):
            decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


# ---- an open link ----


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_wrong_and_used_tokens_are_refused(r_node, bystander, transport):
    url = getattr(r_node, transport)
    control, token = await open_link(url)
    for wrong in ("00" * 32, token[:-1] + ("0" if token[-1] != "0" else "1")):
        assert "no link waits for this token" in await refusal(url, attach_message(wrong))
    data = await attach(url, token)
    assert "no link waits for this token" in await refusal(url, attach_message(token))
    control.send_message({"type": "PING", "id": 5})
    assert await control.read_message() == {"type": "OK", "id": 5, "stats": None}
    await control.close()
    await data.read_to_end()
    await data.close()


@pytest.mark.parametrize(
    ("message", "error_text"),
    [
        (b"{}", "unknown control message type"),
        (b"nonsense", "not JSON"),
        ({"type": "FREE", "id": 1, "handles": [[0, -1]]}, "FREE: Expected `int` >= 0 - at `$.handles[0][1]`"),
        ({"type": "FREE", "id": 1, "handles": [[0, 1, 2]]}, "- at `$.handles"),
        ({"type": "FREE", "id": 1, "handles": 7}, "- at `$.handles"),
        ({"type": "TRIM", "id": 1, "seq_index": 0, "tag": 1, "length": 2**32}, "- at `$.length"),
        ({"type": "FORK", "id": "1", "src": 0, "src_tag": 1, "dst": 1, "dst_tag": 1, "length": 1}, "- at `$.id"),
        ({"type": "STATS", "id": -1}, "- at `$.id"),
        ({"type": "PING"}, "PING: missing field 'id'"),
        ({"type": "WELCOME"}, "WELCOME: missing field"),
        ({"type": "OK", "id": 1, "stats": None}, "OK has no place on an open link"),
        (hello_message(), "HELLO has no place on an open link"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_requests_end_their_link(r_node, bystander, message, error_text):
    control, token = await open_link(r_node.shm)
    data = await attach(r_node.shm, token)
    control.send_message(message)
    error = await control.read_message()
    assert (error["type"], error["id"]) == ("ERROR", 0) and error_text in error["message"]
    assert await control.read_to_end() == b""
    await control.close()
    await data.close()


async def test_oversized_frames_on_an_open_link(r_node, bystander):
    control, _ = await open_link(r_node.shm)
    control.send(struct.pack("<I", (1 << 20) + 1))
    assert "longer than the 1048576 allowed" in (await control.read_message())["message"]
    await control.close()
