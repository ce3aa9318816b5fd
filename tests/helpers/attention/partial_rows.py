"""Calls with rows whose sequence lies here in part alone (FD_ROW_PARTIAL), and what their answers should be."""

from __future__ import annotations

import numpy as np

from attention.rengine_peer import FP16, Link, attention
from fastdecode.region.contract import ROW_ATTEND, ROW_PARTIAL, Status

PARTIAL = ROW_ATTEND | ROW_PARTIAL
#: Every element of K and V of the rows.
ROW_VALUE = 1.5


def log_sum_exp(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """float64 [n, query heads] of q [n, query heads, d] and k [tokens, KV heads, d]."""
    scores = np.einsum("nhd,thd->nht", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)) * scale
    most = scores.max(axis=2)
    return most + np.log(np.exp(scores - most[..., None]).sum(axis=2))


def ask(link: Link, table: list[tuple[int, ...]], layer: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The O rows of a layer of a step of attending rows, and the same rows read as fp32, [rows, elements]."""
    n = len(q)
    link.table(0, table)
    elements = link.kv_row // (2 if link.g.act_dtype == FP16 else 4)
    link.put_rows(0, q.reshape(n, -1), np.full((n, elements), ROW_VALUE))
    reply = link.call(0, layer, len(table), n, n, layer == 0)
    assert reply.status == Status.OK, reply.message
    at = link.at(0) + link.o_at
    raw = np.frombuffer(link.map[at : at + n * link.o_row], "<f4").reshape(n, -1)
    return link.o_rows(0, n), raw


def check_partial_answers(link: Link, queries: int, error: float) -> None:
    """Ask `queries` partial queries of sequence 0 beside a row of a new sequence, which lies here as a whole."""
    link.fill(1, 70)
    used = link.lease.stats()["pages_used"]
    whole, part = link.shadows[1], link.shadows[0]
    n, (n_q, n_kv, size, _) = 1 + 2 * queries, link.g.heads
    table = [(1, whole.tag, whole.length, 1, ROW_ATTEND), (0, part.tag, part.length, 2 * queries, PARTIAL)]
    for layer in range(link.g.n_layers):
        q = link.rng.standard_normal((n, n_q, size)).astype(np.float16).astype(np.float64)
        o, raw = ask(link, table, layer, q)
        own = np.full((1, n_kv, size), ROW_VALUE)
        k, v = (np.concatenate([x[layer], own]) for x in (whole.k, whole.v))
        want = attention(q[:1], k, v, whole.length, 0, link.scale, **link.layer_options(layer))
        assert abs(o[0] - want.ravel()).max() < error
        k, v = part.k[layer], part.v[layer]
        for row in range(1, n, 2):
            want = attention(q[row : row + 1], k, v, part.length - 1, 0, link.scale)
            assert abs(o[row] - want.ravel()).max() < error
            assert abs(raw[row + 1, :n_q] - log_sum_exp(q[row : row + 1], k, link.scale).ravel()).max() < error
    assert link.lease.stats()["pages_used"] == used
    link.forget(1)
    link.step(0, [(0, 1, True)])  # which would be refused if the partial rows had been appended
