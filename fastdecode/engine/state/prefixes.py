"""The prefix cache's index of one R-node: sequences whose cached tokens other prompts may share.

An entry is a running sequence, with the tokens it was placed with, or an ended sequence whose pages were not freed. A
prompt that starts with an entry's tokens does not compute them again. The index is a tree of whole KV pages: a node
stands for all tokens from the first one to the end of its page, and knows the entries that have them. A look-up goes
down one node for each page of the prompt. When pages are needed, the entry used longest ago is evicted first.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.engine.state.pages import PageTable
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.state.pages import Page

#: Of the entries that continue with the same token, this many, the newest, are compared token by token.
_MAX_CANDIDATES = 16

# With a secret key, no client can construct two prefixes of one hash; by chance it does not happen.
_KEY = secrets.token_bytes(32)


class Handle(NamedTuple):
    """A sequence as its R-node knows it."""

    seq_index: int  # sequence index within the R-node's lease
    tag: int  # how often that index was given out, modulo 2^32


class CachedSequence(NamedTuple):
    """A sequence on an R-node, and the pages that it holds there."""

    handle: Handle
    pages: Iterable[Page]


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A sequence whose cached tokens other prompts may share.

    A running sequence still writes into its last page, so only its whole pages are shared.
    """

    cached: CachedSequence
    tokens: list[int]  # the cached tokens of an ended sequence; empty while it runs
    hashes: list[bytes]  # page_hashes of its tokens, which are cached unless `computed` is False
    salt: str = ""  # the salt of `hashes`
    pins: int = 0  # FORKs from this entry in progress; a pinned entry is not evicted
    running: bool = False
    computed: bool = True
    floor: int = 0  # the fewest tokens that may be shared, because earlier pages were given back

    def share(self, tokens: int) -> PageTable:
        """The pages of the whole blocks within the first `tokens` tokens."""
        table = self.cached.pages
        assert isinstance(table, PageTable), "an entry is in the index, so its sequence has its pages"
        return table.share(tokens)


def page_hashes(tokens: list[int], salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
    """One hash for each whole page of `tokens`; it covers `salt` and all tokens from the first one to the end of that
    page. Only hashes of one salt are equal, so prompts with different salts share nothing.

    `known` are the hashes of the first pages, if they were computed before.
    """
    hashes = list(known)
    last = hashes[-1] if hashes else blake2b(salt.encode(errors="surrogatepass"), digest_size=16, key=_KEY).digest()
    for end in range((len(hashes) + 1) * PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        page = array("q", tokens[end - PAGE_TOKENS : end]).tobytes()
        last = blake2b(last + page, digest_size=16, key=_KEY).digest()
        hashes.append(last)
    return hashes


@dataclass(slots=True)
class _Node:
    """The entries that have all tokens up to the end of a page, each in the order of insertion."""

    prefilling: dict[PrefixEntry, None] = field(default_factory=dict)  # running, and not cached yet
    running: dict[PrefixEntry, None] = field(default_factory=dict)
    ended: dict[PrefixEntry, None] = field(default_factory=dict)
    ended_by_next: dict[int, dict[PrefixEntry, None]] = field(default_factory=dict)  # by their next token


class PrefixIndex:
    """All prefix entries of one R-node, in order of last use."""

    def __init__(self) -> None:
        self._running: dict[PrefixEntry, None] = {}
        self._ended: OrderedDict[PrefixEntry, None] = OrderedDict()  # the one used longest ago first
        # The tree, by the hash of the path: a node's parent is the node of the page before.
        self._nodes: dict[bytes, _Node] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter([*self._running, *self._ended])

    def __contains__(self, entry: PrefixEntry | None) -> bool:
        return entry in self._running or entry in self._ended

    def match(self, tokens: list[int], hashes: list[bytes], computed: bool = True) -> tuple[PrefixEntry, int] | None:
        """Find the entry that shares the most leading tokens with a prompt; returns it and the number of them.

        `hashes` are page_hashes of the prompt (or of its beginning). `computed` True looks among entries whose tokens
        are cached, False among entries in prefill. The number is at least PAGE_TOKENS and at most
        len(tokens) - 1, because the last token of a prompt must be computed for its logits. None: no entry shares a
        whole page.
        """
        path: list[_Node] = []
        for page in hashes:
            node = self._nodes.get(page)
            if node is None or not (node.running or node.ended if computed else node.prefilling):
                break
            path.append(node)
        best = None
        # The deepest node has the longest prefix. If that is the whole prompt, its last token must be computed, and an
        # ended sequence is better than a running one, which shares whole pages only: the node above may have one. Nodes
        # further up matter only if the entries of these two have given back pages.
        for depth in range(len(path), 0, -1):
            if best is not None and depth < len(path) - 1:
                break
            found = self._best(path[depth - 1], tokens, PAGE_TOKENS * depth, computed)
            if found is not None and (best is None or found[1] > best[1]):
                best = found
        return best

    def known_pages(self, hashes: list[bytes]) -> int:
        """How many leading pages of a prompt, whose page_hashes are `hashes`, some entry has or is to have."""
        return sum(1 for _ in takewhile(self._nodes.__contains__, hashes))

    def _best(self, node: _Node, tokens: list[int], n_whole: int, computed: bool) -> tuple[PrefixEntry, int] | None:
        """The entry of a node that shares the most tokens of a prompt, and their number; the first `n_whole` tokens
        agree. None: no entry of the node can share a page."""
        same_next = node.ended_by_next.get(tokens[n_whole], {}) if n_whole < len(tokens) else {}
        for entries in (same_next, node.ended, node.running) if computed else (node.prefilling,):
            best = None
            for entry in islice(reversed(entries), _MAX_CANDIDATES):
                n = _shared_tokens(entry, tokens, n_whole) if entries is same_next else n_whole
                n = min(n, len(tokens) - 1)
                if entry.running:
                    n -= n % PAGE_TOKENS
                if n >= max(PAGE_TOKENS, entry.floor) and (best is None or n > best[1]):
                    best = entry, n
                if best is not None and entries is not same_next:
                    break
            if best is not None:
                return best
        return None

    def touch(self, entry: PrefixEntry) -> None:
        """Make `entry` the one used last."""
        if not entry.running:
            self._ended.move_to_end(entry)

    def insert(self, entry: PrefixEntry) -> None:
        """Add `entry` as the one used last."""
        (self._running if entry.running else self._ended)[entry] = None
        for depth, page in enumerate(entry.hashes, 1):
            node = self._nodes.get(page)
            if node is None:
                node = self._nodes[page] = _Node()
            _kind(node, entry)[entry] = None
            if not entry.running and (at := depth * PAGE_TOKENS) < len(entry.tokens):
                node.ended_by_next.setdefault(entry.tokens[at], {})[entry] = None

    def mark_computed(self, entry: PrefixEntry) -> None:
        """Record that the tokens of a running sequence's entry are cached."""
        if not entry.computed:
            for page in entry.hashes:
                node = self._nodes[page]
                del node.prefilling[entry]
                node.running[entry] = None
            entry.computed = True

    def mark_ended(self, entry: PrefixEntry, cached: CachedSequence, tokens: list[int], floor: int = 0) -> None:
        """Turn a running sequence's entry into that of an ended one, whose `tokens` are cached in `cached.pages`."""
        self.remove(entry)
        entry.floor = floor
        entry.hashes = page_hashes(tokens, entry.salt, entry.hashes)
        entry.cached, entry.tokens = cached, tokens
        entry.running, entry.computed = False, True
        self.insert(entry)

    def remove(self, entry: PrefixEntry) -> CachedSequence:
        """Take `entry` out of the index. Returns its sequence; if it has ended, the caller may free the pages."""
        del (self._running if entry.running else self._ended)[entry]
        for depth, page in enumerate(entry.hashes, 1):
            node = self._nodes[page]
            del _kind(node, entry)[entry]
            if not entry.running and (at := depth * PAGE_TOKENS) < len(entry.tokens):
                next_token = entry.tokens[at]
                del node.ended_by_next[next_token][entry]
                if not node.ended_by_next[next_token]:
                    del node.ended_by_next[next_token]
            if not (node.ended or node.running or node.prefilling):
                del self._nodes[page]
        return entry.cached

    def least_recently_used(self) -> PrefixEntry | None:
        """The next entry to evict: the ended one used longest ago that is not pinned. None: there is none."""
        return next((entry for entry in self._ended if not entry.pins), None)


def _kind(node: _Node, entry: PrefixEntry) -> dict[PrefixEntry, None]:
    if entry.running:
        return node.running if entry.computed else node.prefilling
    return node.ended


def _shared_tokens(entry: PrefixEntry, tokens: list[int], n_whole: int) -> int:
    """How many leading tokens of a prompt `entry` has, given that the first `n_whole` agree."""
    n, limit = n_whole, min(len(entry.tokens), len(tokens))
    while n < limit and entry.tokens[n] == tokens[n]:
        n += 1
    return n
