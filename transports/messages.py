"""The control messages. Each is a frozen dataclass; the "type" field of the JSON object names it.

`decode` checks the type and the range of every field before any other code sees the message. An unknown or missing
field is an error too: both ends have the same protocol version, so such a field can only be a bug or an attack.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, dataclass_transform

import orjson

from fastdecode.region.contract import ACT_DTYPES, KV_DTYPES, MAX_LAYERS, MAX_SECTIONS, PROTOCOL_VERSION

from .base import Rotated, TransportError

#: Most handles of one message; a frame of 1 MiB has room for this many.
MAX_HANDLES = 32768

U32 = 2**32 - 1
#: The counter by which an R-node that is about to end says so in its answer to a PING.
LEAVING = "leaving"
#: Largest byte count, 4 PiB. Some JSON implementations do not represent integers above 2**53 exactly.
MAX_BYTES = 2**52


_T = TypeVar("_T")


class ProtocolError(TransportError):
    """The peer has sent bytes that are not a message of this protocol, or a message out of turn."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    def __init__(self, theirs: object):
        super().__init__(f"protocol version mismatch: the peer has {_show(theirs)}, this end {PROTOCOL_VERSION}")


_repr = reprlib.Repr()
_repr.maxlevel = 3  # a peer's value may be nested deeper than Python's own repr can go
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def _show(value: object) -> str:
    text = _repr.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# A check returns None for a good value, else a phrase to follow the word "expected".
_Check = Callable[[Any], "str | None"]


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # bool is an int to isinstance


def _int(high: int, low: int = 0) -> Any:
    return _checked(lambda v: None if _is_int(v, low, high) else f"an integer within {low}..{high}")


def _text(limit: int) -> Any:
    wrong = f"a string of at most {limit} characters"
    return _checked(lambda v: None if isinstance(v, str) and len(v) <= limit else wrong)


def _hex(n_bytes: int) -> Any:
    def check(value: Any) -> str | None:
        digits = set("0123456789abcdef")
        good = isinstance(value, str) and len(value) == 2 * n_bytes and digits.issuperset(value)
        return None if good else f"{2 * n_bytes} hexadecimal digits"

    return _checked(check)


def _choice(names: tuple[str, ...]) -> Any:
    return _checked(lambda v: None if isinstance(v, str) and v in names else "one of " + ", ".join(names))


def _flag() -> Any:
    return _checked(lambda v: None if isinstance(v, bool) else "true or false")


def _positive() -> Any:
    def check(value: Any) -> str | None:
        good = type(value) in (int, float) and math.isfinite(value) and value > 0
        return None if good else "a finite number greater than 0"

    return _checked(check)


def _ints(limit: int) -> Any:
    def check(value: Any) -> str | None:
        good = isinstance(value, list) and len(value) <= limit and all(_is_int(v, 0, U32) for v in value)
        return None if good else f"a list of at most {limit} integers within 0..{U32}"

    return _checked(check)


def _numbers(limit: int) -> Any:
    def check(value: Any) -> str | None:
        good = isinstance(value, list) and len(value) <= limit
        good = good and all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in value)
        return None if good else f"a list of at most {limit} finite numbers of at least 0"

    return _checked(check)


def _base64() -> Any:
    def check(value: Any) -> str | None:
        try:
            base64.b64decode(value if isinstance(value, str) else "!", validate=True)
        except ValueError:
            return "bytes in base64"
        return None

    return _checked(check)


def _tuples(n: int, name: str, limit: int) -> Any:
    def check(value: Any) -> str | None:
        good = isinstance(value, list) and len(value) <= limit
        good = good and all(isinstance(p, list) and len(p) == n and all(_is_int(v, 0, U32) for v in p) for p in value)
        return None if good else f"a list of at most {limit} {name} of integers within 0..{U32}"

    return _checked(check)


def _pair() -> Any:
    def check(value: Any) -> str | None:
        good = isinstance(value, list) and len(value) == 2 and all(_is_int(v, 0, U32) for v in value)
        return None if good else f"a pair of integers within 0..{U32}"

    return _checked(check)


def _counters() -> Any:
    def check(value: Any) -> str | None:
        good = isinstance(value, dict) and all(_is_int(v, 0, 2**64 - 1) for v in value.values())
        return None if good else "an object of counters"

    return _checked(check)


def _or_null(spec: Any) -> Any:
    check = spec.metadata["check"]
    return _checked(lambda v: None if v is None else (wrong := check(v)) and wrong + ", or null")


def _checked(check: _Check) -> Any:
    return field(metadata={"check": check})


def _id() -> Any:
    return _int(2**53)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=())
def _message(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen dataclass. Callers name every field: the check in a field's metadata is not a default."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


# The hand-shake. The R-node sends CHALLENGE. The S-node answers with HELLO, to open a link, or with ATTACH, to add the
# data connection to a link. The R-node answers HELLO with WELCOME, ATTACH with ATTACHED, and either with REFUSED. Each
# `mac` is a proof of the shared secret (session.py), null without one.


@_message
class Challenge:
    TYPE: ClassVar[str] = "CHALLENGE"
    version: int = _int(U32)
    nonce: str = _hex(32)
    needs_secret: bool = _flag()
    node: str = _text(256)


@_message
class HelloMessage:
    """base.Hello on the wire. `region_bytes` is the region's size as the S-node computes it; the R-node compares it.
    The fields from `segments` on are those of base.LayerOptions."""

    TYPE: ClassVar[str] = "HELLO"
    version: int = _int(U32)
    nonce: str = _hex(32)
    mac: str | None = _or_null(_hex(32))
    n_slots: int = _int(U32)
    max_rows: int = _int(U32)
    n_layers: int = _int(U32)
    n_q_heads: int = _int(U32)
    n_kv_heads: int = _int(U32)
    head_size: int = _int(U32)
    act_dtype: str = _choice(ACT_DTYPES)
    v_size: int = _int(U32)
    region_bytes: int = _int(MAX_BYTES)
    kv_dtype: str = _choice(KV_DTYPES)
    windows: list[int] = _ints(MAX_LAYERS)
    softmax_scale: float = _positive()
    kv_bytes: int | None = _or_null(_int(MAX_BYTES))
    max_seqs: int = _int(U32)
    segments: list[int] = _ints(MAX_LAYERS)
    kv_layers: list[int] = _ints(MAX_LAYERS)
    softcaps: list[float] = _numbers(MAX_LAYERS)
    sinks: str = _base64()
    slopes: str = _base64()
    heads: list[list[int]] = _tuples(4, "quadruples", MAX_LAYERS)
    part: list[int] = _pair()
    rotated: int = _int(Rotated.QK | Rotated.VO)


@_message
class Attach:
    TYPE: ClassVar[str] = "ATTACH"
    version: int = _int(U32)
    mac: str | None = _or_null(_hex(32))
    token: str = _hex(32)


@_message
class Attached:
    TYPE: ClassVar[str] = "ATTACHED"
    mac: str | None = _or_null(_hex(32))


@_message
class Welcome:
    """base.Lease on the wire. ATTACH presents the `token`, which is valid once."""

    TYPE: ClassVar[str] = "WELCOME"
    mac: str | None = _or_null(_hex(32))
    token: str = _hex(32)
    n_pages: int = _int(U32, 1)
    max_pages: int = _int(U32, 1)
    max_seqs: int = _int(U32, 1)
    page_bytes: int = _int(MAX_BYTES, 1)
    isa: str = _text(32)
    threads: int = _int(U32, 1)
    node: str = _text(256)
    full_sections: int = _int(MAX_SECTIONS)
    limited_sections: int = _int(MAX_SECTIONS)
    reach: int = _int(U32)


# A bulk connection, over which an R-node sends pages of a sequence to another one (bulk.py). The receiving R-node sends
# CHALLENGE, the sending one DELIVER, the receiving one ACCEPTED or REFUSED. Each PAGES is followed by the pages' bytes,
# and answered with OK or ERROR. Behind a whole sequence NEXT may announce another one; it is answered in the same way.


@_message
class Deliver:
    """`token` is that of a RECEIVE, and is valid once. Both ends must have pages of `page_bytes`."""

    TYPE: ClassVar[str] = "DELIVER"
    version: int = _int(U32)
    nonce: str = _hex(32)
    mac: str | None = _or_null(_hex(32))
    token: str = _hex(32)
    page_bytes: int = _int(MAX_BYTES, 1)


@_message
class Next:
    """`token` and `page_bytes` as in DELIVER."""

    TYPE: ClassVar[str] = "NEXT"
    token: str = _hex(32)
    page_bytes: int = _int(MAX_BYTES, 1)


# A connection between two S-nodes, over which one asks the other to compute a prompt (fastdecode/daemon/handover.py).
# The S-node that listens sends CHALLENGE, the other one ENTRUST, the first one ACCEPTED or REFUSED. PROMPT is answered
# with OK once its pages have been pushed, or with ERROR.


@_message
class Entrust:
    """`model` is a digest of the model and the KV-cache's format, in which both ends must agree."""

    TYPE: ClassVar[str] = "ENTRUST"
    version: int = _int(U32)
    nonce: str = _hex(32)
    mac: str | None = _or_null(_hex(32))
    model: str = _hex(32)


@_message
class Prompt:
    """A prompt to compute: the ids of its tokens (uint32, little-endian), and the R-node at `url` that takes the pages
    for `token`. The other fields are those of engine.handover.Order."""

    TYPE: ClassVar[str] = "PROMPT"
    tokens: str = _base64()
    adapter: str | None = _or_null(_text(256))
    cache_salt: str = _text(4096)
    client: str = _text(256)
    priority: int = _int(2**53, -(2**53))
    url: str = _text(1024)
    token: str = _hex(32)


@_message
class Accepted:
    TYPE: ClassVar[str] = "ACCEPTED"
    mac: str | None = _or_null(_hex(32))


@_message
class Pages:
    """`n_pages` pages from page `first` on follow. `length`: the tokens of the whole sequence, if these pages are its
    last ones; else 0."""

    TYPE: ClassVar[str] = "PAGES"
    first: int = _int(U32)
    n_pages: int = _int(U32)
    length: int = _int(U32)


@_message
class Refused:
    TYPE: ClassVar[str] = "REFUSED"
    reason: str = _text(4096)


# The data path of an RDMA link. After ATTACHED the S-node sends ENDPOINT, and the R-node sends its own ENDPOINT
# once the S-node may write to its region.


@_message
class Endpoint:
    """One end's queue pair and region (InfiniBand Architecture Specification, vol. 1, chapters 9 and 12).

    `gid` is the port's address; `lid` is the port's address within an InfiniBand subnet, 0 on Ethernet; `mtu` is in
    bytes. The peer writes to the region with `rkey` and `address` (64 bits, hexadecimal).
    """

    TYPE: ClassVar[str] = "ENDPOINT"
    qpn: int = _int(2**24 - 1)
    psn: int = _int(2**24 - 1)
    gid: str = _hex(16)
    lid: int = _int(2**16 - 1)
    mtu: int = _int(4096, 256)
    rkey: int = _int(U32)
    address: str = _hex(8)


# An open link. The S-node sends a request, and the R-node answers with OK or ERROR of the same id.


@_message
class Free:
    """`handles` are (seq_index, tag) pairs."""

    TYPE: ClassVar[str] = "FREE"
    id: int = _id()
    handles: list[list[int]] = _tuples(2, "pairs", MAX_HANDLES)


@_message
class Trim:
    TYPE: ClassVar[str] = "TRIM"
    id: int = _id()
    seq_index: int = _int(U32)
    tag: int = _int(U32)
    length: int = _int(U32)


@_message
class Fork:
    TYPE: ClassVar[str] = "FORK"
    id: int = _id()
    src: int = _int(U32)
    src_tag: int = _int(U32)
    dst: int = _int(U32)
    dst_tag: int = _int(U32)
    length: int = _int(U32)


@_message
class Resize:
    """Ask for a lease of `n_pages` pages in all; the R-node comes as near as it can."""

    TYPE: ClassVar[str] = "RESIZE"
    id: int = _id()
    n_pages: int = _int(U32, 1)


@_message
class Receive:
    """Let the empty sequence hold `length` tokens, which another R-node may bring once with `token`."""

    TYPE: ClassVar[str] = "RECEIVE"
    id: int = _id()
    seq_index: int = _int(U32)
    tag: int = _int(U32)
    length: int = _int(U32, 1)
    token: str = _hex(32)


@_message
class Push:
    """Send pages of a sequence to the R-node at `url`, for which `token` is valid; `first` to `length` as in PAGES. The
    answer comes once that R-node has them. Other requests are answered meanwhile."""

    TYPE: ClassVar[str] = "PUSH"
    id: int = _id()
    seq_index: int = _int(U32)
    tag: int = _int(U32)
    first: int = _int(U32)
    n_pages: int = _int(U32)
    length: int = _int(U32)
    url: str = _text(1024)
    token: str = _hex(32)


@_message
class Stats:
    TYPE: ClassVar[str] = "STATS"
    id: int = _id()


@_message
class Ping:
    TYPE: ClassVar[str] = "PING"
    id: int = _id()


@_message
class Ok:
    """`stats` answers STATS and RESIZE, and is null otherwise; but an R-node that is about to end answers a PING with
    the counter `leaving`, which is 1. The answers to PAGES and NEXT have `id` 0."""

    TYPE: ClassVar[str] = "OK"
    id: int = _id()
    stats: dict[str, int] | None = _or_null(_counters())


@_message
class Error:
    """`status` is an fd_status_t of region/region.h. With `id` 0 the message answers no request: it ends the link."""

    TYPE: ClassVar[str] = "ERROR"
    id: int = _id()
    status: int = _int(U32)
    message: str = _text(4096)


Request = Free | Trim | Fork | Receive | Push | Resize | Stats | Ping
HandShake = Challenge | HelloMessage | Attach | Attached | Welcome | Deliver | Entrust | Accepted | Refused
Message = HandShake | Endpoint | Pages | Next | Prompt | Request | Ok | Error

_REQUESTS = (Free, Trim, Fork, Receive, Push, Resize, Stats, Ping)
_HAND_SHAKE = (Challenge, HelloMessage, Attach, Attached, Welcome, Deliver, Entrust, Accepted, Refused)
_TYPES: dict[str, type] = {m.TYPE: m for m in (*_HAND_SHAKE, Endpoint, Pages, Next, Prompt, *_REQUESTS, Ok, Error)}
_CHECKS: dict[type, dict[str, _Check]] = {
    m: {f.name: f.metadata["check"] for f in dataclasses.fields(m)} for m in _TYPES.values()
}


def encode(message: Message) -> bytes:
    """The message as JSON with sorted keys. Equal messages give equal bytes, so a MAC can cover them."""
    fields = {name: getattr(message, name) for name in _CHECKS[type(message)]}
    return orjson.dumps({"type": message.TYPE} | fields, option=orjson.OPT_SORT_KEYS)


def decode(body: bytes) -> Message:
    """Parse and check one message. Raises ProtocolError, VersionMismatch."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"a control frame is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"a control frame is not a JSON object but {_show(fields)}")
    name = fields.pop("type", None)
    message = _TYPES.get(name) if isinstance(name, str) else None
    if message is None:
        raise ProtocolError(f"unknown control message type {_show(name)}")
    checks = _CHECKS[message]
    # The version is checked before the fields, because another version's message may have other fields.
    if "version" in checks and fields.get("version") != PROTOCOL_VERSION:
        raise VersionMismatch(fields.get("version"))
    for key in fields.keys() ^ checks.keys():
        raise ProtocolError(f"{name}: {'unknown' if key in fields else 'missing'} field {_show(key)}")
    for key, check in checks.items():
        expected = check(fields[key])
        if expected is not None:
            raise ProtocolError(f"{name}.{key}: expected {expected}, got {_show(fields[key])}")
    parsed: Message = message(**fields)
    return parsed
