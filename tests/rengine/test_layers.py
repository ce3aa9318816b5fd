"""Layers with soft-capping, sinks, segments, slopes, heads of their own, or K and V that they share. Every O row is
compared with float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention import kernel_calls
from attention.rengine_peer import (
    BF16,
    FP16,
    FP32,
    KV_FP16,
    KV_FP32,
    KV_INT8,
    KV_INT8_INT4,
    SELECT_OWN,
    SELECT_SHARED,
    Geometry,
    Link,
)

from fastdecode.kernels import _native
from fastdecode.region.contract import KV_DTYPES

ISAS = _native.isa_supported()
G = Geometry(n_slots=2, max_rows=256, n_layers=3, n_q_heads=6, n_kv_heads=2, head_size=64, v_size=128)


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
    "heads": {"heads": [(6, 2, 64, 64), (6, 3, 24, 40), (4, 4, 48, 8)]},
    "everything": {
        "softcaps": [3.0, 0, 9.0],
        "sinks": floats(3, 6),
        "segments": [300, 0, 129],
        "kv_layers": [0, 1, 1],
        "heads": [(6, 2, 64, 128), (6, 2, 64, 40), (4, 2, 64, 40)],
    },
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
    links.append(link := Link(engine, G, KV_FP32, 3 * 96, 40, windows=[0, 300, 0], options=OPTIONS[options]))
    run(link)


@pytest.mark.parametrize("kv_dtype", range(len(KV_DTYPES)), ids=KV_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_layers_equal_float64_in_every_isa_and_format(engine_of, isa: str, kv_dtype: int) -> None:
    engine, links = engine_of(2, isa)
    links.append(link := Link(engine, G, kv_dtype, 96, 40, options=OPTIONS["everything"]))
    run(link)


@pytest.mark.parametrize(("head_size", "v_size"), [(264, 264), (512, 512), (192, 128), (576, 512)])
def test_large_heads(engine_of, head_size: int, v_size: int) -> None:
    engine, links = engine_of(2)
    g = Geometry(1, 200, 2, 8, 1, head_size, BF16, v_size)
    links.append(link := Link(engine, g, KV_FP16, 40, options={"softcaps": [0, 2.0]}))
    link.fill(0, 900)
    link.step(0, [(0, 1, True), (1, 33, True), (2, 3, True), (3, 100, False)])


V_IN_K = Geometry(n_slots=2, max_rows=256, n_layers=3, n_q_heads=20, n_kv_heads=1, head_size=72, v_size=40, v_in_k=1)


@pytest.mark.parametrize("kv_dtype", [KV_DTYPES.index(name) for name in KV_DTYPES if name != "int8-int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_v_in_k_equals_float64(engine_of, isa: str, kv_dtype: int) -> None:
    engine, links = engine_of(3, isa)
    options = {
        "kv_layers": [0, 1, 1],
        "softcaps": [0, 0, 3.0],
        "heads": [(20, 1, 72, 40), (8, 2, 24, 16), (4, 2, 24, 16)],
    }
    links.append(link := Link(engine, V_IN_K, kv_dtype, 96, 40, options=options))
    run(link)


@pytest.mark.parametrize("act_dtype", [FP32, FP16, BF16])
def test_latent_attention_of_many_query_heads(engine_of, act_dtype: int) -> None:
    engine, links = engine_of(2)
    g = Geometry(1, 200, 2, 128, 1, 576, act_dtype, 512, 1)
    links.append(link := Link(engine, g, KV_FP16, 40))
    link.fill(0, 900)
    link.step(0, [(0, 1, True), (1, 33, True), (2, 3, True), (3, 100, False)])


SPARSE = replace(V_IN_K, n_layers=4, index_heads=6, index_size=24, index_topk=200)
OWN_AND_SHARED = {"selections": [SELECT_OWN, SELECT_SHARED, 0, SELECT_OWN]}


@pytest.mark.parametrize("kv_dtype", [KV_DTYPES.index(name) for name in KV_DTYPES if name != "int8-int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_selected_tokens_equal_float64(engine_of, isa: str, kv_dtype: int) -> None:
    engine, links = engine_of(3, isa)
    links.append(link := Link(engine, SPARSE, kv_dtype, 96, 40, options=OWN_AND_SHARED))
    run(link)
    assert link.n_certain > 20 * link.n_doubtful


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("changes", [{"act_dtype": FP16}, {"index_topk": 1}, {"index_topk": 1000}, {"index_heads": 70}])
def test_selections_of_other_sizes(engine_of, changes: dict, threads: int) -> None:
    engine, links = engine_of(threads)
    options = OWN_AND_SHARED | {"softcaps": [2.0, 0, 0, 0], "heads": [(20, 1, 72, 40)] * 3 + [(8, 1, 40, 16)]}
    links.append(link := Link(engine, replace(SPARSE, **changes), KV_FP32, 96, 40, options=options))
    run(link)
    assert link.n_certain > 20 * link.n_doubtful


def test_a_selection_over_several_units_of_pages(engine_of) -> None:
    """More pages than are scored at once (FD_INDEX_PAGES)."""
    engine, links = engine_of(2)
    g = replace(SPARSE, max_rows=2048, n_layers=2, index_topk=300)
    links.append(link := Link(engine, g, KV_FP32, 200, options={"selections": [SELECT_OWN, SELECT_SHARED]}))
    link.fill(0, 3 * 64 * 128 // 2 + 5)
    link.step(0, [(0, 2, True)])
    assert link.n_doubtful == 0


def test_index_keys_take_a_chunk_of_each_page() -> None:
    for kv_dtype, index_dtype in (("fp32", "fp32"), ("fp16", "fp16"), ("int8", "int8"), ("int4", "int8")):
        chunks = 4 * kernel_calls.chunk_bytes(kv_dtype, 72, 40, v_in_k=True)
        keys = 2 * kernel_calls.chunk_bytes(index_dtype, 24, 24, v_in_k=True)
        page = _native.page_bytes(SPARSE.tuple(), KV_DTYPES.index(kv_dtype), selections=OWN_AND_SHARED["selections"])
        assert chunks + keys <= page <= 1.4 * (chunks + keys)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"selections": [2, 1, 0, 0]}, "layer 0: a layer shares the tokens of an indexer, but no layer before"),
        ({}, {"selections": [1, 3, 0, 0]}, "layer 1: unknown selection of tokens"),
        ({}, {"selections": [1, 2]}, "selections: 2 given, 4 needed"),
        ({}, {"selections": [1, 1, 0, 0], "kv_layers": [0, 0, 2, 3]}, "layer 1: a layer has an indexer, but no K"),
        ({}, {"selections": [1, 0, 0, 0], "segments": [9, 0, 0, 0]}, "layer 0: a layer that selects tokens has a win"),
        ({}, {"selections": [1, 0, 0, 0], "slopes": np.ones(20, np.float32)}, "a layer that selects tokens has a win"),
        ({}, {"selections": [1, 0, 0, 0], "heads": [(8, 2, 24, 16)] + [(20, 1, 72, 40)] * 3}, "several KV heads"),
        ({}, {"selections": [1, 0, 0, 0], "part": (0, 2)}, "and parts of the tokens cannot"),
        ({"index_heads": 0, "index_size": 0, "index_topk": 0}, OWN_AND_SHARED, "the geometry has no indexer"),
        ({"index_heads": 0}, {}, "number of index heads is not within 1"),
        ({"index_size": 12}, {}, "head size is not a multiple of 8"),
        ({"index_topk": 4097}, {}, "number of tokens that an indexer selects is not within 1"),
        ({"max_rows": 65536, "index_topk": 2048}, {}, "the rows of a call select more than"),
        ({"n_q_heads": 1024, "head_size": 576, "index_topk": 4000}, {}, "selected tokens exceed 2\\^29"),
        ({"v_in_k": 0}, {}, "only latent attention, with one KV head, can have an indexer"),
    ],
)
def test_selections_that_no_layer_can_have(engine_of, changes: dict, options: dict, reason: str) -> None:
    engine, _ = engine_of(1)
    with pytest.raises(ValueError, match=reason):
        Link(engine, replace(SPARSE, **changes), KV_FP32, 8, options=options)


def test_v_in_k_is_not_stored_twice() -> None:
    for kv_dtype in ("fp32", "fp16", "bf16", "int8", "int4"):
        page = _native.page_bytes(V_IN_K.tuple(), KV_DTYPES.index(kv_dtype))
        assert page == 3 * kernel_calls.chunk_bytes(kv_dtype, 72, 40, v_in_k=True)


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "options", "reason"),
    [
        ({}, KV_INT8_INT4, {}, "V of this model is a part of K, so int8-int4 cannot store it in int4"),
        ({"v_size": 80}, KV_FP32, {}, "V is a part of K, but larger"),
        ({}, KV_INT8, {"hadamard": 1}, "V is a part of K and not transformed with it"),
        ({}, KV_INT8, {"hadamard": 2}, "V is a part of K and not transformed with it"),
        ({}, KV_FP32, {"heads": [(20, 1, 72, 40), (2, 2, 40, 40), (1, 1, 8, 8)]}, "longer than those of the geometry"),
    ],
)
def test_v_in_k_that_no_layer_can_have(engine_of, changes: dict, kv_dtype: int, options: dict, reason: str) -> None:
    engine, _ = engine_of(1)
    with pytest.raises(ValueError, match=reason):
        Link(engine, replace(V_IN_K, **changes), kv_dtype, 8, options=options)


def test_layers_that_share_take_no_memory(engine_of) -> None:
    engine, links = engine_of(1)
    before = engine.kv_free
    links.append(Link(engine, G, KV_FP32, 8, options={"kv_layers": [0, 0, 0]}))
    assert before - engine.kv_free == 8 * _native.page_bytes((*G.tuple()[:2], 1, *G.tuple()[3:]), KV_FP32)


@pytest.mark.parametrize("kv_dtype", range(len(KV_DTYPES)), ids=KV_DTYPES)
@pytest.mark.parametrize(
    "heads",
    [
        [(8, 2, 256, 256)] * 5 + [(8, 1, 512, 512)],  # the layers of Gemma 4 E2B have KV heads of two sizes
        [(8, 1, 256, 256)] * 5 + [(8, 1, 512, 512)],
        [(16, 8, 192, 128)] * 5 + [(16, 4, 192, 128)],  # as in MiMo-V2
        [(8, 1, 64, 64), (8, 8, 64, 64), (8, 2, 64, 64)] * 8,
    ],
)
def test_a_page_takes_little_more_memory_than_its_layers(heads: list, kv_dtype: int) -> None:
    g = Geometry(1, 1, len(heads), 16, 8, 512)
    chunks = sum(n_kv * kernel_calls.chunk_bytes(KV_DTYPES[kv_dtype], k, v) for _, n_kv, k, v in heads)
    assert chunks <= _native.page_bytes(g.tuple(), kv_dtype, heads=heads) <= 1.17 * chunks


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
        ({"heads": [(6, 2, 64, 64)] * 2}, "heads: 2 given, 3 needed"),
        ({"heads": [(6, 2, 64)] * 3}, "heads of a layer: 3 given, 4 needed"),
        ({"heads": [(6, 4, 64, 64)] * 3}, "layer 0: query heads are not a multiple of KV heads"),
        ({"heads": [(0, 1, 64, 64)] * 3}, "layer 0: number of query heads is not within"),
        ({"heads": [(6, 0, 64, 64)] * 3}, "layer 0: query heads are not a multiple of KV heads"),
        ({"heads": [(6, 2, 64, 64)] * 2 + [(6, 2, 64, 4)]}, "layer 2: head size is not a multiple of 8"),
        ({"heads": [(6, 2, 64, 64)] * 2 + [(8, 2, 64, 64)]}, "layer 2: the layer's rows are longer than those"),
        ({"heads": [(6, 2, 64, 64), (8, 2, 48, 48), (6, 2, 64, 64)]}, "layer 1: the layer has more query heads than"),
        ({"heads": [(6, 6, 48, 24)] * 3}, "layer 0: the layer's rows are longer than those"),
        ({"heads": [(6, 2, 64, 64), (6, 2, 32, 32), (6, 2, 64, 64)], "kv_layers": [0, 0, 2]}, "whose heads are not"),
        ({"slopes": floats(5)}, "slopes: 20 bytes given, 24 aligned bytes needed"),
    ],
)
def test_invalid_layers_are_refused(engine_of, options: dict, message: str) -> None:
    engine, _ = engine_of(1)
    free = engine.kv_free
    with pytest.raises(ValueError, match=message):
        Link(engine, G, KV_FP32, 4, options=options)
    assert engine.kv_free == free


def test_layers_of_many_kinds_are_refused(engine_of) -> None:
    engine, _ = engine_of(1)
    with pytest.raises(ValueError, match="the layers are of 17 kinds, at most 16 are supported"):
        Link(engine, Geometry(n_layers=17), KV_FP32, 4, windows=range(1, 18))
