"""The pages of one lease, each counted once however many sequences share it.

A page is held by the running sequences that use it, by sequences that are kept (ended ones in the prefix cache, and
paused ones), and by sequences whose FREE is not acknowledged yet. It is used, evictable or being freed, in this order,
as long as a sequence holds it that way, and free when none does. The R-node counts references in the same way, but lets
go of a page no later than this account does, so the account never shows more free pages than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Page:
    """How often a page is held, by kind of holder."""

    __slots__ = ("freeing", "kept", "users")

    def __init__(self) -> None:
        self.users, self.kept, self.freeing = 1, 0, 0


class PageBook:
    """Counts the pages of a lease by state."""

    __slots__ = ("evictable", "free", "freeing")

    def __init__(self, n_pages: int):
        self.free = n_pages
        self.evictable = 0  # held by kept sequences alone
        self.freeing = 0  # held only by sequences whose FREE is not acknowledged

    def take(self, n: int) -> list[Page]:
        """`n` free pages for a running sequence. Raises ValueError if fewer are free."""
        if n > self.free:
            raise ValueError(f"{self.free} pages are free, not {n}")
        self.free -= n
        return [Page() for _ in range(n)]

    def share(self, pages: Sequence[Page]) -> None:
        """One more running sequence uses `pages`."""
        for page in pages:
            if not page.users:
                self.evictable -= page.kept > 0
                self.freeing -= not page.kept
            page.users += 1

    def unshare(self, pages: Sequence[Page]) -> None:
        """A running sequence does not use `pages` after all: its R-node has not let it share them."""
        for page in pages:
            page.users -= 1
            if not page.users:
                self._settle(page)

    def keep(self, pages: Sequence[Page]) -> None:
        """A running sequence that uses `pages` has ended or is paused, and is kept until pages are needed."""
        for page in pages:
            page.users -= 1
            page.kept += 1
            self.evictable += not page.users

    def use(self, pages: Sequence[Page]) -> None:
        """A sequence that was kept with `pages` runs again."""
        for page in pages:
            self.evictable -= not page.users
            page.kept -= 1
            page.users += 1

    def release(self, pages: Sequence[Page]) -> None:
        """A running sequence that uses `pages` has ended, and a FREE will name it."""
        for page in pages:
            page.users -= 1
            page.freeing += 1
            if not page.users:
                self._settle(page)

    def evict(self, pages: Sequence[Page]) -> None:
        """A kept sequence with `pages` is dropped, and a FREE will name it."""
        for page in pages:
            page.kept -= 1
            page.freeing += 1
            if not page.users and not page.kept:
                self.evictable -= 1
                self.freeing += 1

    def freed(self, pages: Iterable[Page]) -> None:
        """The R-node has freed a sequence with `pages`."""
        for page in pages:
            page.freeing -= 1
            if not (page.freeing or page.users or page.kept):
                self.freeing -= 1
                self.free += 1

    def _settle(self, page: Page) -> None:
        """Count a page that its last user has left, and that counted for nothing but its users before."""
        if page.kept:
            # Each kept page without users counts once; `keep` has not counted it while it was used.
            self.evictable += 1
        elif page.freeing:
            self.freeing += 1
        else:
            self.free += 1
