"""A lease of 100,000 sequences of a page each."""

from __future__ import annotations

import numpy as np
from attention.rengine_peer import KV_INT8, Geometry, Peer, Reply

from fastdecode.kernels import _native
from fastdecode.region._native import init_region_header
from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, SLOT_BYTES, Status

SEQUENCES = 100_000
ROWS = 50_000


def test_100000_sequences_of_a_page_each():
    """All are filled, attended to, forked, freed and filled again; each O row is the V of its own sequence.

    A sequence has one token when it attends to itself and that token, with equal K, so O is the mean of two V rows.
    """
    g = Geometry(n_slots=1, max_rows=ROWS, n_layers=1, n_q_heads=1, n_kv_heads=1, head_size=8)
    engine = _native.REngine(2, 1 << 30, spin_us=20)
    peer = Peer(g)
    init_region_header(peer.map, g.tuple())
    lease = engine.add_link(
        peer.map, g.tuple(), KV_INT8, 1, 2 * SEQUENCES, 1.0, [0], None, SEQUENCES + SEQUENCES // PAGE_TOKENS
    )
    peer.wake_fd = lease.eventfd
    try:
        lease.grow(SEQUENCES)

        def step(first: int, pos: int, attend: bool, tag: int, value: float) -> Reply:
            """One token for each of ROWS sequences, from `first` on; all elements of V are `value` + the sequence."""
            table = np.zeros(ROWS, ROW_DTYPE)
            table["seq_index"] = np.arange(first, first + ROWS)
            table["tag"], table["pos"], table["n_rows"], table["flags"] = tag, pos, 1, ROW_ATTEND * attend
            peer.put(peer.at(0) + SLOT_BYTES, table.tobytes())
            kv = np.zeros((ROWS, 2, 8), np.float32)
            kv[:, 1] = value + np.arange(first, first + ROWS)[:, None]
            peer.put(peer.at(0) + peer.kv_at, kv.tobytes())
            peer.put(peer.at(0) + peer.q_at, bytes(ROWS * 32))
            return peer.call(0, 0, ROWS, ROWS, ROWS * attend, True)

        for tag in (1, 2):
            for first in range(0, SEQUENCES, ROWS):
                assert step(first, 0, False, tag, 0).status == Status.OK
            stats = lease.stats()
            assert (stats["seqs"], stats["pages_used"], stats["pages_total"]) == (SEQUENCES,) * 3
            for first in range(0, SEQUENCES, ROWS):
                assert step(first, 1, True, tag, 10).status == Status.OK
                o = np.frombuffer(peer.map, np.float32, ROWS * 8, peer.at(0) + peer.o_at).reshape(ROWS, 8)
                want = np.arange(first, first + ROWS)[:, None] + 5.0
                np.testing.assert_allclose(o, np.repeat(want, 8, 1), rtol=0.01, atol=0.2)
            for index in range(SEQUENCES):
                lease.fork(index, tag, SEQUENCES + index, tag, 2)
            assert lease.stats()["seqs"] == 2 * SEQUENCES
            assert step(SEQUENCES, 2, False, tag, 0).status == Status.OUT_OF_PAGES  # each would need a copy of its own
            for index in range(2 * SEQUENCES):
                lease.free(index, tag)
            stats = lease.stats()
            assert (stats["seqs"], stats["pages_used"]) == (0, 0)
    finally:
        lease.close()
        engine.close()
