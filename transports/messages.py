"""The control messages. The "type" field of the JSON object is the name of the message's class, in capital letters.

`decode` checks the type and the range of every field before any other code sees the message. An unknown or missing
field is an error too: both ends have the same protocol version, so such a field can only be a bug or an attack.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Hashable
from typing import Annotated, ClassVar, get_args, get_origin, get_type_hints

import msgspec
import orjson
from msgspec import Meta

from fastdecode.region import wire
from fastdecode.region.contract import PROTOCOL_VERSION

from .base import Hello, Lease, TransportError

#: Most handles of one message; a frame of 1 MiB has room for this many.
MAX_HANDLES = 32768
#: Most keys of one message.
MAX_KEYS = 8192
#: The counter by which an R-node that is about to end says so in its answer to a PING.
LEAVING = "leaving"
#: Fields whose own fields stand on the wire beside those of the message.
_PARTS = ("hello", "geometry", "layers", "lease")
#: What the path of a field in msgspec's errors has and the wire has not.
_PARTS_OF_PATH = re.compile(rf"(?<=`\$)(\.({'|'.join(_PARTS)}))+(?=\.)")
#: Fields that have another name on the wire.
_WIRE_NAMES = {"hadamard": "rotated"}


class ProtocolError(TransportError):
    """The peer has sent bytes that are not a message of this protocol, or a message out of turn."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    def __init__(self, theirs: object):
        super().__init__(f"protocol version mismatch: the peer has {_show(theirs)}, this end {PROTOCOL_VERSION}")


class ControlMessage(msgspec.Struct, frozen=True):
    TYPE: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.TYPE = cls.__name__.removesuffix("Message").upper()


class Proved(ControlMessage, frozen=True):
    """`mac` is a proof of the shared secret (session.py), null without one."""

    mac: wire.Hex32 | None


# The hand-shake. The R-node sends CHALLENGE. The S-node answers with HELLO, to open a link, or with ATTACH, to add the
# data connection to a link. The R-node answers HELLO with WELCOME, ATTACH with ATTACHED, and either with REFUSED. PROBE
# opens nothing.


class Challenge(ControlMessage, frozen=True):
    version: wire.U32
    nonce: wire.Hex32
    node: wire.Name


class HelloMessage(Proved, frozen=True):
    """`region_bytes` is the region's size as the S-node computes it; the R-node compares it."""

    version: wire.U32
    nonce: wire.Hex32
    region_bytes: wire.Bytes
    hello: Hello


class Attach(Proved, frozen=True):
    version: wire.U32
    token: wire.Hex32


class Attached(Proved, frozen=True):
    pass


class Welcome(Proved, frozen=True):
    """ATTACH presents the `token`, which is valid once."""

    token: wire.Hex32
    lease: Lease


class Probe(Proved, frozen=True):
    """Asks whether the R-node would open a link to this S-node. ACCEPTED or REFUSED ends the connection."""

    version: wire.U32
    nonce: wire.Hex32


# A migration connection, over which an R-node sends pages of a sequence to another one (migration.py). The receiving
# R-node sends CHALLENGE, the sending one DELIVER, the receiving one ACCEPTED or REFUSED. Each PAGES is followed by the
# pages' bytes, and answered with OK or ERROR. Behind a whole sequence NEXT may announce another one; it is answered in
# the same way. With the token of an OFFER the end that has connected sends FETCH instead, which is answered with PAGES
# and the pages' bytes, or with ERROR.


class Deliver(Proved, frozen=True):
    """`token` comes from a RECEIVE or an OFFER, and is valid once. Both ends must have pages of `page_bytes`."""

    version: wire.U32
    nonce: wire.Hex32
    token: wire.Hex32
    page_bytes: wire.PageBytes


class Next(ControlMessage, frozen=True):
    """`token` and `page_bytes` as in DELIVER."""

    token: wire.Hex32
    page_bytes: wire.PageBytes


# A connection between two S-nodes, over which one asks the other to compute a prompt
# (fastdecode/daemon/prefill_nodes.py). The S-node that listens sends CHALLENGE, the other one ENTRUST, the first one
# ACCEPTED or REFUSED. PROMPT is answered with OK once its pages have been pushed, or with ERROR.


class Entrust(Proved, frozen=True):
    """`model` is a digest of the model and the KV-cache's format, in which both ends must agree."""

    version: wire.U32
    nonce: wire.Hex32
    model: wire.Hex32


class PromptMessage(ControlMessage, frozen=True):
    """A prompt to compute: the ids of its tokens (uint32, little-endian), and the R-node at `url` that takes the pages
    for `token`. The other fields are those of engine.migration.prefill_client.PrefillOrder."""

    tokens: bytes
    adapter: wire.Name | None
    cache_salt: wire.Sentence
    client: wire.Name
    priority: Annotated[int, wire.integer(2**53, -(2**53))]
    url: wire.Url
    token: wire.Hex32


class Accepted(Proved, frozen=True):
    pass


class Pages(ControlMessage, frozen=True):
    """`n_pages` pages from page `first` on follow. `length`: the tokens of the whole sequence, if these pages are its
    last ones; else 0."""

    first: wire.U32
    n_pages: wire.U32
    length: wire.U32


class Fetch(ControlMessage, frozen=True):
    """Ask for `n_pages` pages from page `first` on."""

    first: wire.U32
    n_pages: wire.U32


class RefusedMessage(ControlMessage, frozen=True):
    reason: wire.Sentence


# The data path of an RDMA link. After ATTACHED the S-node sends ENDPOINT, and the R-node sends its own ENDPOINT
# once the S-node may write to its region.


class EndpointMessage(ControlMessage, frozen=True):
    """One end's queue pair and region (InfiniBand Architecture Specification, vol. 1, chapters 9 and 12).

    `gid` is the port's address; `lid` is the port's address within an InfiniBand subnet, 0 on Ethernet; `mtu` is in
    bytes. The peer writes to the region with `rkey` and `address` (64 bits, hexadecimal).
    """

    qpn: Annotated[int, wire.integer(2**24 - 1)]
    psn: Annotated[int, wire.integer(2**24 - 1)]
    gid: Annotated[str, wire.hexadecimal(16)]
    lid: Annotated[int, wire.integer(2**16 - 1)]
    mtu: Annotated[int, wire.integer(4096, 256)]
    rkey: wire.U32
    address: Annotated[str, wire.hexadecimal(8)]


# An open link. The S-node sends a request, and the R-node answers with OK or ERROR of the same id.


class _Numbered(ControlMessage, frozen=True):
    id: wire.RequestId


class Free(_Numbered, frozen=True):
    """`handles` are (seq_index, tag) pairs."""

    handles: Annotated[list[tuple[wire.U32, wire.U32]], Meta(max_length=MAX_HANDLES)]


class Trim(_Numbered, frozen=True):
    seq_index: wire.U32
    tag: wire.U32
    length: wire.U32


class Fork(_Numbered, frozen=True):
    src: wire.U32
    src_tag: wire.U32
    dst: wire.U32
    dst_tag: wire.U32
    length: wire.U32


class Resize(_Numbered, frozen=True):
    """Ask for a lease of `n_pages` pages in all; the R-node comes as near as it can."""

    n_pages: wire.Count


class Receive(_Numbered, frozen=True):
    """Let the empty sequence hold `length` tokens, which another R-node may send once with `token`."""

    seq_index: wire.U32
    tag: wire.U32
    length: wire.Count
    token: wire.Hex32


class Push(_Numbered, frozen=True):
    """Send pages of a sequence to the R-node at `url`, for which `token` is valid; `first` to `length` as in PAGES. The
    answer comes once that R-node has them. Other requests are answered meanwhile."""

    seq_index: wire.U32
    tag: wire.U32
    first: wire.U32
    n_pages: wire.U32
    length: wire.U32
    url: wire.Url
    token: wire.Hex32


class Offer(_Numbered, frozen=True):
    """Let the end of a migration connection that presents `token` FETCH pages of a sequence, until it is freed."""

    seq_index: wire.U32
    tag: wire.U32
    token: wire.Hex32


class Keep(_Numbered, frozen=True):
    """`sequences` are (seq_index, tag, key) triples. Whoever knows the key of a sequence may ADOPT it, also for some
    seconds after this link has ended. A key of null takes the key away; so does FREE."""

    sequences: Annotated[list[tuple[wire.U32, wire.U32, wire.Hex32 | None]], Meta(max_length=MAX_KEYS)]


class Find(_Numbered, frozen=True):
    """Ask whether a sequence of any link has this key, at least `length` tokens, and pages as those of this link. OK
    means yes."""

    key: wire.Hex32
    length: wire.Count


class Adopt(_Numbered, frozen=True):
    """Let the empty sequence have the first `length` tokens of the sequence that FIND finds, whose key is void then.
    The answer comes once they are copied. Other requests are answered meanwhile."""

    seq_index: wire.U32
    tag: wire.U32
    length: wire.Count
    key: wire.Hex32


class Stats(_Numbered, frozen=True):
    pass


class PingMessage(_Numbered, frozen=True):
    pass


class Ok(_Numbered, frozen=True):
    """`stats` answers STATS and RESIZE, and is null otherwise; but an R-node that is about to end answers a PING with
    the counter `leaving`, which is 1. The answers to PAGES and NEXT have `id` 0."""

    stats: dict[str, Annotated[int, Meta(ge=0)]] | None


class ErrorMessage(_Numbered, frozen=True):
    """`status` is an fd_status_t of region/region.h. With `id` 0 the message answers no request: it ends the link."""

    status: wire.U32
    message: wire.Sentence


Question = HelloMessage | Attach | Probe | Deliver | Entrust
HandShake = Challenge | Question | Welcome | Attached | Accepted | RefusedMessage
Request = Free | Trim | Fork | Receive | Push | Offer | Keep | Find | Adopt | Resize | Stats | PingMessage
Message = HandShake | EndpointMessage | Pages | Next | Fetch | PromptMessage | Request | Ok | ErrorMessage

_KINDS: dict[str, type[Message]] = {kind.TYPE: kind for kind in get_args(Message)}


def encode(message: ControlMessage) -> bytes:
    """The message as JSON with sorted keys. Equal messages give equal bytes, so a MAC can cover them."""
    fields = {"type": message.TYPE} | msgspec.to_builtins(message)
    for part in _PARTS:
        fields |= fields.pop(part, {})
    return orjson.dumps({_WIRE_NAMES.get(name, name): v for name, v in fields.items()}, option=orjson.OPT_SORT_KEYS)


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
    names = _wire_names(kind)
    # The version is checked before the fields, because another version's message may have other fields.
    if "version" in names and fields.get("version") != PROTOCOL_VERSION:
        raise VersionMismatch(fields.get("version"))
    for name in fields.keys() ^ names:
        raise ProtocolError(f"{kind.TYPE}: {'unknown' if name in fields else 'missing'} field {_show(name)}")
    values = fields | {name: fields[wired] for name, wired in _WIRE_NAMES.items() if wired in fields}
    try:
        # Every part finds its fields beside the message's own, and leaves the others alone.
        inner = values | dict.fromkeys(_PARTS, values)
        return msgspec.convert(values | dict.fromkeys(_PARTS, inner), kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{kind.TYPE}: {_on_the_wire(str(error))}") from None


def _on_the_wire(error: str) -> str:
    """An error of msgspec with the path that its field has on the wire."""
    error = _PARTS_OF_PATH.sub("", error)
    for name, wired in _WIRE_NAMES.items():
        error = error.replace(f"`$.{name}`", f"`$.{wired}`")
    return error


@functools.cache
def _wire_names(kind: Hashable) -> frozenset[str]:
    """The names of the fields that a message has on the wire."""
    names: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        if name in _PARTS:
            names |= _wire_names(hint)
        elif get_origin(hint) is not ClassVar:
            names.add(_WIRE_NAMES.get(name, name))
    return frozenset(names)


_repr = reprlib.Repr()
_repr.maxlevel = 3  # a peer's value may be nested deeper than Python's own repr can go
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def _show(value: object) -> str:
    text = _repr.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
