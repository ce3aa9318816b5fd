"""Which pages a sequence gets: whole stretches while there are any, then single pages down to the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from attention.rengine_peer import KV_FP32, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS, Status

pytestmark = pytest.mark.quick

STRETCH = 8
SMALL = Geometry(n_slots=1, max_rows=4 * PAGE_TOKENS, n_layers=1, n_q_heads=1, n_kv_heads=1, head_size=8)


@pytest.fixture
def lease_of() -> Iterator:
    engine = _native.REngine(1, 1 << 30, spin_us=20)
    links: list[Link] = []

    def make(n_pages: int, g: Geometry = SMALL) -> Link:
        links.append(Link(engine, g, KV_FP32, n_pages, max_seqs=256))
        return links[-1]

    yield make
    for link in links:
        link.close()
    engine.close()


def grow(link: Link, seq_index: int, pages: int = 1) -> int:
    """Append whole pages of tokens to a sequence that ends with a full page, under tag 1. Returns the status."""
    at = len(link.lease.pages(seq_index, 1))
    link.table(0, [(seq_index, 1, at * PAGE_TOKENS, pages * PAGE_TOKENS, 0)])
    return link.call(0, 0, 1, pages * PAGE_TOKENS, 0, True).status


def jumps(pages: list[int]) -> int:
    return sum(b != a + 1 for a, b in itertools.pairwise(pages))


def grow_in_turns(link: Link, seq_indexes: list[int], pages: int, rng: np.random.Generator) -> None:
    for seq_index in rng.permutation(np.repeat(seq_indexes, pages)).tolist():
        assert grow(link, seq_index) == Status.OK


def test_sequences_that_grow_in_turns_keep_their_pages_side_by_side(lease_of):
    link, rng = lease_of(16 * 24), np.random.default_rng(0)
    grow_in_turns(link, list(range(16)), 24, rng)
    held = [link.lease.pages(seq_index, 1) for seq_index in range(16)]
    assert sorted(itertools.chain(*held)) == list(range(16 * 24))
    assert max(map(jumps, held)) <= 24 // STRETCH - 1


def test_a_cache_that_has_seen_many_sequences_come_and_go_still_has_whole_stretches(lease_of):
    link, rng = lease_of(40 * STRETCH), np.random.default_rng(1)
    for generation in range(20):
        seq_indexes = [seq_index for seq_index in range(8) if generation == 0 or rng.random() < 0.7]
        for seq_index in seq_indexes:
            link.lease.free(seq_index, 1)
        grow_in_turns(link, seq_indexes, 4 * STRETCH, rng)
    assert max(jumps(link.lease.pages(seq_index, 1)) for seq_index in range(8)) <= 3


def test_a_prompt_is_read_in_one_go(lease_of):
    link = lease_of(64)
    for _ in range(5):
        assert grow(link, 0, 4) == Status.OK
    assert jumps(link.lease.pages(0, 1)) == 0


def test_pages_that_are_large_come_one_by_one(lease_of):
    """A stretch is no more than a huge page of a layer: here a page is 4 MiB."""
    link = lease_of(
        6, Geometry(n_slots=1, max_rows=PAGE_TOKENS, n_layers=1, n_q_heads=32, n_kv_heads=32, head_size=128)
    )
    for seq_index in (0, 1, 0, 1, 0, 1):
        assert grow(link, seq_index) == Status.OK
    assert sorted(link.lease.pages(0, 1) + link.lease.pages(1, 1)) == list(range(6))
    assert jumps(link.lease.pages(0, 1)) == 2


@pytest.mark.parametrize("n_pages", [1, 7, 8, 9, 30, 41])
def test_the_last_page_is_given_however_scattered(lease_of, n_pages):
    link = lease_of(n_pages)
    for seq_index in range(n_pages):
        assert grow(link, seq_index) == Status.OK
    assert grow(link, n_pages) == Status.OUT_OF_PAGES
    free = [link.lease.pages(seq_index, 1)[0] for seq_index in range(0, n_pages, 2)]
    for seq_index in range(0, n_pages, 2):
        link.lease.free(seq_index, 1)
    for _ in free:
        assert grow(link, n_pages) == Status.OK
    assert sorted(link.lease.pages(n_pages, 1)) == sorted(free)
    assert grow(link, n_pages) == Status.OUT_OF_PAGES


def test_no_page_is_given_twice(lease_of):
    """Random appends, frees, forks and roll-backs in a full cache."""
    link, rng = lease_of(61), np.random.default_rng(2)
    shared = refused = 0
    for _ in range(2000):
        live = [seq_index for seq_index in range(12) if link.lease.pages(seq_index, 1)]
        seq_index, choice = int(rng.integers(12)), rng.random()
        pages = link.lease.pages(seq_index, 1)
        if choice < 0.8:
            refused += grow(link, seq_index) != Status.OK
        elif choice < 0.84:
            link.lease.free(seq_index, 1)
        elif choice < 0.92 and pages:
            link.lease.trim(seq_index, 1, PAGE_TOKENS * int(rng.integers(1, len(pages) + 1)))
        elif live and not pages:
            source = int(rng.choice(live))
            n = int(rng.integers(1, len(link.lease.pages(source, 1)) + 1))
            link.lease.fork(source, 1, seq_index, 1, n * PAGE_TOKENS)
            assert link.lease.pages(seq_index, 1) == link.lease.pages(source, 1)[:n]
            shared += n
        held: dict[int, int] = {}  # page -> its index, the same in all sequences that share it
        for other in range(12):
            mine = link.lease.pages(other, 1)
            assert len(set(mine)) == len(mine)
            for place, page in enumerate(mine):
                assert held.setdefault(page, place) == place and page < 61
        assert link.lease.stats()["pages_used"] == len(held)
    assert shared > 50 and refused > 100


def test_pages_of_a_sequence_that_does_not_exist(lease_of):
    link = lease_of(4)
    assert link.lease.pages(0, 1) == []
    assert grow(link, 0) == Status.OK
    with pytest.raises(ValueError, match="has tag 1, not 2"):
        link.lease.pages(0, 2)
    with pytest.raises(ValueError, match="outside the lease"):
        link.lease.pages(256, 1)
