"""Rows whose sequence lies here in part alone (FD_ROW_PARTIAL): their answers, and what they leave as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention.partial_rows import PARTIAL, check_partial_answers
from attention.rengine_peer import FP16, FP32, KV_ERROR, KV_FP16, KV_FP32, KV_INT4, KV_INT8, Geometry

from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, ROW_PARTIAL, ROW_TRIM, Status

pytestmark = pytest.mark.quick

G = Geometry(max_rows=4 * PAGE_TOKENS, n_layers=2, n_q_heads=6, n_kv_heads=2, head_size=32)
SINKS = np.random.default_rng(5).standard_normal((2, 6)).astype(np.float32)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("kv_dtype", "act"), [(KV_FP32, FP32), (KV_FP16, FP16), (KV_FP16, FP32), (KV_INT8, FP32), (KV_INT4, FP16)]
)
def test_answers_are_those_of_the_cached_tokens_without_sinks(links, kv_dtype, act, queries):
    """Beside a row of a sequence that lies here as a whole. The long one is shared by several threads."""
    g = Geometry(**{**G.__dict__, "act_dtype": act})
    link = links(g, kv_dtype, n_pages=64, threads=3, options={"sinks": SINKS})
    link.fill(0, 20 * PAGE_TOKENS)
    check_partial_answers(link, queries, KV_ERROR[kv_dtype] + 2e-3)


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ((128, 1, PARTIAL), {}, "two rows for each query"),
        ((128, 2, ROW_PARTIAL), {}, "a partial entry attends"),
        ((128, 2, PARTIAL | ROW_TRIM), {}, "a partial entry attends"),
        ((0, 2, PARTIAL), {}, "tokens to attend to"),
        ((128, 2, PARTIAL), {"windows": [0, 64]}, "layers have windows, ALiBi or an indexer"),
        (
            (128, 2, PARTIAL),
            {"options": {"slopes": np.ones(6, np.float32)}},
            "layers have windows, ALiBi or an indexer",
        ),
        ((64, 2, PARTIAL), {}, "has 128 tokens, not 64"),
    ],
)
def test_what_cannot_be_answered_is_refused(links, entry, options: dict[str, Any], message):
    link = links(G, n_pages=8, **options)
    link.fill(0, PAGE_TOKENS)
    pos, n, flags = entry
    link.table(1, [(0, link.shadows[0].tag, pos, n, flags)])
    reply = link.call(1, 0, 1, n, n if flags & ROW_ATTEND else 0, True)
    assert reply.status in (Status.BAD_TABLE, Status.BAD_SEQUENCE) and message in reply.message


def test_a_sequence_of_whole_pages_receives_more(links):
    """A fork of a prefix that grows. A sequence that ends within a page takes none."""
    link = links(G, n_pages=8)
    link.fill(0, PAGE_TOKENS)
    link.fill(2, PAGE_TOKENS + 1)
    link.lease.fork(0, link.shadows[0].tag, 1, 9, PAGE_TOKENS)
    link.lease.receive(1, 9, 3 * PAGE_TOKENS)
    assert link.lease.stats()["pages_used"] == 1 + 2 + 2
    assert link.lease.pages(1, 9)[0] == link.lease.pages(0, link.shadows[0].tag)[0]
    for wrong in ((2, link.shadows[2].tag, 4 * PAGE_TOKENS), (1, 8, 4 * PAGE_TOKENS), (1, 9, 3 * PAGE_TOKENS)):
        with pytest.raises(ValueError, match=r"is not empty|is to receive no tokens"):
            link.lease.receive(*wrong)
    with pytest.raises(MemoryError, match="pages, but"):
        link.lease.receive(1, 9, 7 * PAGE_TOKENS)
