"""Pages beyond the windows: which pages a sequence gives back, and that nobody can ask for them afterwards."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from attention.rengine_peer import KV_FP32, Geometry, Link, Shadow

from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, ROW_SLIDE, ROW_TRIM, Status

pytestmark = pytest.mark.quick

G = Geometry(n_slots=2, max_rows=3 * PAGE_TOKENS, n_layers=2)
FREED = 2**32 - 1  # the number of a page that was given back


def held(link: Link, seq_index: int) -> int:
    """Pages that a sequence still has."""
    return sum(page != FREED for page in link.lease.pages(seq_index, link.shadows[seq_index].tag))


def refused(link: Link, seq_index: int, pos: int, flags: int) -> str:
    """The message of the refusal of a one-row step."""
    link.table(1, [(seq_index, link.shadows[seq_index].tag, pos, 1, flags)])
    reply = link.call(1, 0, 1, 1, int(flags & ROW_ATTEND != 0), True)
    assert reply.status == Status.BAD_SEQUENCE
    return reply.message


@pytest.mark.parametrize("window", [1, 5, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS + 40])
def test_a_lease_of_a_window_holds_a_sequence_many_times_as_long(links, window):
    """A sequence needs the pages that its window touches and those of its new rows."""
    rows = 100
    pages = -(-(window + rows) // PAGE_TOKENS) + 1
    link = links(G, n_pages=pages, windows=[window, window])
    for i in range(10):
        link.slide(0)
        link.step(i % 2, [(0, rows, i % 3 != 0)])
        first = max(0, i * rows - window + 1) // PAGE_TOKENS
        assert held(link, 0) == -(-(i + 1) * rows // PAGE_TOKENS) - first <= pages
    link.forget(0)
    assert link.lease.stats()["pages_used"] == 0


def test_a_step_without_the_flag_gives_nothing_back(links):
    link = links(G, n_pages=8, windows=[4, 4])
    link.fill(0, 7 * PAGE_TOKENS)
    link.step(0, [(0, 1, True)])
    assert held(link, 0) == 8


def test_the_widest_window_and_segments_decide(links):
    """A layer that shares another's K and V counts for the layer that stores them."""
    options = {"segments": [0, 0, 300], "kv_layers": [0, 0, 2]}
    link = links(
        Geometry(max_rows=3 * PAGE_TOKENS, n_layers=3), n_pages=12, windows=[4, 2 * PAGE_TOKENS, 0], options=options
    )
    link.fill(0, 10 * PAGE_TOKENS)
    link.slide(0)
    link.step(0, [(0, 1, True)])
    assert held(link, 0) == 11 - (10 * PAGE_TOKENS - 299) // PAGE_TOKENS


def test_forks_keep_what_they_share(links):
    window = 200
    link = links(G, n_pages=16, windows=[window, window])
    link.fill(0, 5 * PAGE_TOKENS + 10)
    link.fork(0, 1, 5 * PAGE_TOKENS)
    link.fork(0, 2, 5 * PAGE_TOKENS + 3)
    link.slide(0)
    link.step(0, [(0, 2, True), (1, 1, True)])
    assert (held(link, 0), held(link, 1), held(link, 2)) == (3, 6, 6)
    link.step(1, [(1, 3, True), (2, 3, True)])
    link.slide(1, 2)
    link.step(0, [(1, 3, True), (2, 3, True)])
    link.fork(2, 3, 5 * PAGE_TOKENS + 6)
    link.step(0, [(0, 1, True), (3, 2, True)])
    for seq_index in range(4):
        link.forget(seq_index)
    assert link.lease.stats()["pages_used"] == 0


def test_nothing_below_the_floor_can_be_asked_for(links):
    at = 4 * PAGE_TOKENS
    link = links(G, n_pages=8, windows=[9, 9])
    link.fill(0, at)
    link.slide(0)
    link.step(0, [(0, 5, True)])
    tag = link.shadows[0].tag
    with pytest.raises(ValueError, match=f"cannot be trimmed below {at} tokens"):
        link.lease.trim(0, tag, at - 1)
    with pytest.raises(ValueError, match=f"cannot share fewer than {at} tokens"):
        link.lease.fork(0, tag, 1, 7, at - 1)
    assert "given back pages that a row at" in refused(link, 0, at - 1, ROW_ATTEND | ROW_TRIM)
    assert "given back pages that a row at" in refused(link, 0, at - 1, ROW_TRIM | ROW_SLIDE)
    link.fork(0, 1, at)  # a fork has the floor of its source
    with pytest.raises(ValueError, match="cannot be trimmed below"):
        link.lease.trim(1, link.shadows[1].tag, at - 1)
    link.cut(0, at)
    link.step(0, [(0, 2, True), (1, 2, True)])
    link.lease.trim(0, tag, 0)  # an empty sequence begins anew
    link.shadows.pop(0)
    link.step(0, [(0, 300, True)])


def test_a_refused_step_gives_nothing_back(links):
    link = links(G, n_pages=6, windows=[9, 9])
    link.fill(0, 4 * PAGE_TOKENS)
    link.fill(1, PAGE_TOKENS)
    table = [(seq, link.shadows[seq].tag, link.shadows[seq].length, 3 * PAGE_TOKENS, ROW_SLIDE) for seq in (0, 1)]
    link.table(0, [(*table[1][:4], 8), table[0]])
    assert link.call(0, 0, 2, 6 * PAGE_TOKENS, 0, True).status != Status.OK
    link.table(0, table)
    assert link.call(0, 0, 2, 6 * PAGE_TOKENS, 0, True).status != Status.OK
    assert (held(link, 0), held(link, 1)) == (4, 1)
    link.slide(0)
    link.step(0, [(0, 3 * PAGE_TOKENS, True)])  # in a full lease, with the pages that the step itself gives back


def test_random_steps_in_a_lease_that_is_always_full(links):
    rng, window = np.random.default_rng(5), 150
    link = links(G, n_pages=14, windows=[window, window])
    floors: dict[int, int] = {}
    forks = 0
    for i in range(120):
        live = sorted(link.shadows)
        seq_index = int(rng.integers(4))
        if seq_index in live and rng.random() < 0.05:
            link.forget(seq_index)
            floors.pop(seq_index)
            continue
        if seq_index not in live and live and rng.random() < 0.7:
            source = int(rng.choice(live))
            length = int(rng.integers(max(1, floors[source]), link.shadows[source].length + 1))
            link.fork(source, seq_index, length)
            floors[seq_index] = floors[source]
            forks += 1
        n = int(rng.integers(1, 60))
        link.slide(seq_index)
        floors[seq_index] = link.shadows[seq_index].length if seq_index in link.shadows else 0
        link.step(i % 2, [(seq_index, n, bool(rng.random() < 0.7))])
        assert held(link, seq_index) <= 4
    assert forks > 5 and max(link.shadows[seq].length for seq in link.shadows) > 6 * PAGE_TOKENS


def test_windowed_layers_give_back_pages_that_others_keep(links):
    """Five layers with a window and one without: a block takes a page for the latter, and five for the former."""
    window = 150
    windows = [window] * 3 + [0] + [window] * 2
    g = Geometry(max_rows=100, n_layers=6, n_q_heads=2, n_kv_heads=1, head_size=8)
    assert _native.page_sections(g.tuple(), KV_FP32, windows=windows) == (1, 5, window)
    assert _native.page_bytes(g.tuple(), KV_FP32, windows=windows) * 6 == _native.page_bytes(g.tuple(), KV_FP32)
    link = links(g, n_pages=32, windows=windows)
    for i in range(10):
        link.slide(0)
        link.step(i % 2, [(0, 100, i % 3 != 0)])
        first = max(0, i * 100 - window + 1) // PAGE_TOKENS
        blocks = -(-(i + 1) * 100 // PAGE_TOKENS)
        assert held(link, 0) == blocks + 5 * (blocks - first)
    link.fork(0, 1, 1000)
    link.forget(0)
    link.slide(1)
    link.step(0, [(1, 30, True)])
    link.fork(1, 2, 1005)
    link.step(1, [(2, 1, True)])  # the last page of each section is copied
    assert link.lease.stats()["pages_used"] == held(link, 1) + 6
    link.forget(1)
    link.forget(2)
    assert link.lease.stats()["pages_used"] == 0


@pytest.mark.parametrize(
    ("limited", "full", "sections"),
    [(12, 12, (1, 1)), (21, 21, (1, 1)), (29, 5, (1, 6)), (52, 10, (1, 4)), (0, 7, (1, 0)), (7, 0, (0, 1))],
)
def test_layers_are_divided_with_little_waste(limited, full, sections):
    """gpt-oss 20b, Gemma 2 9b, Gemma 3 4b and 27b, and models whose layers are alike."""
    g = Geometry(n_layers=limited + full)
    windows = [64] * limited + [0] * full
    assert _native.page_sections(g.tuple(), KV_FP32, windows=windows) == (*sections, 64 if limited else 0)
    block = sum(sections) * _native.page_bytes(g.tuple(), KV_FP32, windows=windows)
    assert 1 <= block / _native.page_bytes(g.tuple(), KV_FP32) < 1.06


def test_larger_layers_have_sections_of_their_own(links):
    """As in Gemma 4: the layers that see all tokens have heads of another number and size."""
    heads = [(4, 2, 16, 16), (4, 2, 16, 16), (4, 1, 32, 32)] * 2
    options = {"heads": heads, "kv_layers": [0, 1, 2, 3, 4, 2]}
    g = Geometry(n_slots=1, max_rows=60, n_layers=6, n_q_heads=4, n_kv_heads=2, head_size=32)
    link = links(g, n_pages=40, windows=[100, 100, 0] * 2, options=options)
    for _ in range(7):
        link.slide(0)
        link.step(0, [(0, 60, True)])
    assert held(link, 0) < len(link.lease.pages(0, link.shadows[0].tag))
    link.fork(0, 1, 400)
    link.slide(1)
    link.step(0, [(0, 20, True), (1, 20, True)])


def test_a_sequence_moves_with_all_sections_and_not_once_it_has_given_back_pages(links):
    windows = [150, 0, 150]
    g = Geometry(n_slots=1, max_rows=100, n_layers=3, n_q_heads=2, n_kv_heads=1, head_size=8)
    source, target = (links(g, n_pages=16, windows=windows) for _ in range(2))
    for _ in range(3):
        source.step(0, [(0, 100, True)])
    tag = source.shadows[0].tag
    block = 3 * _native.page_bytes(g.tuple(), KV_FP32, windows=windows)
    target.lease.receive(5, 9, 300)
    here, there = socket.socketpair()
    with here, there:
        sent = received = 0
        while received < 3 * block:
            if sent < 3 * block:
                sent += source.lease.send_pages(here.fileno(), 0, tag, 0, 3, sent)
            received += target.lease.receive_pages(there.fileno(), 5, 9, 0, 3, received)
        target.shadows[5] = Shadow(9, *source.shadows[0].cut(300))
        target.step(0, [(5, 40, True)])
        source.step(0, [(0, 100, True)])
        source.slide(0)
        source.step(0, [(0, 1, True)])
        with pytest.raises(ValueError, match="has given back pages and cannot be moved"):
            source.lease.send_pages(here.fileno(), 0, tag, 0, 1, 0)
