"""Steps that the R-engine refuses, and serves on: nothing that a peer writes costs more than the peer's own step."""

from __future__ import annotations

import time

import numpy as np
import pytest
from attention.rengine_peer import KV_FP16, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS, POISON, ROW_ATTEND, ROW_TRIM, Status

pytestmark = pytest.mark.quick


@pytest.fixture
def link():
    """Sequence 0 has 5 tokens under tag 1, sequence 1 has a page full under tag 2; 4 pages in all."""
    engine = _native.REngine(2, 1 << 26)
    link = Link(engine, Geometry(n_slots=2, max_rows=PAGE_TOKENS, n_layers=2), n_pages=4)
    link.step(0, [(0, 5, True)])
    link.step(1, [(1, PAGE_TOKENS, False)])
    yield link
    link.close()
    engine.close()


def still_good(link: Link) -> None:
    """Assert that nothing has changed and that good calls are served in both slots."""
    assert link.lease.stats() | {"pages_used": 2, "seqs": 2} == link.lease.stats()
    link.step(0, [(0, 1, True), (1, 2, True)])
    link.step(1, [(0, 2, True)])


@pytest.mark.parametrize(
    ("counts", "reserved", "message"),
    [
        ((1, 0, 0), 0, "rows outside the slot"),
        ((1, PAGE_TOKENS + 1, 1), 0, "rows outside the slot"),
        ((1, 2**32 - 1, 1), 0, "rows outside the slot"),
        ((1, 1, 2), 0, "more attending rows than rows"),
        ((0, 1, 1), 0, "row table longer than the rows"),
        ((2, 1, 1), 0, "row table longer than the rows"),
        ((2**32 - 1, PAGE_TOKENS, 1), 0, "row table longer than the rows"),
        ((1, 1, 1, 0), 0, "layers beyond the model"),
        ((1, 1, 1, 3), 0, "layers beyond the model"),
        ((1, 1, 1, 2**32 - 1), 0, "layers beyond the model"),
        ((1, 1, 1), 7, "reserved field is not zero"),
    ],
)
def test_a_header_out_of_bounds(link, counts, reserved, message):
    link.table(0, link.entries([(0, 1, True)]))
    link.numbers[0] += 1
    link.header(0, link.numbers[0], *counts, reserved=reserved)
    link.ring_arm(0, link.numbers[0])
    verdict = link.verdict(0, link.numbers[0])
    assert (verdict.status, message in verdict.message) == (Status.BAD_CALL, True)
    still_good(link)


@pytest.mark.parametrize(
    ("rows", "status", "message"),
    [
        ([(8, 1, 0, 1, 0)], Status.BAD_TABLE, "entry 0: sequence 8 is outside the lease of 8"),
        ([(2**32 - 1, 1, 0, 1, 0)], Status.BAD_TABLE, "sequence 4294967295 is outside the lease"),
        ([(0, 1, 5, 1, 16)], Status.BAD_TABLE, "unknown flags 0x10"),
        ([(0, 1, 0, 1, ROW_TRIM)], Status.BAD_TABLE, "entry 0 trims its sequence to nothing"),
        ([(0, 1, 6, 1, ROW_TRIM)], Status.BAD_SEQUENCE, "entry 0: sequence 0 has 5 tokens, not 6"),
        ([(0, 1, 5, 1, 0, 9)], Status.BAD_TABLE, "reserved field is not zero"),
        ([(0, 1, 5, 0, 0)], Status.BAD_TABLE, "entry 0 has no rows"),
        (
            [(0, 1, 5, 1, 0), (1, 2, PAGE_TOKENS, 1, ROW_ATTEND)],
            Status.BAD_TABLE,
            "attends but follows an entry that does not",
        ),
        ([(0, 1, 5, 1, ROW_ATTEND), (0, 1, 6, 1, ROW_ATTEND)], Status.BAD_TABLE, "entry 1: sequence 0 is named twice"),
        ([(0, 7, 5, 1, 0)], Status.BAD_SEQUENCE, "entry 0: sequence 0 has tag 1, not 7"),
        ([(0, 1, 6, 1, 0)], Status.BAD_SEQUENCE, "entry 0: sequence 0 has 5 tokens, not 6"),
        ([(0, 1, 0, 1, 0)], Status.BAD_SEQUENCE, "entry 0: sequence 0 has 5 tokens, not 0"),
        ([(0, 1, 2**32 - 1, 1, 0)], Status.BAD_SEQUENCE, "sequence 0 has 5 tokens, not 4294967295"),
        ([(5, 9, 3, 1, 0)], Status.BAD_SEQUENCE, "entry 0: sequence 5 has 0 tokens, not 3"),
        (
            [(2, 3, 0, 1, 0), (3, 4, 0, 1, 0), (4, 5, 0, 1, 0)],
            Status.OUT_OF_PAGES,
            "needs 3 pages, but 2 of 4 are free",
        ),
    ],
)
def test_a_row_table_that_does_not_fit_the_lease(link, rows, status, message):
    link.table(0, rows)
    attend = sum(r[3] for r in rows if r[4] & ROW_ATTEND)
    reply = link.call(0, 0, len(rows), sum(r[3] for r in rows) or 1, attend, True)
    assert reply.status == status
    assert message in reply.message
    still_good(link)


@pytest.mark.parametrize("total", [(2, 1), (1, 0)])
def test_a_table_that_does_not_add_up_to_the_header(link, total):
    link.table(0, link.entries([(0, 1, True)]))
    reply = link.call(0, 0, 1, *total, True)
    assert reply.status == Status.BAD_TABLE
    assert f"adds up to 1 rows, 1 of them attending; the call says {total[0]} and {total[1]}" in reply.message
    still_good(link)


def test_row_counts_that_overflow_32_bits_when_added(link):
    link.table(0, [(0, 1, 5, 2**32 - 1, 0), (1, 2, PAGE_TOKENS, 3, 0)])
    reply = link.call(0, 0, 2, 2, 0, True)
    assert (reply.status, "adds up to 4294967298 rows" in reply.message) == (Status.BAD_TABLE, True)
    still_good(link)


def test_a_refused_step_has_no_layers(link):
    link.table(0, [(0, 99, 5, 1, ROW_ATTEND)])
    assert link.call(0, 0, 1, 1, 1, True).status == Status.BAD_SEQUENCE
    for word in (1, 2, 3, POISON, 2**32 - 1):
        link.ring_layer(0, word)
        time.sleep(0.01)
        assert link.layer_reply(0) == 0
    still_good(link)


@pytest.mark.parametrize("word", [3, POISON, 2**32 - 1])
@pytest.mark.parametrize("done", [0, 1])
def test_a_layer_beyond_the_model_poisons_the_step(link, word, done):
    step = link.begin(0, [(0, 2, True)])
    for layer in range(done):
        step.call(layer)
    if not done:
        assert link.arm(0, 1, 2, 2).status == Status.OK
    link.ring_layer(0, word)
    report = link.wait(0, 1 + done)
    assert (report.status, report.number) == (Status.BAD_CALL, link.numbers[0])
    assert (report.message, link.layer_reply(0)) == ("layer beyond the step", POISON)
    link.ring_layer(0, 1 + done)  # the step is over
    time.sleep(0.01)
    assert link.layer_reply(0) == POISON
    link.lease.trim(0, link.shadows[0].tag, 5)
    for kind in (link.shadows[0].k, link.shadows[0].v):
        kind[:] = [rows[:5] for rows in kind]
    still_good(link)


def test_a_step_of_fewer_layers_ends_with_its_last_one(link):
    step = link.begin(0, [(0, 2, True)])
    assert link.arm(0, 1, 2, 2, 1).status == Status.OK
    step.write(0)
    link.ring_layer(0, 1)
    report = link.wait(0, 1)
    assert (report.status, report.n_layers, report.number) == (Status.OK, 1, link.numbers[0])
    assert report.kv_bytes > 0
    link.ring_layer(0, 2)  # the step is over
    time.sleep(0.01)
    assert link.layer_reply(0) == 1
    link.table(0, [(0, link.shadows[0].tag, 7, 1, ROW_ATTEND)])
    assert link.arm(0, 1, 1, 1, 1).status == Status.OK
    link.ring_layer(0, 2)
    report = link.wait(0, 2)
    assert (report.status, report.message, link.layer_reply(0)) == (Status.BAD_CALL, "layer beyond the step", POISON)
    link.shadows.clear()


def test_a_word_that_jumps_gets_all_layers_up_to_it(link):
    """A device's word is compared with >=: the R-engine serves the next layer as long as the word is beyond it."""
    step = link.begin(0, [(0, 2, True)])
    link.arm(0, 1, 2, 2)
    step.first = False
    step.write(0)
    link.ring_layer(0, 2)
    assert link.wait(0, 2).n_layers == 2
    link.shadows.clear()  # both layers saw the same rows


@pytest.mark.parametrize("done", [0, 1])
def test_a_step_that_is_armed_replaces_one_that_is_unfinished(link, done):
    link.table(0, link.entries([(0, 1, True)]))
    assert link.arm(0, 1, 1, 1).status == Status.OK
    link.ring_layer(0, done)
    link.wait(0, done) if done else None
    link.lease.trim(0, link.shadows[0].tag, 5)
    still_good(link)


def test_a_finished_step_ignores_its_word(link):
    link.step(0, [(0, 1, True)])
    for word in (0, 1, 2, 3, 2**32 - 1):
        link.ring_layer(0, word)
        time.sleep(0.01)
        assert link.layer_reply(0) == 2
    link.step(0, [(0, 1, True)])


@pytest.mark.parametrize(("bell", "number"), [(2, 2), (2**64 - 1, 2**64 - 1), (1, 2), (1, 0)])
def test_a_step_out_of_order_is_answered_and_its_bell_taken_for_the_last(link, bell, number):
    """`bell` and `number` are relative to the slot's last step."""
    last = link.numbers[0]
    bell, number = (last + bell) % 2**64, (last + number) % 2**64
    link.table(0, link.entries([(0, 1, True)]))
    link.header(0, number, 1, 1, 1)
    link.ring_arm(0, bell)
    verdict = link.verdict(0, bell)
    assert (verdict.status, verdict.number) == (Status.BAD_CALL, bell)
    assert f"but step {last + 1} was expected" in verdict.message
    link.numbers[0] = bell
    still_good(link)


def test_running_out_of_pages_changes_nothing(link):
    link.fill(2, PAGE_TOKENS, slot=1)
    link.step(1, [(3, PAGE_TOKENS - 4, True)])
    before = link.lease.stats()
    plan = [(0, 1, True), (3, 4, True), (1, 1, True), (4, 1, False)]  # two would fit
    link.table(0, link.entries(plan))
    del link.shadows[4]
    reply = link.call(0, 0, 4, 7, 6, True)
    assert (reply.status, reply.message) == (Status.OUT_OF_PAGES, "the step needs 2 pages, but 0 of 4 are free")
    after = link.lease.stats()
    assert (after["pages_used"], after["seqs"]) == (before["pages_used"], before["seqs"])
    link.step(0, [(0, 1, True), (3, 4, True)])
    link.forget(2)
    link.step(0, [(1, 1, True), (0, 1, True)])


def test_a_sequence_longer_than_the_lease(link):
    link.forget(1)
    link.fill(0, 4 * PAGE_TOKENS - 5)
    link.table(0, link.entries([(0, 1, True)]))
    reply = link.call(0, 0, 1, 1, 1, True)
    assert (reply.status, reply.message) == (
        Status.OUT_OF_PAGES,
        "entry 0: sequence 0 would hold 5 pages, but the lease has 4",
    )


def test_nan_stays_in_its_own_rows(link):
    """NaN and infinity in one sequence's rows leave the others' answers alone, also in pages that are used again."""
    link.table(0, [(2, 50, 0, 64, ROW_ATTEND)])
    for layer in range(2):
        link.put_rows(0, np.full((64, 4, 16), np.nan), np.full((64, 4, 16), np.inf))
        reply = link.call(0, layer, 1, 64, 64, layer == 0)
        assert reply.status == Status.OK
    link.lease.free(2, 50)
    link.step(0, [(3, 10, True), (0, 1, True)])  # 3 gets the page that 2 had


def test_a_legal_call_that_would_keep_the_others_waiting_for_minutes():
    """1500 rows that see up to 1500 tokens, with 1024 heads of 256: more than 2^39 multiply-adds."""
    engine = _native.REngine(1, 1 << 28)
    large = Link(engine, Geometry(1, 1500, 1, n_q_heads=1024, n_kv_heads=1, head_size=256), KV_FP16, n_pages=32)
    other = Link(engine, Geometry())
    for rows, status in ((1500, Status.BAD_TABLE), (1449, Status.BAD_TABLE), (1, Status.OK)):
        large.table(0, [(0, 1, 0, rows, ROW_ATTEND)])
        reply = large.call(0, 0, 1, rows, rows, True)
        assert reply.status == status
        assert (f"{rows * rows} pairs" in reply.message and "at most 2097152" in reply.message) == (status != Status.OK)
    large.table(0, [(0, 1, 1, 1499, 0)])  # the limit is on attention, not on appending
    assert large.call(0, 0, 1, 1499, 0, True).status == Status.OK
    large.table(0, [(0, 1, 1500, 1, ROW_ATTEND)])
    assert large.call(0, 0, 1, 1, 1, True).status == Status.OK
    other.step(0, [(0, 3, True)])
    for link in (large, other):
        link.close()
    engine.close()
