"""Links take turns: a long call of one does not hold up the calls of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from attention.rengine_peer import FP16, KV_FP16, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, Status

#: A call of this many attending rows of a new sequence takes as much work as is allowed.
LONGEST = 65536


@pytest.fixture(params=[1, 2, 3])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.REngine]:
    engine = _native.REngine(request.param, 1 << 30, spin_us=20)
    yield engine
    engine.close()


@pytest.fixture
def link_of(engine: _native.REngine) -> Iterator[Callable[..., Link]]:
    made: list[Link] = []

    def make(*args, **kwargs) -> Link:
        made.append(Link(engine, *args, **kwargs))
        return made[-1]

    yield make
    for link in made:
        link.close()


def longest_call(link: Link, slot: int) -> int:
    link.table(slot, [(slot, 1, 0, LONGEST, ROW_ATTEND)])
    return link.post(slot, 0, 1, LONGEST, LONGEST, True)


def test_short_calls_are_served_while_the_longest_legal_ones_are_worked_on(link_of: Callable[..., Link]) -> None:
    hog = link_of(Geometry(2, LONGEST, 1, 1, 1, 128, FP16), KV_FP16, n_pages=2 * LONGEST // PAGE_TOKENS, max_seqs=2)
    other = link_of(Geometry())
    bells = [longest_call(hog, slot) for slot in range(2)]
    for _ in range(30):
        other.step(0, [(0, 1, True), (1, 2, True)])
        other.step(1, [(2, 20, True), (3, 1, False)])
    assert [hog.layer_reply(slot) for slot in range(2)] == [0, 0]  # these take seconds
    hog.close()  # must not wait until they are done
    assert [hog.wait(slot, bells[slot]).status for slot in range(2)] == [Status.LINK_CLOSED] * 2
    other.step(0, [(0, 1, True)])


def test_calls_that_interrupt_each_other_give_the_same_bits_as_alone(link_of: Callable[..., Link]) -> None:
    """Each call takes many slices: some entries are cut between pages, some have many blocks of rows."""
    g = Geometry(1, 2048, 1, 8, 2, 64, FP16)
    links = [link_of(g, KV_FP16, n_pages=200, max_seqs=4) for _ in range(3)]
    table = [(0, 1, 12000, 1, ROW_ATTEND), (1, 1, 500, 1500, ROW_ATTEND), (2, 1, 0, 100, 0)]
    rng = np.random.default_rng(1)
    for link in links:
        for pos in range(0, 12000, 2000):
            link.put_rows(0, np.zeros(0), rng.standard_normal((2000, 4, 64)))
            link.table(0, [(0, 1, pos, 2000, 0)])
            assert link.call(0, 0, 1, 2000, 0, True).status == Status.OK
        link.table(0, [(1, 1, 0, 500, 0)])
        assert link.call(0, 0, 1, 500, 0, True).status == Status.OK
        link.put_rows(0, rng.standard_normal((1501, 8, 64)), rng.standard_normal((1601, 4, 64)))

    def call(link: Link) -> bytes:
        link.table(0, table)
        reply = link.call(0, 0, 3, 1601, 1501, True)
        assert reply.status == Status.OK, reply
        for seq_index, length in ((0, 12000), (1, 500)):
            link.lease.trim(seq_index, 1, length)
        link.lease.free(2, 1)
        return link.o_rows(0, 1501).tobytes()

    alone = [call(link) for link in links]
    together: list[list[bytes]] = [[], [], []]

    def repeat(i: int) -> None:
        together[i] = [call(links[i]) for _ in range(4)]

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [[o] * 4 for o in alone]


def test_a_link_with_many_slots_gets_no_more_than_one_with_one_slot(link_of: Callable[..., Link]) -> None:
    """Both ask for more than there is, in calls of equal length; the engine time that each has had stays close."""
    g = Geometry(16, 256, 1, 8, 1, 128, FP16)
    many, one = (link_of(g, KV_FP16, n_pages=320, max_seqs=16) for _ in range(2))
    for link in (many, one):
        for slot in range(16):
            link.table(slot, [(slot, 1, 0, 256, 0)])
            assert link.call(slot, 0, 1, 256, 0, True).status == Status.OK
            link.table(slot, [(slot, 1, 256, 256, ROW_ATTEND)])

    def begin(link: Link, slot: int) -> int:
        return link.post(slot, 0, 1, 256, 256, True)

    bells = {(link, slot): begin(link, slot) for link in (many, one) for slot in range(16 if link is many else 1)}
    served = {many: 0, one: 0}
    while min(served.values()) < 100 and sum(served.values()) < 2000:
        for many_slot in range(16):
            for link, slot in ((many, many_slot), (one, 0)):  # `one` must not lack a call while 16 are begun anew
                if link.layer_reply(slot) == bells[link, slot]:
                    served[link] += 1
                    link.lease.trim(slot, 1, 256)
                    bells[link, slot] = begin(link, slot)
    for (link, slot), bell in bells.items():
        assert link.wait(slot, bell).status == Status.OK
    assert served[one] >= 100 and served[many] < 6 * served[one], served
