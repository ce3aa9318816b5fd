"""The types of what nodes tell each other, with their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from .contract import ACT_DTYPES, KV_DTYPES, MAX_LAYERS, MAX_SECTIONS


def integer(high: int, low: int = 0) -> Meta:
    return Meta(ge=low, le=high)


def hexadecimal(n_bytes: int) -> Meta:
    return Meta(pattern=rf"^[0-9a-f]{{{2 * n_bytes}}}\Z")


def one_of(names: Sequence[str]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


U32 = Annotated[int, integer(2**32 - 1)]
#: A number of something of which there is at least one.
Count = Annotated[int, integer(2**32 - 1, 1)]
#: Some JSON implementations do not represent integers above 2**53 exactly.
RequestId = Annotated[int, integer(2**53)]
Bytes = Annotated[int, integer(2**52)]  # 4 PiB
PageBytes = Annotated[int, integer(2**52, 1)]
#: A key, a nonce, a token, a digest or a MAC.
Hex32 = Annotated[str, hexadecimal(32)]
Name = Annotated[str, Meta(max_length=256)]
Url = Annotated[str, Meta(max_length=1024)]
Sentence = Annotated[str, Meta(max_length=4096)]
#: A peer may write a whole number without a point. It stays an int, because proofs cover the message's bytes.
Positive = Annotated[int, Meta(gt=0)] | Annotated[float, Meta(gt=0)]
_NotNegative = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Softcaps = Annotated[tuple[_NotNegative, ...], Meta(max_length=MAX_LAYERS)]
PerLayer = Annotated[tuple[U32, ...], Meta(max_length=MAX_LAYERS)]
ActDtype = Annotated[str, one_of(ACT_DTYPES)]
KvDtype = Annotated[str, one_of(KV_DTYPES)]
Isa = Annotated[str, Meta(max_length=32)]
Sections = Annotated[int, integer(MAX_SECTIONS)]
#: (query heads, KV heads, size of a Q or K head, size of a V or O head) of each layer.
HeadsPerLayer = Annotated[tuple[tuple[U32, U32, U32, U32], ...], Meta(max_length=MAX_LAYERS)]
Part = tuple[U32, U32]
