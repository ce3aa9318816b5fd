"""What the attention benchmark compares computes attention: the R-engine and every installed peer against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode.bench.attention_peers import PEERS, installed
from fastdecode.bench.roofline import Roofline
from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Data, Shape
from fastdecode.transports.base import KV_DTYPES

SHAPE = Shape(context=130, group=3, head_size=64, kv_heads=2)  # the last page or block is not full
KV_BYTES = 1 << 20
#: Largest error of an element of O for normally distributed K and V; a peer without the format uses a finer one.
ERROR = {"fp32": 5e-4, "fp16": 5e-3, "bf16": 1e-2, "int8": 2e-2, "int4": 2e-1}


def expected() -> np.ndarray:
    data = Data.of(SHAPE)
    q, k, v = (x.astype(np.float64) for x in (data.q, data.k, data.v))
    k, v = (np.repeat(x, SHAPE.group, axis=1) for x in (k, v))
    scores = np.einsum("hd,thd->ht", q, k) * SHAPE.head_size**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_r_engine_of_the_benchmark_attends_to_every_token_of_every_sequence(kv_dtype):
    ours = RPart(SHAPE, kv_dtype, KV_BYTES, [0], progress=False)
    try:
        for _ in range(2):  # the second call finds the cache as the first one did
            seconds, kv_bytes = ours.layer()
            assert seconds > 0 and kv_bytes == ours.kv_bytes
            np.testing.assert_allclose(ours.output() - expected(), 0, atol=ERROR[kv_dtype])
        seconds, kv_bytes = ours.layers_in_cache(3)
        assert seconds > 0 and kv_bytes == 3 * ours.kv_bytes
    finally:
        ours.close()


@pytest.mark.parametrize("kv_dtype", ERROR)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_attends_to_every_token_of_every_sequence(name, kv_dtype):
    if name not in installed():
        pytest.skip(f"{PEERS[name].module} is not installed")
    peer = PEERS[name](SHAPE, kv_dtype, KV_BYTES, 1)
    try:
        assert peer.layer() > 0
        assert peer.kv_bytes >= KV_BYTES
        np.testing.assert_allclose(peer.output() - expected(), 0, atol=ERROR[kv_dtype])
    finally:
        peer.close()


def test_the_roofline_counts_every_pass():
    roofline = Roofline(1 << 20, [0])
    try:
        assert roofline.gbps() > 0 and roofline.gbps(20) > 0
    finally:
        roofline.close()
