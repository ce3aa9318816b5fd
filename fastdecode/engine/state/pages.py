"""The pages of one lease, each counted once however many sequences share it.

A page may have users: running sequences. It may have idle sequences: ended ones in the prefix cache, and paused ones.
And it may have sequences whose FREE is not acknowledged yet. It counts as used if it has a user, else as evictable if
it has an idle sequence, else as being freed, and as free if it has no sequence. The R-node counts references in the
same way, but frees a page no later than this account does, so the account never shows more free pages than there are.

PAGE_TOKENS tokens of a sequence are a block. An R-node keeps the layers that see all tokens apart from the layers
of limited reach (sliding windows, chunked attention), so a block takes pages of both groups. A page of the second group
is given back when no later row sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from fastdecode.region.contract import PAGE_TOKENS, blocks_for


class PageGroup(NamedTuple):
    """Layers whose K and V of a block are taken and given back together."""

    size: int  # pages of the lease that a block takes
    reach: int  # most tokens that a token sees in these layers; 0: all
    most: int  # most blocks that a running sequence needs for itself; 2**32 without a reach

    def first_block(self, pos: int) -> int:
        """The first block that a row at `pos` sees."""
        return (pos - self.reach + 1) // PAGE_TOKENS if self.reach and pos >= self.reach else 0


_ENDLESS = 2**32


class PageGroups:
    """The groups of a model on an R-node, and how many pages they take."""

    def __init__(self, full: int = 1, limited: int = 0, reach: int = 0, step_rows: int = PAGE_TOKENS):
        """A block takes `full` pages for layers that see all tokens, and `limited` pages for layers that see `reach`
        tokens. `step_rows`: most rows of a step. A sequence gives pages back before it takes pages for a step."""
        most = blocks_for(reach + step_rows) + 1
        groups = PageGroup(full, 0, _ENDLESS), PageGroup(limited, reach, most)
        self.groups = tuple(group for group in groups if group.size)
        self.block = full + limited  # pages of a block

    def pages_for(self, tokens: int, shared: int = 0) -> int:
        """Free pages that a sequence of `tokens` tokens needs to start, if it shares the first `shared` tokens."""
        blocks = blocks_for(tokens) - min(shared, tokens) // PAGE_TOKENS
        return sum(group.size * min(blocks, group.most) for group in self.groups)

    def capacity(self, n_pages: int) -> int:
        """Tokens of the longest sequence that `n_pages` pages hold."""
        blocks, left, rest = 0, n_pages, self.block
        for group in sorted(self.groups, key=lambda group: group.most):  # beyond `most` blocks a group needs no more
            more = min(group.most - blocks, left // rest)
            blocks, left, rest = blocks + more, left - more * rest, rest - group.size
            if blocks < group.most:
                return blocks * PAGE_TOKENS
        return _ENDLESS


class Page:
    """The `size` pages of a block and group, and the number of their sequences of each kind."""

    __slots__ = ("freeing", "idle", "size", "users")

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.users, self.idle, self.freeing = 1, 0, 0

    @property
    def exclusive(self) -> bool:
        """True if one running sequence has it alone."""
        return self.users == 1 and not self.idle and not self.freeing


class PageTable:
    """The pages of a sequence: in each group, the pages of the blocks from `first` on."""

    __slots__ = ("by_group", "covered", "first", "floor", "groups")

    def __init__(self, groups: PageGroups | None = None) -> None:
        self.groups = (groups or PageGroups()).groups
        self.by_group: list[deque[Page]] = [deque() for _ in self.groups]
        self.first = [0] * len(self.groups)
        self.floor = 0  # no row will come at a position below it
        #: Tokens for which there are pages in all groups. A field, because every token of every sequence is compared
        #: with it; `count` updates it.
        self.covered = 0

    def __iter__(self) -> Iterator[Page]:
        return chain.from_iterable(self.by_group)

    @property
    def evictable(self) -> int:
        """The number of its pages that no running sequence uses."""
        return sum(page.size for page in self if not page.users)

    def __len__(self) -> int:
        """The number of pages."""
        return sum(group.size * len(pages) for group, pages in zip(self.groups, self.by_group, strict=True))

    def count(self) -> None:
        """Update `covered` after pages were put into the table or taken out of it."""
        self.covered = PAGE_TOKENS * min(
            first + len(pages) for first, pages in zip(self.first, self.by_group, strict=True)
        )

    def missing(self, tokens: int) -> list[int]:
        """The blocks of each group that are missing for `tokens` tokens."""
        blocks = blocks_for(tokens)
        counts = [blocks - first - len(pages) for first, pages in zip(self.first, self.by_group, strict=True)]
        return [n if n > 0 else 0 for n in counts]

    def lacking(self, tokens: int) -> int:
        """The pages that are missing for `tokens` tokens."""
        missing = self.missing(tokens)
        return sum([group.size * n for group, n in zip(self.groups, missing, strict=True)]) if any(missing) else 0

    def share(self, tokens: int) -> PageTable:
        """A table of the pages of the whole blocks within the first `tokens` tokens."""
        table = PageTable()
        table.groups, table.first, table.floor = self.groups, self.first[:], self.floor
        blocks = tokens // PAGE_TOKENS
        table.by_group = [
            deque(islice(pages, max(0, blocks - first))) for first, pages in zip(self.first, self.by_group, strict=True)
        ]
        table.count()
        return table

    def trim(self, tokens: int) -> list[Page]:
        """Take the pages that `tokens` tokens do not need out of the table, and return them."""
        trimmed = [
            pages.pop()
            for first, pages in zip(self.first, self.by_group, strict=True)
            for _ in range(max(0, first + len(pages) - blocks_for(tokens)))
        ]
        self.count()
        return trimmed

    def put_first(self, table: PageTable) -> None:
        """Take the pages of `table`, in the place of the blocks before the first one."""
        for i, pages in enumerate(table.by_group):
            self.first[i] -= len(pages)
            self.by_group[i].extendleft(reversed(pages))
            pages.clear()
        self.count()
        table.count()

    def unseen(self, pos: int) -> list[int]:
        """The number of pages of each group that no row from `pos` on sees."""
        return [
            max(0, min(len(pages), group.first_block(pos) - first))
            for group, first, pages in zip(self.groups, self.first, self.by_group, strict=True)
        ]

    def reusable(self, pos: int, tokens: int) -> int:
        """The number of pages missing for `tokens` tokens that PageBook.slide to `pos` would bring."""
        unseen = self.unseen(pos)
        n = 0
        for group, pages, gone, missing in zip(self.groups, self.by_group, unseen, self.missing(tokens), strict=True):
            n += group.size * min(missing, sum(page.exclusive for page in islice(pages, gone)))
        return n


class PageBook:
    """Counts the pages of a lease by state."""

    __slots__ = ("evictable", "free", "freeing")

    def __init__(self, n_pages: int):
        self.free = n_pages
        self.evictable = 0  # those of idle sequences alone
        self.freeing = 0  # pages whose FREE the R-node has not acknowledged

    def take(self, n: int, size: int = 1) -> list[Page]:
        """Free pages of `n` blocks for a running sequence, `size` for each. Raises ValueError if fewer are free."""
        if n * size > self.free:
            raise ValueError(f"{self.free} pages are free, not {n * size}")
        self.free -= n * size
        return [Page(size) for _ in range(n)]

    def extend(self, table: PageTable, blocks: Iterable[int]) -> None:
        """Take free pages for `blocks` more blocks of each group. Raises ValueError if fewer are free."""
        for group, pages, n in zip(table.groups, table.by_group, blocks, strict=True):
            pages.extend(self.take(n, group.size))
        table.count()

    def slide(self, table: PageTable, pos: int, tokens: int) -> list[Page]:
        """Take the pages that no row from `pos` on sees out of `table`, the table of a running sequence.

        Pages that only this sequence holds become its next pages, as many as it lacks for `tokens` tokens. Returns the
        others; the caller passes them to `freed` once the R-node has done the step that gives them back.
        """
        given_back: list[Page] = []
        for i, (n, wanted) in enumerate(zip(table.unseen(pos), table.missing(tokens), strict=True)):
            gone = [table.by_group[i].popleft() for _ in range(n)]
            table.first[i] += n
            reused = [page for page in gone if page.exclusive][:wanted]
            table.by_group[i].extend(reused)
            staying = set(reused)
            given_back += [page for page in gone if page not in staying]
        table.floor = pos
        table.count()
        self.release(given_back)
        return given_back

    def drop(self, table: PageTable, blocks: int) -> list[Page]:
        """Take the pages of the first `blocks` blocks out of the table of a running sequence whose layers see all
        tokens. Returns the pages; the caller passes them to `freed` once they are given back."""
        gone = [table.by_group[0].popleft() for _ in range(blocks - table.first[0])]
        table.first[0] = blocks
        table.count()
        self.release(gone)
        return gone

    def share(self, pages: Iterable[Page]) -> None:
        """One more running sequence uses `pages`."""
        for page in pages:
            if not page.users:
                if page.idle:
                    self.evictable -= page.size
                else:
                    self.freeing -= page.size
            page.users += 1

    def unshare(self, pages: Iterable[Page]) -> None:
        """A running sequence does not use `pages` after all: its R-node has refused to share them."""
        for page in pages:
            page.users -= 1
            if not page.users:
                self._settle(page)

    def make_idle(self, pages: Iterable[Page]) -> None:
        """A running sequence that uses `pages` has ended or is paused."""
        for page in pages:
            page.users -= 1
            page.idle += 1
            if not page.users:
                self.evictable += page.size

    def resume(self, pages: Iterable[Page]) -> None:
        """An idle sequence with `pages` runs again."""
        for page in pages:
            if not page.users:
                self.evictable -= page.size
            page.idle -= 1
            page.users += 1

    def release(self, pages: Iterable[Page]) -> None:
        """A running sequence that uses `pages` has ended, and a FREE will name it."""
        for page in pages:
            page.users -= 1
            page.freeing += 1
            if not page.users:
                self._settle(page)

    def evict(self, pages: Iterable[Page]) -> None:
        """An idle sequence with `pages` is dropped, and a FREE will name it."""
        for page in pages:
            page.idle -= 1
            page.freeing += 1
            if not page.users and not page.idle:
                self.evictable -= page.size
                self.freeing += page.size

    def freed(self, pages: Iterable[Page]) -> None:
        """The R-node has freed a sequence with `pages`."""
        for page in pages:
            page.freeing -= 1
            if not (page.freeing or page.users or page.idle):
                self.freeing -= page.size
                self.free += page.size

    def _settle(self, page: Page) -> None:
        """Count a page that no running sequence uses any more."""
        if page.idle:
            # A page of idle sequences counts once; `make_idle` has not counted it while it had users.
            self.evictable += page.size
        elif page.freeing:
            self.freeing += page.size
        else:
            self.free += page.size
