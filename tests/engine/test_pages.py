"""The account of shared pages, against R-nodes' own counting of references."""

from __future__ import annotations

import random

import pytest

from fastdecode.engine.state.pages import PageBook

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("seed", range(10))
def test_every_page_counts_once_in_the_state_of_its_firmest_holder(seed):
    """Random sequences that share, end, are idle, evicted and freed, against sets of pages."""
    rng, book, total = random.Random(seed), PageBook(200), 200
    running, idle, freeing = [], [], []
    for _ in range(2000):
        action = rng.random()
        if action < 0.35:
            source = rng.choice(running + idle) if running + idle and rng.random() < 0.7 else []
            shared = source[: rng.randint(0, len(source))]
            n = rng.randint(0, 8)
            if n > book.free:
                with pytest.raises(ValueError, match="pages are free"):
                    book.take(n)
                continue
            pages = [*shared, *book.take(n)]
            book.share(shared)
            if rng.random() < 0.1:  # the R-node refuses to share
                book.unshare(shared)
                pages = pages[len(shared) :]
            running.append(pages)
        elif action < 0.5 and running:
            book.make_idle(pages := running.pop(rng.randrange(len(running))))
            idle.append(pages)
        elif action < 0.6 and running:
            book.release(pages := running.pop(rng.randrange(len(running))))
            freeing.append(pages)
        elif action < 0.7 and idle:
            book.evict(pages := idle.pop(rng.randrange(len(idle))))
            freeing.append(pages)
        elif action < 0.9 and freeing:
            book.freed(freeing.pop(rng.randrange(len(freeing))))
        used, in_cache, going = ({page for pages in group for page in pages} for group in (running, idle, freeing))
        assert book.evictable == len(in_cache - used)
        assert book.freeing == len(going - used - in_cache)
        assert book.free == total - len(used | in_cache | going)
    assert total > book.free
