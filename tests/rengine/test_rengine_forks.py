"""Forks and cuts of sequences: shared pages, and copies of the shared page that a step appends to."""

from __future__ import annotations

import pytest
from attention.rengine_peer import Geometry

from fastdecode.region.contract import PAGE_TOKENS, Status


@pytest.mark.quick
def test_fork_shares_pages_and_parts_from_them(links):
    link = links(Geometry(max_rows=200, n_layers=2), n_pages=8)
    link.fill(0, 2 * PAGE_TOKENS + 22)
    link.fork(0, 1, 2 * PAGE_TOKENS + 22)
    link.fork(0, 2, 2 * PAGE_TOKENS)
    assert link.lease.stats()["pages_used"] == 3  # the cut page is copied when it is appended to
    link.step(0, [(0, 1, True), (1, 2, True), (2, 3, True)])
    assert link.lease.stats()["pages_used"] == 5  # the last sequence that shares a page keeps it
    for _ in range(2):
        link.step(0, [(0, 1, True), (1, 2, True), (2, 3, True)])
    link.forget(0)
    link.step(1, [(1, 1, True), (2, 1, True)])
    link.forget(1)
    link.step(1, [(2, 1, True)])
    link.forget(2)
    assert link.lease.stats()["pages_used"] == 0


def test_a_shared_page_is_copied_before_it_is_appended_to(links):
    link = links(Geometry(max_rows=200, n_layers=2), n_pages=4)
    link.fill(0, 2 * PAGE_TOKENS)
    link.fork(0, 1, 2 * PAGE_TOKENS)
    link.trim(0, 2 * PAGE_TOKENS - 28)  # ends within a page that sequence 1 holds too
    link.step(0, [(0, 1, True), (1, 1, True)])
    link.step(0, [(0, 1, True), (1, 1, True)])
    assert link.lease.stats()["pages_used"] == 4


def test_an_abandoned_step_leaves_a_whole_copy_of_the_shared_page(links):
    """A step copies shared pages before its first layer, so a step that is given up has copied all layers."""
    link = links(Geometry(max_rows=64, n_layers=3), n_pages=8)
    link.fill(0, 40)
    link.fork(0, 1, 40)
    step = link.begin(0, [(1, 1, True)])
    step.call(1)
    link.trim(1, 40)
    link.step(0, [(0, 1, True)])
    for _ in range(2):
        link.step(1, [(0, 1, True), (1, 2, True)])
    link.forget(0)
    link.forget(1)
    assert link.lease.stats()["pages_used"] == 0


def test_a_step_cuts_a_sequence_before_it_appends(links):
    link = links(Geometry(max_rows=300, n_layers=2), n_pages=4)
    link.fill(0, PAGE_TOKENS - 2)
    for rows, kept in ((5, 3), (1, 1), (260, 2), (4, 0)):  # of the new rows, some pages beyond the cut
        link.step(0, [(0, rows, True)])
        link.cut(0, PAGE_TOKENS - 2 + kept)
        link.step(0, [(0, 1, True)])
        link.cut(0, PAGE_TOKENS - 2)
    link.step(0, [(0, 1, True)])
    assert link.lease.stats()["pages_used"] == 1


def test_a_cut_in_a_full_lease_uses_the_pages_that_it_frees(links):
    link = links(Geometry(max_rows=300, n_layers=1), n_pages=4)
    link.fill(0, 2 * PAGE_TOKENS)
    link.fill(1, 2 * PAGE_TOKENS)
    link.cut(1, 5)
    link.step(0, [(0, 1, True), (1, 3, True)])  # sequence 0 takes the page of sequence 1, which comes after it


def test_a_cut_leaves_forks_whole(links):
    link = links(Geometry(max_rows=300, n_layers=2), n_pages=6)
    link.fill(0, 200)
    link.fork(0, 1, 190)
    link.cut(0, 100)
    link.step(0, [(0, 150, True)])
    link.step(0, [(1, 1, True)])


def test_the_source_of_a_copy_is_free_once_the_step_is_armed(links):
    link = links(Geometry(n_slots=2, max_rows=128, n_layers=3), n_pages=3)
    link.fill(0, 40)
    link.fork(0, 1, 40)
    step = link.begin(0, [(1, 1, True)])
    step.call(0)
    link.forget(0)
    link.step(1, [(2, 40, False), (3, 40, False)])  # needs the page that sequence 1 was copied from
    step.call(1)
    step.call(2)
    link.step(1, [(1, 1, True), (2, 1, True), (3, 1, True)])


def test_sequences_that_do_not_fit_their_request_are_refused(links):
    link = links(Geometry(max_rows=128, n_layers=1), n_pages=3)
    link.fill(0, 2 * PAGE_TOKENS)
    tag = link.shadows[0].tag
    lease = link.lease
    with pytest.raises(ValueError, match=f"sequence 0 has tag {tag}, not 999"):
        lease.free(0, 999)
    with pytest.raises(ValueError, match="sequence 8 is outside the lease of 8"):
        lease.free(8, tag)
    with pytest.raises(ValueError, match="has 256 tokens and cannot be trimmed to 257"):
        lease.trim(0, tag, 257)
    with pytest.raises(ValueError, match="sequence 0 is not empty: it has 256 tokens"):
        lease.fork(0, tag, 0, 5, 10)
    with pytest.raises(ValueError, match="has 256 tokens and cannot share 257"):
        lease.fork(0, tag, 1, 5, 257)
    lease.free(5, 123)  # an empty one: nothing to do
    link.step(0, [(1, 1, True)])


def test_forks_that_fill_the_lease_are_served(links):
    """Four sequences share a cut page: with three pages free, all of them can go on in one step."""
    link = links(Geometry(max_rows=128, n_layers=2), n_pages=4)
    link.fill(0, 40)
    for seq_index in (1, 2, 3):
        link.fork(0, seq_index, 40)
    assert link.lease.stats()["pages_used"] == 1
    link.step(0, [(seq_index, 1, True) for seq_index in range(4)])
    assert link.lease.stats()["pages_used"] == 4
    link.forget(3)
    link.fork(0, 3, 41)
    link.fork(0, 4, 41)
    link.table(0, link.entries([(0, 1, True), (3, 1, True), (4, 1, True)]))
    reply = link.call(0, 0, 3, 3, 3, True)
    assert (reply.status, reply.message) == (Status.OUT_OF_PAGES, "the step needs 2 pages, but 1 of 4 are free")
    link.forget(4)
    link.step(0, [(0, 1, True), (3, 1, True)])  # the refused step has changed nothing
