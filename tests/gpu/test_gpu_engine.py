"""An R-engine with a GPU: its answers against float64, and its pages against those of the C engine, bit for bit.

On the simulated driver, with the kernels compiled for the host. Every access of a kernel is checked there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention.partial_rows import check_partial_answers
from attention.rengine_peer import FP16, KV_BF16, KV_ERROR, KV_FP16, KV_INT8, Geometry, Link, Peer, decode, encode
from gpu.cuda_driver import SimulatedCuda
from gpu.functions_on_driver import DriverFunctions
from gpu.layers_compiled import compile_layer

from fastdecode.kernels._native import REngine
from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.region._native import init_region_header
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, Status

pytestmark = pytest.mark.tools

KV_BYTES = 64 << 20
FORMATS = {"fp16": KV_FP16, "bf16": KV_BF16, "int8": KV_INT8}
SHAPE = Geometry(n_slots=2, max_rows=160, n_layers=2, n_q_heads=4, n_kv_heads=2, head_size=16, act_dtype=FP16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


class Gpu:
    """The engine with a GPU, and its kernels."""

    def __init__(self, cuda: SimulatedCuda, folder: Path):
        self.cuda, self._folder = cuda, folder
        self.engine = REngine(1, KV_BYTES, spin_us=20, gpu=0)

    def kernels(
        self, g: Geometry, kv_dtype: int, heads: Sequence[tuple[int, int, int, int]] | None = None
    ) -> list[tuple[int, ...]]:
        """The kernels of each layer. `heads` has the heads of each layer, if layers differ."""
        layers = [PagedLayer(KV_DTYPES[kv_dtype], "fp16", *each[:3], 1.0) for each in heads or [g.heads] * g.n_layers]
        for layer in layers:
            compile_layer(layer, self._folder)
        functions = DriverFunctions(self._folder)
        return [functions.load(layer) for layer in layers]

    def link(self, kv_dtype: int, n_pages: int = 24, options: dict[str, Any] | None = None, **rest: Any) -> Link:
        kernels = {"gpu_kernels": self.kernels(SHAPE, kv_dtype, (options or {}).get("heads"))}
        return Link(self.engine, SHAPE, kv_dtype, n_pages, options=(options or {}) | kernels, **rest)


@pytest.fixture
def gpu(simulated: SimulatedCuda, folder: Path) -> Iterator[Gpu]:
    """Whatever a test has taken from the driver is given back with its links and the engine."""
    made = Gpu(simulated, folder)
    yield made
    made.engine.close()
    counts = simulated.counts()
    assert not any(counts[what] for what in ("registered", "pinned", "allocated", "streams")), counts


@pytest.fixture
def engine() -> Iterator[REngine]:
    """An engine on the CPU."""
    made = REngine(1, KV_BYTES, spin_us=20)
    yield made
    made.close()


class Both:
    """Two links that are told the same: every call goes to both of them."""

    def __init__(self, *links: Link):
        self.links = links

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            for link in self.links:
                getattr(link, name)(*arguments)

        return call


def whole_pages(link: Link, seq_index: int) -> bytes:
    """The pages of a sequence that are full, as they go to another R-node."""
    shadow = link.shadows[seq_index]
    return sent(link, seq_index, shadow.tag, shadow.length // PAGE_TOKENS)


def sent(link: Link, seq_index: int, tag: int, n_pages: int) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        data, moved = b"", 0
        total = n_pages * page_bytes(link)
        while moved < total:
            n = link.lease.send_pages(ours.fileno(), seq_index, tag, 0, n_pages, moved)
            data += theirs.recv(n, socket.MSG_WAITALL)
            moved += n
        return data


def page_bytes(link: Link) -> int:
    n_q, n_kv, size, _ = link.g.heads
    layer = PagedLayer(KV_DTYPES[link.kv_dtype], "fp16", n_q, n_kv, size, 1.0)
    return link.g.n_layers * n_kv * layer.chunk_bytes


@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_answers_are_those_of_float64_and_pages_those_of_the_c_engine(gpu, engine, kv_dtype):
    """Prompts in chunks, several sequences and rows at once, forks, prefixes, trims, and steps that cut."""
    both = Both(gpu.link(kv_dtype), Link(engine, SHAPE, kv_dtype, 24))
    both.fill(0, 2 * PAGE_TOKENS + 50)
    both.step(0, [(0, 1, True), (1, 3, True), (2, 70, False)])
    both.fork(0, 3, 2 * PAGE_TOKENS + 20)  # copies the third page with the next row
    both.fork(0, 4, PAGE_TOKENS)
    both.step(1, [(3, 2, True), (4, 1, True), (0, 1, True), (2, 1, False)])
    both.trim(0, PAGE_TOKENS + 3)
    both.step(0, [(0, 5, True), (3, 1, True)])
    both.cut(3, PAGE_TOKENS - 1)
    both.step(1, [(3, 4, True), (1, 1, True), (0, 130, False)])
    both.forget(2)
    both.step(0, [(4, 1, True), (5, 150, False)])
    on_gpu, on_cpu = both.links
    assert all(whole_pages(on_gpu, i) == whole_pages(on_cpu, i) != b"" for i in (0, 3, 4, 5))
    stats = [link.lease.stats() for link in both.links]
    assert all(stats[0][name] == stats[1][name] for name in ("calls", "rows", "pages_used", "seqs"))
    assert stats[0]["busy_ns"] and stats[0]["kv_bytes"] >= stats[1]["kv_bytes"] // 2
    both.close()


def test_windows_soft_caps_and_sinks(gpu):
    """Layers of two kinds, of which the first gives back pages."""
    sinks = np.linspace(-1, 2, 8, dtype=np.float32).reshape(2, 4)
    link = gpu.link(KV_FP16, windows=(100, 0), options={"softcaps": (0.0, 5.0), "sinks": sinks})
    link.fill(0, 3 * PAGE_TOKENS)
    before = link.lease.stats()["pages_used"]
    link.slide(0)
    link.step(0, [(0, 2, True), (1, 9, True)])
    assert link.lease.stats()["pages_used"] == before - 2 + 4
    link.step(1, [(1, 1, True), (0, 1, True)])
    link.close()


LAYERS: dict[str, dict[str, Any]] = {
    "segments": {"segments": (0, 100)},
    "slopes": {"slopes": np.linspace(0.01, 0.4, 4, dtype=np.float32)},
    "shared K and V": {"kv_layers": (0, 0)},
    "heads of a layer": {"heads": [SHAPE.heads, (2, 1, 32, 32)]},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers_of_several_kinds(gpu, options):
    link = gpu.link(KV_FP16, options=options)
    link.fill(0, 2 * PAGE_TOKENS)
    link.step(0, [(0, 2, True), (1, 9, True)])
    link.step(1, [(1, 1, True), (0, 1, True)])
    link.close()


@pytest.mark.parametrize("kv_dtype", FORMATS.values(), ids=FORMATS)
def test_partial_answers_are_those_of_the_cached_tokens_without_sinks(gpu, kv_dtype):
    """Beside a row of a sequence that lies here as a whole. The long sequence is cut into splits."""
    sinks = np.linspace(-1, 2, 8, dtype=np.float32).reshape(2, 4)
    link = gpu.link(kv_dtype, options={"sinks": sinks})
    link.fill(0, 7 * PAGE_TOKENS)
    check_partial_answers(link, 3, KV_ERROR[kv_dtype] + 2e-3)
    check_partial_answers(link, 1, KV_ERROR[kv_dtype] + 2e-3)
    link.close()


def test_steps_of_many_rows_follow_steps_of_few(gpu):
    """Partial results of one step lie where counters of the next one are: 2 rows are cut into splits, then 20 are."""
    link = gpu.link(KV_FP16, n_pages=100, max_seqs=32)
    for seq_index in range(20):
        link.fill(seq_index, 2 * PAGE_TOKENS if seq_index < 2 else 40)
    for rows in (2, 20, 1, 20):
        link.step(rows % 2, [(i, 1, True) for i in range(rows)])
    link.close()


def test_parts_of_the_tokens_are_those_of_the_c_engine(gpu, engine):
    """The second of three parts: its pages bit for bit, and O rows and log-sum-exps of rows that see some of its tokens
    or none. Several rows of a sequence cross the border of a part."""
    g = replace(SHAPE, n_layers=1, max_rows=300)
    # The layer has fewer heads than the geometry, so that log-sum-exps find room behind its O heads.
    layer, wide = (2, 1, 16, 16), {"part": (1, 3)}
    peers, leases = [], []
    functions = gpu.kernels(replace(g, n_q_heads=2, n_kv_heads=1), KV_FP16)
    for made, options in ((gpu.engine, {"gpu_kernels": functions}), (engine, {})):
        peer = Peer(g)
        init_region_header(peer.map, g.tuple())
        leases.append(made.add_link(peer.map, g.tuple(), KV_FP16, 8, 4, 0.25, [0], heads=[layer], **wide, **options))
        peer.wake_fd = leases[-1].eventfd
        peers.append(peer)
    rng, length = np.random.default_rng(0), [0, 0]

    def step(plan: list[tuple[int, int, bool]]) -> None:
        n, attending = sum(rows for _, rows, _ in plan), sum(rows for _, rows, attend in plan if attend)
        q, kv = (decode(encode(rng.standard_normal((rows, 32)), FP16), FP16).reshape(rows, 32) for rows in (n, n))
        answers = []
        for peer in peers:
            peer.table(0, [(i, 1, length[i], rows, ROW_ATTEND if attend else 0) for i, rows, attend in plan])
            peer.put_rows(0, q[:attending], kv)
            assert peer.call(0, 0, len(plan), n, attending, True).status == Status.OK
            at = peer.at(0) + peer.o_at
            rows = np.frombuffer(peer.map[at : at + attending * peer.o_row], np.uint8).reshape(attending, peer.o_row)
            answers.append((rows[:, :64].copy().view(np.float16), rows[:, 64:72].copy().view(np.float32)))
        for i, rows, _ in plan:
            length[i] += rows
        (o, sums), (want, want_sums) = answers
        np.testing.assert_allclose(o.astype(float), want.astype(float), atol=4e-3)
        np.testing.assert_allclose(sums, want_sums, atol=4e-3)
        empty.append(np.isneginf(sums).any())

    empty: list[bool] = []
    step([(0, 100, False)])
    step([(0, 3, True), (1, 2, True)])
    step([(0, 20, False)])
    step([(0, 12, True), (1, 1, True)])
    step([(0, 250, False)])
    step([(0, 5, True), (1, 140, False)])
    step([(1, 2, True), (0, 1, True)])
    assert empty[1] and not empty[-1]
    links = [type("", (), {"lease": lease, "g": replace(g, n_kv_heads=1), "kv_dtype": KV_FP16}) for lease in leases]
    pages = [sent(link, 0, 1, 1) for link in links]
    assert pages[0] == pages[1]
    for lease in leases:
        lease.close()


def test_a_sequence_moves_to_a_cpu_and_back_and_to_another_link(gpu, engine):
    first, far, second = gpu.link(KV_FP16), Link(engine, SHAPE, KV_FP16, 24), gpu.link(KV_FP16)
    first.fill(0, 2 * PAGE_TOKENS + 9)
    first.step(0, [(0, 1, True)])
    for source, target in ((first, far), (far, second)):
        shadow = target.shadows[0] = source.shadows[0]
        target.next_tag = source.next_tag
        target.lease.receive(0, shadow.tag, shadow.length)
        move(source, target, shadow.tag)
        target.step(0, [(0, 2, True)])
    again = second.shadows[1] = replace(second.shadows[0])
    first.lease.free(0, again.tag)
    first.shadows[1] = again
    first.lease.receive(1, again.tag, again.length)
    total, moved = 3 * page_bytes(first), 0
    while moved < total:
        moved += second.lease.copy_pages(first.lease, 0, again.tag, 1, again.tag, 0, 3, moved)
    first.step(1, [(1, 1, True)])
    for link in (first, far, second):
        link.close()


def move(source: Link, target: Link, tag: int) -> None:
    """All pages of sequence 0, over sockets, in pieces that end within pages."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        n = len(source.lease.pages(0, tag))
        total, out, into = n * page_bytes(source), 0, 0
        while into < total:
            out += source.lease.send_pages(ours.fileno(), 0, tag, 0, n, out) if out < total else 0
            assert target.lease.fault_in(0, tag, 0, n, into) > 0
            into += target.lease.receive_pages(theirs.fileno(), 0, tag, 0, n, into)


def test_a_lease_grows_within_its_memory_and_ends_with_a_retired_link(gpu):
    link = gpu.link(KV_FP16, n_pages=2, max_pages=6)
    assert gpu.engine.kv_free == KV_BYTES - 6 * page_bytes(link)
    link.fill(0, 2 * PAGE_TOKENS)
    with pytest.raises(MemoryError, match="may grow to 6 pages"):
        link.lease.grow(7)
    link.lease.grow(6)
    link.fill(1, 4 * PAGE_TOKENS - 1)
    link.step(0, [(1, 1, True)])
    link.lease.retire([1])
    link.lease.shrink()
    assert link.lease.length(1, link.shadows[1].tag) == 4 * PAGE_TOKENS
    link.lease.close()
    assert gpu.engine.kv_free == KV_BYTES
    link.wake_fd = -1


def test_a_gpu_that_fails_closes_the_link(simulated, folder):
    """The region is taken from the device in the middle of a step."""
    gpu = Gpu(simulated, folder)
    link = gpu.link(KV_FP16)
    step = link.begin(0, [(0, 3, True)])
    step.call(0)
    simulated.unregister(link.map)
    reply = link.wait(0, step.post(1))
    assert reply.status == Status.LINK_CLOSED and "the R-node's GPU has failed: " in reply.message
    link.close()
    gpu.engine.close()
    simulated.reset()


def test_an_engine_without_a_gpu_takes_no_kernels_and_one_with_a_gpu_needs_them(gpu, engine):
    with pytest.raises(ValueError, match="gpu_kernels are for"):
        Link(engine, SHAPE, KV_FP16, 4, options={"gpu_kernels": gpu.kernels(SHAPE, KV_FP16)})
    with pytest.raises(ValueError, match="gpu_kernels are for"):
        Link(gpu.engine, SHAPE, KV_FP16, 4)
    with pytest.raises(ValueError, match="2 needed"):
        Link(gpu.engine, SHAPE, KV_FP16, 4, options={"gpu_kernels": gpu.kernels(SHAPE, KV_FP16)[:1]})
    with pytest.raises(MemoryError, match="pages need"):
        gpu.link(KV_FP16, n_pages=1 << 20)
    with pytest.raises(RuntimeError, match="cuDeviceGet"):
        REngine(1, KV_BYTES, gpu=1)
    for options in ({"prefault": True}, {"huge_pages": "hugetlb"}):
        with pytest.raises(ValueError, match="not in a GPU's"):
            REngine(1, KV_BYTES, gpu=0, **options)
