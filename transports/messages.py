"""The control messages. The "type" field of the JSON object is the name of the message's class, in capital letters.

`decode` checks the type and the range of every field before any other code sees the message. An unknown or missing
field is an error too: both ends have the same protocol version, so such a field can only be a bug or an attack.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, ClassVar, get_args, get_type_hints

import msgspec
import orjson
from msgspec import Meta

from fastdecode.region.contract import ACT_DTYPES, KV_DTYPES, MAX_LAYERS, MAX_SECTIONS, PROTOCOL_VERSION

from .base import HadamardHeads, TransportError

#: Most handles of one message; a frame of 1 MiB has room for this many.
MAX_HANDLES = 32768
#: The counter by which an R-node that is about to end says so in its answer to a PING.
LEAVING = "leaving"


class ProtocolError(TransportError):
    """The peer has sent bytes that are not a message of this protocol, or a message out of turn."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    def __init__(self, theirs: object):
        super().__init__(f"protocol version mismatch: the peer has {_show(theirs)}, this end {PROTOCOL_VERSION}")


# ---- types of fields; an error quotes the description ----


def _int(high: int, low: int = 0) -> Meta:
    return Meta(ge=low, le=high, description=f"an integer within {low}..{high}")


def _text(most: int) -> Meta:
    return Meta(max_length=most, description=f"a string of at most {most} characters")


def _hex(n_bytes: int) -> Meta:
    return Meta(pattern=rf"^[0-9a-f]{{{2 * n_bytes}}}\Z", description=f"{2 * n_bytes} hexadecimal digits")


def _one_of(names: Sequence[str]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z", description="one of " + ", ".join(names))


def _list(most: int, items: str) -> Meta:
    return Meta(max_length=most, description=f"a list of at most {most} {items}")


_U32S = f"integers within 0..{2**32 - 1}"
U32 = Annotated[int, _int(2**32 - 1)]
#: A number of something of which there is at least one.
Count = Annotated[int, _int(2**32 - 1, 1)]
Flag = Annotated[bool, Meta(description="true or false")]
#: Some JSON implementations do not represent integers above 2**53 exactly.
RequestId = Annotated[int, _int(2**53)]
Bytes = Annotated[int, _int(2**52)]  # 4 PiB
PageBytes = Annotated[int, _int(2**52, 1)]
#: A key, a nonce, a token, a digest or a MAC.
Hex32 = Annotated[str, _hex(32)]
Name = Annotated[str, _text(256)]
Url = Annotated[str, _text(1024)]
Sentence = Annotated[str, _text(4096)]
Base64 = Annotated[bytes, Meta(description="bytes in base64")]
#: A peer may write a whole number without a point. It stays an int, because proofs cover the message's bytes.
Positive = Annotated[
    Annotated[int, Meta(gt=0)] | Annotated[float, Meta(gt=0)], Meta(description="a finite number greater than 0")
]
_NotNegative = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Softcaps = Annotated[tuple[_NotNegative, ...], _list(MAX_LAYERS, "finite numbers of at least 0")]
PerLayer = Annotated[tuple[U32, ...], _list(MAX_LAYERS, _U32S)]


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    TYPE: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.TYPE = cls.__name__.removesuffix("Message").upper()


class Proved(ControlMessage, frozen=True):
    """`mac` is a proof of the shared secret (session.py), null without one."""

    mac: Hex32 | None


# The hand-shake. The R-node sends CHALLENGE. The S-node answers with HELLO, to open a link, or with ATTACH, to add the
# data connection to a link. The R-node answers HELLO with WELCOME, ATTACH with ATTACHED, and either with REFUSED.


class Challenge(ControlMessage, frozen=True):
    version: U32
    nonce: Hex32
    needs_secret: Flag
    node: Name


class HelloMessage(Proved, frozen=True):
    """base.Hello on the wire. `region_bytes` is the region's size as the S-node computes it; the R-node compares it.
    The fields from `segments` on are those of base.LayerOptions, whose `hadamard` is called `rotated` here."""

    version: U32
    nonce: Hex32
    n_slots: U32
    max_rows: U32
    n_layers: U32
    n_q_heads: U32
    n_kv_heads: U32
    head_size: U32
    act_dtype: Annotated[str, _one_of(ACT_DTYPES)]
    v_size: U32
    region_bytes: Bytes
    kv_dtype: Annotated[str, _one_of(KV_DTYPES)]
    windows: PerLayer
    softmax_scale: Positive
    kv_bytes: Bytes | None
    max_seqs: U32
    segments: PerLayer
    kv_layers: PerLayer
    softcaps: Softcaps
    sinks: Base64
    slopes: Base64
    heads: Annotated[tuple[tuple[U32, U32, U32, U32], ...], _list(MAX_LAYERS, f"quadruples of {_U32S}")]
    part: Annotated[tuple[U32, U32], Meta(description=f"a pair of {_U32S}")]
    rotated: Annotated[int, _int(int(HadamardHeads.QK | HadamardHeads.VO))]


class Attach(Proved, frozen=True):
    version: U32
    token: Hex32


class Attached(Proved, frozen=True):
    pass


class Welcome(Proved, frozen=True):
    """base.Lease on the wire. ATTACH presents the `token`, which is valid once."""

    token: Hex32
    n_pages: Count
    max_pages: Count
    max_seqs: Count
    page_bytes: PageBytes
    isa: Annotated[str, _text(32)]
    threads: Count
    node: Name
    full_sections: Annotated[int, _int(MAX_SECTIONS)]
    limited_sections: Annotated[int, _int(MAX_SECTIONS)]
    reach: U32


# A migration connection, over which an R-node sends pages of a sequence to another one (migration.py). The receiving
# R-node sends CHALLENGE, the sending one DELIVER, the receiving one ACCEPTED or REFUSED. Each PAGES is followed by the
# pages' bytes, and answered with OK or ERROR. Behind a whole sequence NEXT may announce another one; it is answered in
# the same way.


class Deliver(Proved, frozen=True):
    """`token` is that of a RECEIVE, and is valid once. Both ends must have pages of `page_bytes`."""

    version: U32
    nonce: Hex32
    token: Hex32
    page_bytes: PageBytes


class Next(ControlMessage, frozen=True):
    """`token` and `page_bytes` as in DELIVER."""

    token: Hex32
    page_bytes: PageBytes


# A connection between two S-nodes, over which one asks the other to compute a prompt
# (fastdecode/daemon/prefill_nodes.py). The S-node that listens sends CHALLENGE, the other one ENTRUST, the first one
# ACCEPTED or REFUSED. PROMPT is answered with OK once its pages have been pushed, or with ERROR.


class Entrust(Proved, frozen=True):
    """`model` is a digest of the model and the KV-cache's format, in which both ends must agree."""

    version: U32
    nonce: Hex32
    model: Hex32


class PromptMessage(ControlMessage, frozen=True):
    """A prompt to compute: the ids of its tokens (uint32, little-endian), and the R-node at `url` that takes the pages
    for `token`. The other fields are those of engine.migration.prefill_client.Order."""

    tokens: Base64
    adapter: Name | None
    cache_salt: Sentence
    client: Name
    priority: Annotated[int, _int(2**53, -(2**53))]
    url: Url
    token: Hex32


class Accepted(Proved, frozen=True):
    pass


class Pages(ControlMessage, frozen=True):
    """`n_pages` pages from page `first` on follow. `length`: the tokens of the whole sequence, if these pages are its
    last ones; else 0."""

    first: U32
    n_pages: U32
    length: U32


class RefusedMessage(ControlMessage, frozen=True):
    reason: Sentence


# The data path of an RDMA link. After ATTACHED the S-node sends ENDPOINT, and the R-node sends its own ENDPOINT
# once the S-node may write to its region.


class EndpointMessage(ControlMessage, frozen=True):
    """One end's queue pair and region (InfiniBand Architecture Specification, vol. 1, chapters 9 and 12).

    `gid` is the port's address; `lid` is the port's address within an InfiniBand subnet, 0 on Ethernet; `mtu` is in
    bytes. The peer writes to the region with `rkey` and `address` (64 bits, hexadecimal).
    """

    qpn: Annotated[int, _int(2**24 - 1)]
    psn: Annotated[int, _int(2**24 - 1)]
    gid: Annotated[str, _hex(16)]
    lid: Annotated[int, _int(2**16 - 1)]
    mtu: Annotated[int, _int(4096, 256)]
    rkey: U32
    address: Annotated[str, _hex(8)]


# An open link. The S-node sends a request, and the R-node answers with OK or ERROR of the same id.


class _Numbered(ControlMessage, frozen=True):
    id: RequestId


class Free(_Numbered, frozen=True):
    """`handles` are (seq_index, tag) pairs."""

    handles: Annotated[list[tuple[U32, U32]], _list(MAX_HANDLES, f"pairs of {_U32S}")]


class Trim(_Numbered, frozen=True):
    seq_index: U32
    tag: U32
    length: U32


class Fork(_Numbered, frozen=True):
    src: U32
    src_tag: U32
    dst: U32
    dst_tag: U32
    length: U32


class Resize(_Numbered, frozen=True):
    """Ask for a lease of `n_pages` pages in all; the R-node comes as near as it can."""

    n_pages: Count


class Receive(_Numbered, frozen=True):
    """Let the empty sequence hold `length` tokens, which another R-node may send once with `token`."""

    seq_index: U32
    tag: U32
    length: Count
    token: Hex32


class Push(_Numbered, frozen=True):
    """Send pages of a sequence to the R-node at `url`, for which `token` is valid; `first` to `length` as in PAGES. The
    answer comes once that R-node has them. Other requests are answered meanwhile."""

    seq_index: U32
    tag: U32
    first: U32
    n_pages: U32
    length: U32
    url: Url
    token: Hex32


class Stats(_Numbered, frozen=True):
    pass


class PingMessage(_Numbered, frozen=True):
    pass


class Ok(_Numbered, frozen=True):
    """`stats` answers STATS and RESIZE, and is null otherwise; but an R-node that is about to end answers a PING with
    the counter `leaving`, which is 1. The answers to PAGES and NEXT have `id` 0."""

    stats: Annotated[dict[str, Annotated[int, Meta(ge=0)]], Meta(description="an object of counters")] | None


class ErrorMessage(_Numbered, frozen=True):
    """`status` is an fd_status_t of region/region.h. With `id` 0 the message answers no request: it ends the link."""

    status: U32
    message: Sentence


HandShake = Challenge | HelloMessage | Attach | Attached | Welcome | Deliver | Entrust | Accepted | RefusedMessage
Request = Free | Trim | Fork | Receive | Push | Resize | Stats | PingMessage
Message = HandShake | EndpointMessage | Pages | Next | PromptMessage | Request | Ok | ErrorMessage

_KINDS: dict[str, type[Message]] = {kind.TYPE: kind for kind in get_args(Message)}


def encode(message: ControlMessage) -> bytes:
    """The message as JSON with sorted keys. Equal messages give equal bytes, so a MAC can cover them."""
    return orjson.dumps({"type": message.TYPE} | msgspec.to_builtins(message), option=orjson.OPT_SORT_KEYS)


def decode(body: bytes) -> Message:
    """Parse and check one message. Raises ProtocolError, VersionMismatch."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"a control frame is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError(f"a control frame is not a JSON object but {_show(fields)}")
    name = fields.pop("type", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown control message type {_show(name)}")
    # The version is checked before the fields, because another version's message may have other fields.
    if "version" in kind.__struct_fields__ and fields.get("version") != PROTOCOL_VERSION:
        raise VersionMismatch(fields.get("version"))
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        raise ProtocolError(_fault(kind, fields)) from None


def _fault(kind: type[Message], fields: dict[str, object]) -> str:
    """Why `fields` are not those of a message of this kind."""
    for name in fields.keys() ^ set(kind.__struct_fields__):
        return f"{kind.TYPE}: {'unknown' if name in fields else 'missing'} field {_show(name)}"
    hints = get_type_hints(kind, include_extras=True)
    for name, value in fields.items():
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            return f"{kind.TYPE}.{name}: expected {_description(hints[name])}, got {_show(value)}"
    raise AssertionError("msgspec refused a message whose fields are all right")


def _description(hint: object) -> str:
    """The description of a field's type."""
    if type(None) in get_args(hint):
        return _description(get_args(hint)[0]) + ", or null"
    meta: Meta = next(part for part in get_args(hint) if isinstance(part, Meta))
    return meta.description or ""


_repr = reprlib.Repr()
_repr.maxlevel = 3  # a peer's value may be nested deeper than Python's own repr can go
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def _show(value: object) -> str:
    text = _repr.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
