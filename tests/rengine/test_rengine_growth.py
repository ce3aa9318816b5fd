"""Leases that grow: pages stay where they are, the budget holds, and memory is taken only for granted pages."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from attention import kernel_calls
from attention.arena_memory import (
    BIG,
    MIB,
    OS_PAGE,
    append,
    arena_bytes,
    faulted_in,
    faults,
    hugetlb_bytes,
    hugetlb_pages,
    link_of,
    until,
)
from attention.rengine_peer import KV_FP16, KV_FP32, KV_INT4, KV_INT8, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import MAX_PAGES, PAGE_TOKENS, ROW_ATTEND, Status

#: 64 KiB a page: 32 KiB in each of two layers.
SMALL = Geometry(n_slots=2, max_rows=512)


def pages_of(link: Link, seq_index: int) -> list[int]:
    return link.lease.pages(seq_index, link.shadows[seq_index].tag)


@pytest.mark.quick
@pytest.mark.parametrize("kv_dtype", [KV_FP32, KV_FP16, KV_INT4])
def test_sequences_go_on_over_each_growth_and_their_pages_do_not_move(kv_dtype):
    with link_of(3, max_pages=40, g=SMALL, kv_dtype=kv_dtype) as link:
        link.fill(0, 2 * PAGE_TOKENS + 5)
        for n_pages in (5, 11, 26, 40):
            before = pages_of(link, 0)
            link.lease.grow(n_pages)
            assert link.lease.stats()["pages_total"] == n_pages
            assert pages_of(link, 0) == before
            free = n_pages - link.lease.stats()["pages_used"]
            link.fill(0, free * PAGE_TOKENS)  # every new page can be had
            link.step(0, [(0, 1, True)])  # in the last, partly used page
        assert sorted(pages_of(link, 0)) == list(range(40))


def test_a_full_lease_refuses_a_step_and_takes_it_after_it_has_grown():
    with link_of(2, max_pages=4, g=SMALL) as link:
        link.fill(0, 2 * PAGE_TOKENS)
        entry = [(0, link.shadows[0].tag, 2 * PAGE_TOKENS, 1, ROW_ATTEND)]
        link.table(0, entry)
        assert link.call(0, 0, 1, 1, 1, True).status == Status.OUT_OF_PAGES
        link.lease.grow(3)
        link.step(0, [(0, 1, True)])


def test_growth_counts_against_the_budget_that_all_leases_share():
    engine = _native.REngine(1, 10 << 16, spin_us=20)
    first, second = (Link(engine, SMALL, KV_FP32, 2, max_pages=10) for _ in range(2))
    try:
        assert engine.kv_free == 6 << 16
        first.lease.grow(7)
        assert engine.kv_free == 1 << 16
        with pytest.raises(MemoryError, match="are free"):
            second.lease.grow(4)
        assert engine.kv_free == 1 << 16 and second.lease.stats()["pages_total"] == 2
        second.lease.grow(3)
        second.lease.grow(2)  # nothing to do
        assert second.lease.stats()["pages_total"] == 3
        first.close()
        second.lease.grow(10)
        assert engine.kv_free == 0
        second.close()
        assert engine.kv_free == 10 << 16
    finally:
        first.close()
        second.close()
        engine.close()


def test_limits_of_growth():
    with link_of(2, max_pages=4, g=SMALL) as link:
        with pytest.raises(MemoryError, match="may grow to 4 pages, not to 5"):
            link.lease.grow(5)
        assert link.lease.stats()["pages_total"] == 2
        with pytest.raises(ValueError, match="are not within"):
            Link(link.engine, SMALL, KV_FP32, 2, max_pages=MAX_PAGES + 1)
        link.lease.close()
        with pytest.raises(RuntimeError, match="closed"):
            link.lease.grow(3)
    with link_of(2, max_pages=0, g=SMALL) as link, pytest.raises(MemoryError, match="may grow to 2 pages, not to 3"):
        link.lease.grow(3)


@pytest.mark.parametrize("grows", [False, True])
def test_the_most_pages_of_a_budget_fit_and_one_more_does_not(grows):
    """The page's share of a layer is not a multiple of an OS page, so layers that lie apart have some waste."""
    g = Geometry(n_layers=5, n_q_heads=1, n_kv_heads=1, head_size=24)
    engine = _native.REngine(1, 1_000_000, spin_us=20)
    n = engine.pages_within(g.tuple(), KV_INT4, 1_000_000, grows)
    try:
        with pytest.raises(MemoryError):
            Link(engine, g, KV_INT4, n + 1, max_pages=grows * 1000)
        link = Link(engine, g, KV_INT4, n, max_pages=grows * 1000)
        assert engine.kv_free < _native.page_bytes(g.tuple(), KV_INT4) + grows * 5 * 4096
        link.close()
    finally:
        engine.close()


@pytest.mark.parametrize("huge_pages", ["madvise", "off"])
def test_only_granted_pages_take_memory(huge_pages):
    """Without a limit at the end of each layer's pages, a huge page would reach beyond them."""
    g = Geometry(n_slots=1, max_rows=512, n_layers=8)  # 32 KiB a page and layer: 2 MiB are 64 pages
    flag = "hg" if huge_pages == "madvise" else "nh"
    # Once 2 MiB of a layer are granted, the kernel's khugepaged may at any time make one huge page of those in use.
    most_collapsed = 8 if huge_pages == "madvise" else 0
    gc.collect()
    before = arena_bytes(flag)
    with link_of(9, max_pages=1000, g=g, huge_pages=huge_pages) as link:
        assert arena_bytes(flag) == before
        append(link, 0, 9 * PAGE_TOKENS)
        assert arena_bytes(flag) - before == 9 * 8 * 32768
        link.lease.grow(100)
        collapsed, rest = divmod(arena_bytes(flag) - before - 9 * 8 * 32768, 2 * MIB - 9 * 32768)
        assert 0 <= collapsed <= most_collapsed and not rest
        append(link, 1, 91 * PAGE_TOKENS)
        assert arena_bytes(flag) - before == 100 * 8 * 32768


def test_new_pages_are_faulted_in_ahead_of_use():
    gc.collect()
    others = arena_bytes("nh")
    with link_of(9, max_pages=65, g=BIG, huge_pages="off", prefault=True) as link:
        until(lambda: faulted_in(link), "never faulted in")
        for n_pages in (10, 64, 65):  # 9 and 65 pages end with half of a part
            link.lease.grow(n_pages)
            assert link.lease.prefault[1] == n_pages * MIB
            until(lambda n_pages=n_pages: arena_bytes("nh") - others == n_pages * MIB, "never faulted in")
            until(lambda: faulted_in(link), "never faulted in")
        append(link, 0, 5 * PAGE_TOKENS)  # the engine's own tables and the region
        before = faults(engine=True)
        append(link, 1, 60 * PAGE_TOKENS)
        assert faults(engine=True) - before < 50


def test_a_retired_link_gives_memory_back_in_every_layer():
    """The layers lie apart, and none ends with a whole OS page."""
    g = Geometry(n_slots=1, max_rows=512, n_layers=5, n_q_heads=1, n_kv_heads=1, head_size=24)
    chunk = kernel_calls.chunk_bytes("int8", 24)
    assert 33 * chunk % OS_PAGE
    gc.collect()
    before = arena_bytes("nh")
    with link_of(11, max_pages=40, g=g, kv_dtype=KV_INT8, huge_pages="off") as link:
        append(link, 0, 11 * PAGE_TOKENS)
        link.lease.grow(33)
        append(link, 1, 22 * PAGE_TOKENS)
        assert arena_bytes("nh") - before >= 33 * 5 * chunk
        link.lease.retire([1])
        link.lease.shrink()
        assert 22 * 5 * chunk <= arena_bytes("nh") - before <= 22 * 5 * chunk + 5 * 2 * OS_PAGE
        link.lease.free(1, 1)
        link.lease.shrink()
        assert arena_bytes("nh") == before


def test_results_are_right_while_a_lease_grows_under_load():
    """Another thread grows the lease, a page at a time, while calls are served."""
    g = Geometry(n_slots=1, max_rows=64, n_layers=3, n_q_heads=4, n_kv_heads=2, head_size=64)
    with link_of(12, max_pages=400, g=g, huge_pages="off") as link:
        rng, stop = np.random.default_rng(3), threading.Event()

        def grow() -> None:
            for n_pages in range(13, 401):
                link.lease.grow(n_pages)
                stop.wait(0.001)

        thread = threading.Thread(target=grow)
        thread.start()
        steps = 0
        while thread.is_alive() or steps < 50:
            live = sorted(link.shadows)
            if len(live) > 4:
                link.forget(int(rng.choice(live)))
            chosen = rng.permutation(8)[:2]
            if all(link.shadows[s].length < 250 for s in chosen if s in link.shadows):
                link.step(0, [(int(s), int(rng.integers(1, 30)), True) for s in chosen])
            else:
                link.forget(int(chosen[0])) if int(chosen[0]) in link.shadows else None
            steps += 1
        thread.join()
        assert link.lease.stats()["pages_total"] == 400


@pytest.mark.parametrize("prefault", [False, True], ids=["lazy", "prefault"])
def test_a_lease_in_hugetlb_pages_grows_by_whole_ones(prefault):
    page = hugetlb_bytes()
    with hugetlb_pages(6):
        engine = _native.REngine(2, 6 * page, huge_pages="hugetlb", prefault=prefault)
        per_layer = page // (32 << 10)  # KV pages of SMALL in one hugetlb page
        link = Link(engine, SMALL, KV_FP32, 1, max_pages=10 * per_layer)
        try:
            assert engine.kv_free == 4 * page  # one for each layer
            link.lease.grow(per_layer)
            assert engine.kv_free == 4 * page
            link.fill(0, 200)
            link.lease.grow(3 * per_layer)
            assert engine.kv_free == 0
            with pytest.raises(MemoryError, match="are free"):
                link.lease.grow(3 * per_layer + 1)
            link.step(0, [(0, 30, True), (1, 1, True)])
            until(lambda: faulted_in(link), "never faulted in")
            assert arena_bytes("ht") == 6 * page if prefault else arena_bytes("ht") >= 2 * page
            link.close()
            assert engine.kv_free == 6 * page
        finally:
            link.close()
            engine.close()


def test_hugetlb_pages_that_others_have_taken_refuse_a_growth():
    page = hugetlb_bytes()
    with hugetlb_pages(4):
        engine = _native.REngine(1, 4 * page, huge_pages="hugetlb")
        per_layer = page // (32 << 10)
        link = Link(engine, SMALL, KV_FP32, 1, max_pages=10 * per_layer)
        try:
            with hugetlb_pages(-1), pytest.raises(MemoryError, match="huge pages of"):
                link.lease.grow(2 * per_layer)  # the first layer's page is there, the second one's is not
            assert engine.kv_free == 2 * page
            link.fill(0, 100)
            link.lease.grow(2 * per_layer)
            link.step(0, [(0, 30, True), (1, 1, True)])
        finally:
            link.close()
            engine.close()
