"""What a layer may do besides: soft-capping, sinks, segments, slopes, and K and V that layers share. Every O
row is compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
from rengine_peer import BF16, KV_FP16, KV_FP32, Geometry, Link

from fastdecode.kernels import _native
from fastdecode.region.contract import KV_DTYPES

ISAS = _native.isa_supported()
G = Geometry(n_slots=2, max_rows=256, n_layers=3, n_q_heads=6, n_kv_heads=2, head_size=64)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


OPTIONS = {
    "softcaps": {"softcaps": [0, 5.0, 0.7]},
    "sinks": {"sinks": floats(3, 6) * 3},
    "no sink in one layer": {"sinks": np.array([[2.0] * 6, [-np.inf] * 6, [5.0] * 6], np.float32)},
    "slopes": {"slopes": np.float32(2) ** -np.arange(1, 7, dtype=np.float32)},
    "segments": {"segments": [0, 100, 256]},
    "shared": {"kv_layers": [0, 0, 2]},
    "shared twice": {"kv_layers": [0, 0, 0]},
    "everything": {"softcaps": [3.0, 0, 9.0], "sinks": floats(3, 6), "segments": [300, 0, 129], "kv_layers": [0, 1, 1]},
}


@pytest.fixture
def engine_of():
    """A function that starts an engine; all are closed at the end, with their links."""
    made: list[tuple[_native.REngine, list[Link]]] = []

    def start(threads: int, isa: str | None = None) -> tuple[_native.REngine, list[Link]]:
        made.append((_native.REngine(threads, 1 << 28, isa, None, 100), []))
        return made[-1]

    yield start
    for engine, links in made:
        for link in links:
            link.close()
        engine.close()


def run(link: Link) -> None:
    """Long and short sequences, cut among threads, appended, decoded, in blocks, forked and rolled back."""
    link.fill(0, 1700)
    link.step(0, [(i, 1 + i % 3, True) for i in range(2, 20)])
    for _ in range(2):
        link.step(1, [(0, 1, True), (1, 1, True), (2, 1, True), (21, 90, False)])
    link.step(0, [(0, 5, True), (1, 70, True), (21, 1, True)])
    link.fork(0, 22, 900)  # in the middle of a page, which the next step copies
    link.step(1, [(22, 1, True), (0, 1, True)])
    link.fork(22, 23, 650)
    link.step(0, [(23, 3, True), (22, 1, True)])
    link.trim(0, 1000)
    link.step(1, [(0, 40, True)])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_layers_equal_float64(engine_of, threads: int, options: str) -> None:
    engine, links = engine_of(threads)
    links.append(link := Link(engine, G, KV_FP32, 96, 40, windows=[0, 300, 0], options=OPTIONS[options]))
    run(link)


@pytest.mark.parametrize("kv_dtype", range(len(KV_DTYPES)), ids=KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_layers_equal_float64_in_every_isa_and_format(engine_of, isa: str, kv_dtype: int) -> None:
    engine, links = engine_of(2, isa)
    links.append(link := Link(engine, G, kv_dtype, 96, 40, options=OPTIONS["everything"]))
    run(link)


@pytest.mark.parametrize("head_size", [264, 512])
def test_large_heads(engine_of, head_size: int) -> None:
    engine, links = engine_of(2)
    g = Geometry(1, 200, 2, 8, 1, head_size, BF16)
    links.append(link := Link(engine, g, KV_FP16, 40, options={"softcaps": [0, 2.0]}))
    link.fill(0, 900)
    link.step(0, [(0, 1, True), (1, 33, True), (2, 3, True), (3, 100, False)])


def test_layers_that_share_take_no_memory(engine_of) -> None:
    engine, links = engine_of(1)
    before = engine.kv_free
    links.append(Link(engine, G, KV_FP32, 8, options={"kv_layers": [0, 0, 0]}))
    assert before - engine.kv_free == 8 * _native.page_bytes((*G.tuple()[:2], 1, *G.tuple()[3:]), KV_FP32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_layers": [0, 2, 2]}, "layer 1: a layer shares the K and V of a layer that does not store"),
        ({"kv_layers": [0, 0, 1]}, "layer 2: a layer shares the K and V of a layer that does not store"),
        ({"kv_layers": [0, 1]}, "kv_layers: 2 given, 3 needed"),
        ({"kv_layers": [0, 1, 3]}, "kv_layers: 3 is not within 0..2"),
        ({"segments": [0, -1, 0]}, "segments: -1 is not within"),
        ({"softcaps": [0, -1.0, 0]}, "layer 1: a softcap is not a finite number"),
        ({"softcaps": [0, 0, float("inf")]}, "layer 2: a softcap is not a finite number"),
        ({"softcaps": [0, 0]}, "softcaps: 2 given, 3 needed"),
        ({"sinks": np.full((3, 6), np.nan, np.float32)}, "layer 0: a sink is not a number below infinity"),
        ({"sinks": np.full((3, 6), np.inf, np.float32)}, "layer 0: a sink is not a number below infinity"),
        ({"sinks": floats(2, 6)}, "sinks: 48 bytes given, 72 aligned bytes needed"),
        ({"slopes": np.full(6, -np.inf, np.float32)}, "layer 0: a slope is not a finite number"),
        ({"slopes": floats(5)}, "slopes: 20 bytes given, 24 aligned bytes needed"),
    ],
)
def test_invalid_layers_are_refused(engine_of, options: dict, message: str) -> None:
    engine, _ = engine_of(1)
    free = engine.kv_free
    with pytest.raises(ValueError, match=message):
        Link(engine, G, KV_FP32, 4, options=options)
    assert engine.kv_free == free
