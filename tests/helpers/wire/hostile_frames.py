"""Control frames with something wrong about them, drawn from a seeded generator."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable

import orjson

from fastdecode.region.contract import PROTOCOL_VERSION
from wire.wire_peers import FakeRNode, attach_message, hello_message

#: A well-formed message of every type.
MESSAGES: list[dict] = [
    FakeRNode().challenge,
    hello_message(),
    attach_message("70" * 32),
    {"type": "ATTACHED", "mac": "3c" * 32},
    FakeRNode().welcome,
    {
        "type": "DELIVER",
        "version": PROTOCOL_VERSION,
        "nonce": "5a" * 32,
        "mac": None,
        "token": "70" * 32,
        "page_bytes": 4096,
    },
    {"type": "PROBE", "version": PROTOCOL_VERSION, "nonce": "5a" * 32, "mac": None},
    {"type": "ENTRUST", "version": PROTOCOL_VERSION, "nonce": "5a" * 32, "mac": None, "model": "3c" * 32},
    {
        "type": "PROMPT",
        "tokens": "AQAAAAIAAAA=",
        "adapter": None,
        "cache_salt": "",
        "client": "",
        "priority": 0,
        "url": "tcp://127.0.0.1:9",
        "token": "70" * 32,
    },
    {"type": "ACCEPTED", "mac": "3c" * 32},
    {"type": "NEXT", "token": "70" * 32, "page_bytes": 4096},
    {"type": "PAGES", "first": 0, "n_pages": 1, "length": 100},
    {"type": "RECEIVE", "id": 7, "seq_index": 3, "tag": 1, "length": 100, "token": "70" * 32},
    {"type": "OFFER", "id": 15, "seq_index": 0, "tag": 1, "token": "71" * 32},
    {"type": "FETCH", "first": 0, "n_pages": 1},
    {
        "type": "PUSH",
        "id": 8,
        "seq_index": 0,
        "tag": 1,
        "first": 0,
        "n_pages": 1,
        "length": 0,
        "url": "tcp://127.0.0.1:9",
        "token": "70" * 32,
    },
    {"type": "REFUSED", "reason": "a reason"},
    {"type": "ENDPOINT", "qpn": 7, "psn": 9, "gid": "00" * 16, "lid": 1, "mtu": 1024, "rkey": 5, "address": "00" * 8},
    {"type": "FREE", "id": 1, "handles": [[0, 1], [1, 1]]},
    {"type": "TRIM", "id": 2, "seq_index": 0, "tag": 1, "length": 0},
    {"type": "FORK", "id": 3, "src": 0, "src_tag": 1, "dst": 1, "dst_tag": 1, "length": 1},
    {"type": "RESIZE", "id": 6, "n_pages": 5},
    {"type": "KEEP", "id": 9, "sequences": [[0, 1, "4b" * 32], [1, 1, None]]},
    {"type": "FIND", "id": 10, "key": "4b" * 32, "length": 1},
    {"type": "ADOPT", "id": 11, "seq_index": 2, "tag": 1, "length": 1, "key": "4b" * 32},
    {"type": "STATS", "id": 4},
    {"type": "PING", "id": 5},
    {"type": "OK", "id": 1, "stats": {"calls": 1}},
    {"type": "ERROR", "id": 1, "status": 2, "message": "a message"},
]
BY_TYPE = {message["type"]: message for message in MESSAGES}

_VALUES: list[object] = [
    None, True, 0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63, 0.5, -0.0, 1e308,
    "", "x", "\0", "\ud7ff\ufffd", "00" * 32, "x" * 50_000, [], {}, [[]], [[0, 1]] * 9000, [0] * 1024, {"": {}},
]  # fmt: skip
_RAW = [b"[" * 30_000, b'{"a":' * 900, b"[" * 1000 + b"]" * 1000, b"9" * 5000, b"NaN", b"\xff\xfe", b'"\\ud800"', b"-"]


def _wrong_json(rng: random.Random, message: dict) -> bytes:
    """JSON of a message like this one, with a field or two that are wrong, missing or new."""
    message = copy.deepcopy(message)
    raw = None
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*message, "type", "a new field"])
        match rng.randrange(4):
            case 0:
                message.pop(name, None)
            case 1:
                raw, message[name] = rng.choice(_RAW), "@raw@"
            case 2:
                other = rng.choice(MESSAGES)
                message[name] = other[rng.choice(list(other))]
            case 3:
                message[name] = rng.choice(_VALUES)
    body = orjson.dumps(message)
    return body.replace(b'"@raw@"', raw) if raw else body


def _wrong_bytes(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.choice((1, 2, 8))):
                if changed:
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 1:
            del changed[rng.randrange(len(changed) + 1) :]
        case 2:
            at = rng.randrange(len(changed) + 1)
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        case 3:
            return rng.randbytes(rng.randrange(200))
    return bytes(changed)


def hostile_frame(
    rng: random.Random, message: dict, seal: Callable[[bytes], bytes] | None = None, most: int = 60_000
) -> bytes:
    """A frame made from `message`: its JSON, bytes, MAC or length are wrong. `seal` puts a MAC behind a body.

    Every third frame is about as long as a frame may be, `most` bytes; the others are short.
    """
    body = orjson.dumps(message)
    which = rng.randrange(8)
    if which < 4:
        body = _wrong_json(rng, message)
    if rng.randrange(3) == 0:
        body += b" " * (most - len(body))  # the same JSON
    if which in (4, 5):
        body = _wrong_bytes(rng, body)
    if seal and which != 6:
        body = seal(body)
        if rng.random() < 0.2:
            body = _wrong_bytes(rng, body)
    length = len(body)
    if which == 7:
        length = rng.choice((0, 1, max(0, length - 1), length + 1, 1 << 16, (1 << 16) + 1, 1 << 20, 2**31, 2**32 - 1))
    return struct.pack("<I", length) + body
