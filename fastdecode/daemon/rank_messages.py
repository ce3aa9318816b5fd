"""The messages between the S-node, which is rank 0, and the event loop of another rank, as MessagePack.

Both ends are of one version and trust each other, because the S-node starts the other ranks. The messages of steps are
those of fastdecode/spart/decoder/rank_steps.py.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec.msgpack import Decoder

from fastdecode.transports.rank_team import LinkFailure, Opened


class OpenLink(msgspec.Struct, array_like=True, tag=True):
    """Open a link like one of rank 0, for the heads of the rank. The other fields are those of Hello and Geometry."""

    number: int  # of the request
    link: int  # the number of the link from now on
    url: str | None  # None: to the rank's embedded R-node
    n_slots: int
    max_rows: int
    kv_dtype: str
    kv_bytes: int | None
    max_seqs: int


class CallLink(msgspec.Struct, array_like=True, tag=True):
    """Call a method of a link."""

    number: int
    link: int
    method: str
    arguments: tuple[Any, ...]


class Loaded(msgspec.Struct, array_like=True, tag=True):
    """The rank has its weights."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The rank cannot load its weights, or cannot go on, and ends."""

    how: str  # a sentence without its full stop


class Beat(msgspec.Struct, array_like=True, tag=True):
    """The rank lives."""


class RankAnswer(msgspec.Struct, array_like=True, tag=True):
    """The answer to the request `number`: an opened link, what the method has returned, or why it failed."""

    number: int
    value: bool | dict[str, int] | None = None
    opened: Opened | None = None
    failure: LinkFailure | None = None


class LinkEnded(msgspec.Struct, array_like=True, tag=True):
    """A link has ended; `failure` None: it was closed."""

    link: int
    failure: LinkFailure | None


ToRank: TypeAlias = OpenLink | CallLink
FromRank: TypeAlias = Loaded | Failed | Beat | RankAnswer | LinkEnded
TO_RANK: Decoder[ToRank] = Decoder(ToRank)
FROM_RANK: Decoder[FromRank] = Decoder(FromRank)
