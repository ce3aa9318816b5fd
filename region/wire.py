"""The types of what nodes tell each other, with their ranges. An error of a field quotes the type's description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from .contract import ACT_DTYPES, KV_DTYPES, MAX_LAYERS, MAX_SECTIONS


def integer(high: int, low: int = 0) -> Meta:
    return Meta(ge=low, le=high, description=f"an integer within {low}..{high}")


def text(most: int) -> Meta:
    return Meta(max_length=most, description=f"a string of at most {most} characters")


def hexadecimal(n_bytes: int) -> Meta:
    return Meta(pattern=rf"^[0-9a-f]{{{2 * n_bytes}}}\Z", description=f"{2 * n_bytes} hexadecimal digits")


def one_of(names: Sequence[str]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z", description="one of " + ", ".join(names))


def list_of(most: int, items: str) -> Meta:
    return Meta(max_length=most, description=f"a list of at most {most} {items}")


U32S = f"integers within 0..{2**32 - 1}"
U32 = Annotated[int, integer(2**32 - 1)]
#: A number of something of which there is at least one.
Count = Annotated[int, integer(2**32 - 1, 1)]
Flag = Annotated[bool, Meta(description="true or false")]
#: Some JSON implementations do not represent integers above 2**53 exactly.
RequestId = Annotated[int, integer(2**53)]
Bytes = Annotated[int, integer(2**52)]  # 4 PiB
PageBytes = Annotated[int, integer(2**52, 1)]
#: A key, a nonce, a token, a digest or a MAC.
Hex32 = Annotated[str, hexadecimal(32)]
Name = Annotated[str, text(256)]
Url = Annotated[str, text(1024)]
Sentence = Annotated[str, text(4096)]
Base64 = Annotated[bytes, Meta(description="bytes in base64")]
#: A peer may write a whole number without a point. It stays an int, because proofs cover the message's bytes.
Positive = Annotated[
    Annotated[int, Meta(gt=0)] | Annotated[float, Meta(gt=0)], Meta(description="a finite number greater than 0")
]
_NotNegative = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Softcaps = Annotated[tuple[_NotNegative, ...], list_of(MAX_LAYERS, "finite numbers of at least 0")]
PerLayer = Annotated[tuple[U32, ...], list_of(MAX_LAYERS, U32S)]
ActDtype = Annotated[str, one_of(ACT_DTYPES)]
KvDtype = Annotated[str, one_of(KV_DTYPES)]
Isa = Annotated[str, text(32)]
Sections = Annotated[int, integer(MAX_SECTIONS)]
#: (query heads, KV heads, size of a Q or K head, size of a V or O head) of each layer.
HeadsPerLayer = Annotated[tuple[tuple[U32, U32, U32, U32], ...], list_of(MAX_LAYERS, f"quadruples of {U32S}")]
Part = Annotated[tuple[U32, U32], Meta(description=f"a pair of {U32S}")]
