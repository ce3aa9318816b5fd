"""The prefix cache's index of one R-node: sequences whose cached tokens other prompts may share.

An entry is a running sequence, with the tokens it was placed with, or an ended sequence whose pages were not freed. A
prompt that starts with an entry's tokens does not compute them again. Entries are found by the hashes of whole KV pages
and then compared token by token, so a hash collision cannot share wrong tokens. When pages are needed, the entry used
longest ago is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from fastdecode.region.contract import PAGE_TOKENS

#: At most this many entries that share a page are compared token by token, the newest ones.
_MAX_CANDIDATES = 64


class Handle(NamedTuple):
    """A sequence as its R-node knows it."""

    seq_index: int  # sequence index within the R-node's lease
    tag: int  # how often that index was given out, modulo 2^32


class CachedSequence(NamedTuple):
    """A sequence on an R-node, and the pages that a FREE of it gives back: 0 while it runs."""

    handle: Handle
    pages: int


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A sequence whose cached tokens other prompts may share.

    A running sequence still writes into its last page, so only its whole pages are shared.
    """

    cached: CachedSequence
    tokens: list[int]  # cached on the R-node, or about to be while `computed` is False
    hashes: list[int]  # page_hashes(tokens)
    salt: str = ""  # of `hashes`
    pins: int = 0  # FORKs from this entry in progress; a pinned entry is not evicted
    running: bool = False
    computed: bool = True


def page_hashes(tokens: list[int], salt: str = "") -> list[int]:
    """One hash for each whole page of `tokens`; it covers `salt` and all tokens from the first one to the end of that
    page. Only hashes of one salt are equal, so prompts with different salts share nothing."""
    hashes, last = [], hash(salt)
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        last = hash((last, tuple(tokens[end - PAGE_TOKENS : end])))
        hashes.append(last)
    return hashes


class PrefixIndex:
    """All prefix entries of one R-node, in order of last use."""

    def __init__(self) -> None:
        self.pages = 0  # pages that eviction of all entries would free
        self._entries: OrderedDict[PrefixEntry, None] = OrderedDict()  # the one used longest ago first
        self._by_page: dict[int, list[PrefixEntry]] = {}  # page hash -> entries with that page, the newest last

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: PrefixEntry | None) -> bool:
        return entry in self._entries

    def match(self, tokens: list[int], hashes: list[int], computed: bool = True) -> tuple[PrefixEntry, int] | None:
        """Find the entry that shares the most leading tokens with a prompt; returns it and the number of them.

        `hashes` are page_hashes of the prompt (or of its beginning). `computed` True looks among entries whose tokens
        are cached, False among those that are still being prefilled. The number is at least PAGE_TOKENS and at most
        len(tokens) - 1, because the last token of a prompt must be computed for its logits. None: no entry shares a
        whole page.
        """
        best = None
        for n_pages in range(len(hashes), 0, -1):
            n_whole = n_pages * PAGE_TOKENS
            if best and best[1] >= n_whole + PAGE_TOKENS:
                break
            candidates = [e for e in self._by_page.get(hashes[n_pages - 1], ()) if e.computed == computed]
            if not candidates:
                continue
            newest_first = reversed(candidates[-_MAX_CANDIDATES:])
            shared = [(_shared_tokens(entry, tokens, n_whole), entry) for entry in newest_first]
            n, entry = max(shared, key=itemgetter(0))
            if n < PAGE_TOKENS or (best and n <= best[1]):
                continue
            if entry.tokens[:n_whole] == tokens[:n_whole]:  # else the hashes collided
                best = entry, n
        return best

    def touch(self, entry: PrefixEntry) -> None:
        """Make `entry` the one used last."""
        self._entries.move_to_end(entry)

    def insert(self, entry: PrefixEntry) -> None:
        """Add `entry` as the one used last."""
        self._entries[entry] = None
        self.pages += entry.cached.pages
        for page in entry.hashes:
            self._by_page.setdefault(page, []).append(entry)

    def mark_ended(self, entry: PrefixEntry, cached: CachedSequence, tokens: list[int]) -> None:
        """Turn a running sequence's entry into that of an ended one, whose `tokens` are cached in `cached.pages`."""
        self.remove(entry)
        entry.cached, entry.tokens, entry.hashes = cached, tokens, page_hashes(tokens, entry.salt)
        entry.running, entry.computed = False, True
        self.insert(entry)

    def remove(self, entry: PrefixEntry) -> CachedSequence:
        """Take `entry` out of the index; returns its sequence, whose pages the caller may free if it has ended."""
        del self._entries[entry]
        self.pages -= entry.cached.pages
        for page in entry.hashes:
            entries = self._by_page[page]
            entries.remove(entry)
            if not entries:
                del self._by_page[page]
        return entry.cached

    def least_recently_used(self) -> PrefixEntry | None:
        """The next entry to evict: the one used longest ago that is neither pinned nor running. None: there is none."""
        return next((entry for entry in self._entries if not (entry.pins or entry.running)), None)


def _shared_tokens(entry: PrefixEntry, tokens: list[int], n_whole: int) -> int:
    """How many leading tokens of a prompt `entry` can share, given that the first `n_whole` agree.

    At most PAGE_TOKENS - 1 more than `n_whole` can agree: another whole page would have matched by its hash.
    """
    n, limit = n_whole, min(len(entry.tokens), len(tokens))
    while n < limit and entry.tokens[n] == tokens[n]:
        n += 1
    n = min(n, len(tokens) - 1)
    return n - n % PAGE_TOKENS if entry.running else n
