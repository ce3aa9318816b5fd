"""Sequences whose cache others may begin with: a prompt that begins as one of them does not compute that again.

The book of one R-node. In it are sequences that run, with what they had been given when they were placed, and those
that have ended and whose cache is kept. They are found by whole pages: the hash of a page is that of all tokens up to
its end, and tokens are compared before anything is shared. What was used longest ago goes first when pages are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from fastdecode.transports.base import PAGE_TOKENS

#: Of those that share a page the newest are looked at more closely.
_CANDIDATES = 64


class Handle(NamedTuple):
    """A sequence as its R-node knows it, with the pages that FREE will give back: none as long as it runs."""

    index: int
    tag: int
    pages: int


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """`tokens` are those that the R-node has cached, or will have once they are `computed`; `hashes` of whole pages.

    Of a sequence that runs only whole pages are shared: it goes on writing into its last.
    """

    handle: Handle
    tokens: list[int]
    hashes: list[int]
    pins: int = 0  # forks of it under way: it must not go
    running: bool = False
    computed: bool = True


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
        self._kept: OrderedDict[PrefixEntry, None] = OrderedDict()  # the one used longest ago first
        self._by_page: dict[int, list[PrefixEntry]] = {}  # hash of a page -> who has it, the newest last

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, kept: PrefixEntry) -> bool:
        return kept in self._kept

    def find(self, tokens: list[int], hashes: list[int], computed: bool = True) -> tuple[PrefixEntry, int] | None:
        """Who shares most of the tokens, a page at the least, and how many: never the last, which is to be computed.
        `computed` False: of those that are in work."""
        best = None
        for place in range(len(hashes), 0, -1):
            whole = place * PAGE_TOKENS
            if best and best[1] >= whole + PAGE_TOKENS:
                break
            have = [kept for kept in self._by_page.get(hashes[place - 1], ()) if kept.computed == computed]
            if not have:
                continue
            kept = max(reversed(have[-_CANDIDATES:]), key=lambda kept, whole=whole: _shared(kept, tokens, whole))
            n = _shared(kept, tokens, whole)
            if n < PAGE_TOKENS or (best and n <= best[1]):
                continue
            if kept.tokens[:whole] == tokens[:whole]:  # else their hashes agree by accident
                best = kept, n
        return best

    def touch(self, kept: PrefixEntry) -> None:
        self._kept.move_to_end(kept)

    def keep(self, kept: PrefixEntry) -> None:
        self._kept[kept] = None
        self.pages += kept.handle.pages
        for page in kept.hashes:
            self._by_page.setdefault(page, []).append(kept)

    def ended(self, kept: PrefixEntry, handle: Handle, tokens: list[int]) -> None:
        """One that ran does so no more; its cache is kept."""
        self.remove(kept)
        kept.handle, kept.tokens, kept.hashes = handle, tokens, page_hashes(tokens)
        kept.running, kept.computed = False, True
        self.keep(kept)

    def remove(self, kept: PrefixEntry) -> Handle:
        del self._kept[kept]
        self.pages -= kept.handle.pages
        for page in kept.hashes:
            have = self._by_page[page]
            have.remove(kept)
            if not have:
                del self._by_page[page]
        return kept.handle

    def oldest(self) -> PrefixEntry | None:
        """The one used longest ago of those that may go."""
        return next((kept for kept in self._kept if not (kept.pins or kept.running)), None)


def _shared(kept: PrefixEntry, tokens: list[int], whole: int) -> int:
    """How many tokens can be shared, if `whole` of them agree: less than a page more, for that would have a hash."""
    n, most = whole, min(len(kept.tokens), len(tokens))
    while n < most and kept.tokens[n] == tokens[n]:
        n += 1
    n = min(n, len(tokens) - 1)
    return n - n % PAGE_TOKENS if kept.running else n
