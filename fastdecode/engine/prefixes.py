"""Sequences that have ended and whose cache is kept: a prompt that begins as one of them does not compute that again.

The book of one R-node. What is kept is found by its whole pages: the hash of a page is that of all tokens up to its
end, and tokens are compared before anything is shared. What was used longest ago goes first when its pages are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.transports.base import PAGE_TOKENS

#: Of those that share a page the newest are looked at more closely.
_CANDIDATES = 64


class Handle(NamedTuple):
    """A sequence that nobody runs any more as its R-node knows it, with the pages that FREE will give back."""

    index: int
    tag: int
    pages: int


@dataclass(slots=True, eq=False)
class Kept:
    """`tokens` are those that the R-node has cached; `hashes` of their whole pages."""

    handle: Handle
    tokens: list[int]
    hashes: list[int]
    pins: int = 0  # forks of it under way: it must not go


def page_hashes(tokens: list[int]) -> list[int]:
    """Of each whole page: of all tokens up to its end."""
    hashes, last = [], 0
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        last = hash((last, tuple(tokens[end - PAGE_TOKENS : end])))
        hashes.append(last)
    return hashes


class PrefixBook:
    """What one R-node keeps."""

    def __init__(self) -> None:
        self.pages = 0  # counted for it
        self._kept: OrderedDict[Kept, None] = OrderedDict()  # the one used longest ago first
        self._by_page: dict[int, list[Kept]] = {}  # hash of a page -> who has it, the newest last

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, kept: Kept) -> bool:
        return kept in self._kept

    def find(self, tokens: list[int], hashes: list[int]) -> tuple[Kept, int] | None:
        """Who shares most of the tokens, a page at the least, and how many: never the last, which is to be computed."""
        most = len(tokens) - 1
        for place in range(len(hashes), 0, -1):
            whole = place * PAGE_TOKENS
            have = self._by_page.get(hashes[place - 1], ())[-_CANDIDATES:]
            if not have:
                continue
            kept = max(reversed(have), key=lambda kept, whole=whole: _common(kept.tokens, tokens, whole))
            n = min(_common(kept.tokens, tokens, whole), most)
            if n >= PAGE_TOKENS and kept.tokens[:whole] == tokens[:whole]:  # else their hashes agree by accident
                return kept, n
        return None

    def touch(self, kept: Kept) -> None:
        self._kept.move_to_end(kept)

    def keep(self, kept: Kept) -> None:
        self._kept[kept] = None
        self.pages += kept.handle.pages
        for page in kept.hashes:
            self._by_page.setdefault(page, []).append(kept)

    def remove(self, kept: Kept) -> Handle:
        del self._kept[kept]
        self.pages -= kept.handle.pages
        for page in kept.hashes:
            have = self._by_page[page]
            have.remove(kept)
            if not have:
                del self._by_page[page]
        return kept.handle

    def oldest(self) -> Kept | None:
        """The one used longest ago of those that may go."""
        return next((kept for kept in self._kept if not kept.pins), None)


def _common(kept: list[int], tokens: list[int], whole: int) -> int:
    """How many tokens both begin with, if they do with `whole` of them. Not a page more: that would have a hash."""
    n = whole
    while n < len(kept) and n < len(tokens) and kept[n] == tokens[n]:
        n += 1
    return n
