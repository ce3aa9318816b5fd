"""The GPU's page kernels, whose CUDA source is compiled for the host: against the C code's pages, and float64.

The host runs the lanes of a warp, its tensor cores and its copies as the PTX manual describes them
(tests/c/cuda_on_host.h). It shows nothing of a GPU's order of memory accesses, nor of speed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attention.kernel_reference import aligned_bytes
from gpu.compiled_by_cupy import compiled_by_cupy
from gpu.host_kernels import KernelFault
from gpu.page_kernels_on_host import SHAPE, HostPageKernels
from gpu.page_reference import ReferencePageKernels, hadamard_matrix, stored
from sources.compiled import kernel_names

from fastdecode.bench.attention_kernels import chunk_bytes, kv_append
from fastdecode.kernels import _native
from fastdecode.kernels.gpu.cupy_kernels import DeviceLimits
from fastdecode.kernels.gpu.page_kernels import (
    ATTENTION_SOURCES,
    PAGE_SOURCES,
    BlockShape,
    LayerPages,
    PagedLayer,
    PagedRows,
    PageKernels,
    choose_shape,
    definitions,
    shared_bytes,
    unsupported,
)
from fastdecode.region.contract import PAGE_TOKENS

FORMATS = ("fp16", "bf16", "int8")
ACT = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Relative to the sum of weighted sizes of V: a query and a weight are each rounded to the format of the tensor cores'
#: operands, 11 bits or, for bf16, 8. A rounded query moves a score by about as much as a weight is off.
BUDGET = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8, "int8": 4 * 2.0**-11}
#: Two answers that are rounded to activations may lie a unit in the last place apart.
ANSWER = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostPageKernels:
    return HostPageKernels(tmp_path_factory.mktemp("kernels"))


def paged(kv_dtype: str = "fp16", act_dtype: str = "fp16", heads: int = 1, group: int = 4, size: int = 64, **options):
    return PagedLayer(kv_dtype, act_dtype, heads * group, heads, size, size**-0.5, **options)


@dataclass(frozen=True)
class Run:
    """A sequence of a step: the rows from `position` on, of which it sees those before from `first` on."""

    position: int
    rows: int = 1
    first: int = 0


class Scene:
    """Pages of several sequences in the order of chance, amid bytes that are NaN, and the rows of a step."""

    def __init__(self, layer: PagedLayer, runs: list[Run], seed: int = 0, spread: float = 1.0):
        """`spread`: the standard deviation of the logarithm of the sizes of V."""
        self.layer, self.runs = layer, runs
        self._random, self._spread = torch.Generator().manual_seed(seed), spread
        blocks = [-(-(run.position + run.rows) // PAGE_TOKENS) for run in runs]
        n_pages, stride = sum(blocks) + 2, layer.n_kv_heads * layer.chunk_bytes + 192
        self.arena = aligned_bytes(n_pages * stride)
        order = iter(torch.randperm(n_pages, generator=self._random).tolist())
        self._table = torch.full((len(runs), max(blocks) + 1), -1, dtype=torch.int32)
        for sequence, n in enumerate(blocks):
            for block in range(n):
                self._table[sequence, block] = next(order)
        self.pages = LayerPages(self.arena.ctypes.data, stride, self._table.data_ptr(), self._table.shape[1])
        self.reference = ReferencePageKernels(layer)
        before = [(s, at, at, 0) for s, run in enumerate(runs) for at in range(run.position)]
        old = self.tokens(len(before))
        self.reference.append(0, old.data_ptr(), old.shape[1], self.rows(before, 0), self.pages)
        steps = [(s, run.position + i, i, run.first) for s, run in enumerate(runs) for i in range(run.rows)]
        self.n = len(steps)
        self.step = self.rows(steps, 2)
        self.kv = self.tokens(self.n)
        self.q = torch.randn(self.n, layer.n_q_heads * layer.head_size, generator=self._random).to(ACT[layer.act_dtype])

    def rows(self, rows: list[tuple[int, int, int, int]], more: int) -> PagedRows:
        """The tables, for a grid of `more` rows than there are."""
        n = len(rows)
        table = torch.tensor([*rows, (-1, -1, -1, -1)], dtype=torch.int32)
        counts = torch.tensor([n, n], dtype=torch.int32)
        self._kept = [*getattr(self, "_kept", []), table, counts]
        return PagedRows(table.data_ptr(), counts.data_ptr(), n + more, n + more)

    def tokens(self, n: int) -> torch.Tensor:
        """K and V of n tokens. Sizes of V differ from token to token."""
        heads, size = self.layer.n_kv_heads, self.layer.head_size
        k, v = torch.randn(2, n, heads, size, generator=self._random)
        v *= torch.exp(torch.randn(n, heads, 1, generator=self._random) * self._spread)
        return torch.stack([k, v], 1).flatten(1).to(ACT[self.layer.act_dtype])

    def append(self, kernels: PageKernels | ReferencePageKernels) -> None:
        kernels.append(0, self.kv.data_ptr(), self.kv.shape[1], self.step, self.pages)

    def attend(
        self,
        kernels: PageKernels | ReferencePageKernels,
        splits: int = 1,
        partial: bool = False,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """O, and the log-sum-exp if the answer is to be partial."""
        o = torch.full((self.n + 1, self.q.shape[1]), 7.0).to(self.q.dtype)
        lse = torch.full((self.n + 1, self.layer.n_q_heads), 7.0)
        scratch = torch.zeros(kernels.scratch_bytes(self.step, splits), dtype=torch.uint8)
        counters = 4 * self.step.max_attending * self.layer.n_kv_heads
        scratch[-(-counters // 256) * 256 :] = 0xFF
        pages = self.arena.copy()
        kernels.attend(
            0,
            self.q.data_ptr(),
            self.q.shape[1],
            o.data_ptr(),
            o.shape[1],
            self.step,
            self.pages,
            scratch.data_ptr(),
            splits,
            lse.data_ptr() if partial else 0,
            0 if sinks is None else sinks.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
        )
        assert not scratch[:counters].any(), "a counter was not reset"
        assert (o[-1] == 7).all() and (lse[-1] == 7).all() and np.array_equal(pages, self.arena)
        return o[:-1], lse[:-1]


def check(host: HostPageKernels, layer: PagedLayer, runs: list[Run], splits: int = 1, **options) -> None:
    """Append a step's rows and attend to them, in four orders of the threads and copies."""
    shape, patch = options.pop("shape", SHAPE), options.pop("patch", None)
    kernels, model = host.page_kernels(layer, shape, patch), host.attention(layer, shape, patch).model
    scene = Scene(layer, runs, **{name: options.pop(name) for name in ("seed", "spread") if name in options})
    before = scene.arena.copy()
    scene.append(kernels)
    appended = scene.arena.copy()
    scene.arena[:] = before
    scene.append(scene.reference)
    assert np.array_equal(scene.arena, appended), "a page differs from the C code's"
    want, want_lse = scene.attend(scene.reference, **options)
    answers = []
    for model.lazy, model.backwards in itertools.product((0, 1), (0, 1)):
        model.conflicts = model.copied = 0
        answers.append(scene.attend(kernels, splits, **options))
        assert model.conflicts == 0
    o, lse = answers[0]
    assert all(torch.equal(o.view(torch.uint8), again.view(torch.uint8)) for again, _ in answers)
    error = (o.double() - want.double()).abs()
    sizes = torch.from_numpy(scene.reference.sizes[: scene.n])
    allowed = BUDGET[layer.kv_dtype] * sizes + ANSWER[layer.act_dtype] * want.double().abs()
    assert (error <= allowed).all(), f"an error of {float(error.max())}"
    if options.get("partial"):
        assert torch.equal(lse.isinf(), want_lse.isinf())
        seen = want_lse.isfinite()
        off = (lse - want_lse)[seen].abs() / (1 + want_lse[seen].abs())
        assert (off <= BUDGET[layer.kv_dtype]).all(), f"a log-sum-exp is off by {float(off.max())}"


# ---- the answers ----

DECODE = [Run(0), Run(5), Run(63), Run(64), Run(127), Run(128), Run(300)]
SEVERAL = [Run(0, 3), Run(62, 5), Run(126, 4), Run(250, 9)]


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize(("size", "group"), [(64, 4), (128, 8), (256, 16)])
def test_decoding_rows(host, kv_dtype, size, group):
    shape = replace(SHAPE, warps=2, stages=2) if size == 256 else SHAPE
    check(host, paged(kv_dtype, "fp16", 2, group, size), DECODE, shape=shape)


@pytest.mark.parametrize(
    ("kv_dtype", "size"),
    [(kv_dtype, size) for size in range(16, 257, 16) for kv_dtype in ("int8", ("fp16", "bf16")[size // 16 % 2])],
)
def test_every_size_of_heads_and_of_groups(host, kv_dtype, size):
    """A block takes several rows of a small group. int8, whose rows are transformed by their size, has each size and
    each group once; so have fp16 and bf16 together, whose elements have the same places."""
    group = (5 * size // 16 + 7 * (kv_dtype == "int8")) % 16 + 1
    shape = replace(SHAPE, warps=2, stages=2)
    check(host, paged(kv_dtype, "fp16", 1, group, size), [Run(61, 9), Run(150)], shape=shape)


@pytest.mark.parametrize("act_dtype", ACT)
def test_rows_that_arrive_transformed(host, act_dtype):
    check(host, paged("int8", act_dtype, 2, 4, 80, hadamard=True), SEVERAL, splits=2)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_long_sequences_of_narrow_heads(host, kv_dtype):
    """A head of 32 is a single column of V, and every stage of each ring has its turn."""
    check(host, paged(kv_dtype, "fp16", 1, 4, 32), [Run(1100)])


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("act_dtype", ACT)
def test_several_rows_of_a_sequence_see_only_the_rows_before_them(host, kv_dtype, act_dtype):
    check(host, paged(kv_dtype, act_dtype, 2, 3, 64), SEVERAL, splits=2)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("splits", [2, 3, 16])
def test_blocks_that_share_a_long_sequence_merge_their_results(host, kv_dtype, splits):
    check(host, paged(kv_dtype, "fp16", 1, 4, 128), [Run(1400), Run(3), Run(700, 2)], splits, spread=2.0)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_windows_segments_soft_caps_slopes_and_sinks(host, kv_dtype):
    runs = [Run(5), Run(99, 3), Run(127, 2), Run(400, 6)]
    layer, random = paged(kv_dtype, "fp16", 2, 4, 64), torch.Generator().manual_seed(1)
    sinks, slopes = torch.randn(8, generator=random) * 2, torch.rand(8, generator=random) * 0.1
    for window in (1, 63, 129):
        check(host, replace(layer, window=window), runs, splits=2)
    for segment in (1, 101, 4096):
        check(host, replace(layer, segment=segment), runs)
    check(host, replace(layer, softcap=1.5), runs)
    check(host, layer, runs, slopes=slopes)
    check(host, layer, runs, splits=2, sinks=sinks)
    check(host, replace(layer, window=70, segment=90, softcap=30.0), runs, splits=2, sinks=sinks, slopes=slopes)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_partial_answers_of_cut_sequences(host, kv_dtype):
    """A run whose cut is behind its rows sees nothing."""
    runs = [Run(300, 2, 128), Run(300, 1, 256), Run(100, 3, 128), Run(200), Run(257, 1, 256)]
    check(host, paged(kv_dtype, "fp16", 2, 4, 64), runs, splits=2, partial=True)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("act_dtype", ACT)
def test_the_row_behind_a_partial_one_takes_its_log_sum_exps(host, kv_dtype, act_dtype):
    """FD_ROW_PARTIAL of region.h, beside a row of a sequence that lies here as a whole and has sinks."""
    layer, none = paged(kv_dtype, act_dtype, 2, 3, 64), (-1, -1, 0, 0)
    kernels, scene = host.page_kernels(layer), Scene(layer, [Run(700), Run(130), Run(90)])
    scene.append(kernels)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(3))
    whole, _ = scene.attend(scene.reference, sinks=sinks)
    want, sums = scene.attend(scene.reference, partial=True)
    want[1] = whole[1]
    sizes, q = torch.from_numpy(scene.reference.sizes[:3]), scene.q
    scene.n, scene.q = 5, torch.stack([q[0], q[0], q[1], q[2], q[2]])
    scene.step = scene.rows([(0, 700, 0, 0), none, (1, 130, 0, 0), (2, 90, 0, 0), none], 2)
    o, _ = scene.attend(kernels, splits=3, sinks=sinks)
    error = (o[[0, 2, 3]].double() - want.double()).abs()
    assert (error <= BUDGET[kv_dtype] * sizes + ANSWER[act_dtype] * want.double().abs()).all()
    got = o.view(torch.float32).view(5, -1)[[1, 4], :6]
    assert ((got - sums[[0, 2]]).abs() <= BUDGET[kv_dtype] * (1 + sums[[0, 2]].abs())).all()


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("shape", [BlockShape(1, 2, 8), BlockShape(8, 3, 8)], ids=str)
def test_every_shape_of_blocks(host, kv_dtype, shape):
    check(host, paged(kv_dtype, "fp16", 1, 4, 128), [Run(1100), Run(200, 3)], splits=2, shape=shape)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_no_byte_beyond_a_sequence_is_read(host, kv_dtype):
    """Copies come in pieces of 16 bytes: of K, 8 tokens of fp16 and 4 of the others; of V, a line of up to 4 tokens."""
    layer = paged(kv_dtype, "fp16", 1, 4, 64)
    kernels, model = host.page_kernels(layer), host.attention(layer).model
    scene = Scene(layer, [Run(71)])
    scene.append(kernels)
    model.copied = 0
    scene.attend(kernels)
    scales = 2 * 2 * 64 * 4 if kv_dtype == "int8" else 0  # those of both halves of the page
    assert model.copied <= layer.chunk_bytes * 72 // PAGE_TOKENS + scales


@pytest.mark.parametrize("act_dtype", ACT)
def test_a_merged_answer_is_that_of_all_tokens(host, act_dtype):
    """A sequence with a cut, and one without, with a sink; and rows that see nothing on one side, or on both."""
    layer = paged("fp16", act_dtype, 2, 4, 64)
    kernels = host.page_kernels(layer)
    whole = Scene(layer, [Run(300, 2), Run(200), Run(130), Run(90)])
    whole.append(kernels)
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(2))
    want, _ = whole.attend(whole.reference, sinks=sinks)
    sizes = whole.reference.sizes
    elements, act = layer.n_q_heads * layer.head_size, ACT[act_dtype]
    o_bytes = elements * act.itemsize

    cut = Scene(layer, [Run(300, 2, 128), Run(200), Run(130, 1, 256), Run(90, 1, 128)])
    cut.append(kernels)
    o, lse = cut.attend(kernels, partial=True)
    others = torch.zeros(whole.n, o_bytes + 4 * layer.n_q_heads, dtype=torch.uint8)
    addresses = [others[i].data_ptr() for i in range(whole.n)]
    before = [(0, 127, 0, 0), (0, 127, 1, 0), (2, 130, 0, 0)]  # what a row does not see of its sequence on the GPU
    rest = torch.zeros(len(before), elements, dtype=act), torch.zeros(len(before), layer.n_q_heads)
    q = torch.stack([whole.q[0], whole.q[1], whole.q[3]])
    rows = whole.rows(before, 0)
    whole.reference.attend(
        0, q.data_ptr(), elements, rest[0].data_ptr(), elements, rows, whole.pages, 0, 1, rest[1].data_ptr()
    )
    for i, row in enumerate((0, 1, 3)):
        others[row, :o_bytes], others[row, o_bytes:] = rest[0][i].view(torch.uint8), rest[1][i].view(torch.uint8)
    others[4, o_bytes:] = torch.full((layer.n_q_heads,), -torch.inf).view(torch.uint8)
    table = np.array([addresses[0], addresses[1], 0, addresses[3], addresses[4]], np.uint64)
    kernels.merge(0, o.data_ptr(), elements, lse.data_ptr(), table.ctypes.data, cut.step, sinks.data_ptr())
    error, sizes = (o.double() - want.double()).abs(), torch.from_numpy(sizes[: whole.n])
    allowed = (2 * BUDGET["fp16"] + 2 * ANSWER[act_dtype]) * sizes  # both answers are rounded before they are merged
    assert (error[:4] <= allowed[:4]).all() and not o[4].any()


# ---- pages ----


def test_the_reference_reads_what_the_c_code_has_stored():
    """fp16 and bf16 of such numbers are exact; a code of int8 is off by half a step."""
    rng = np.random.default_rng(1)
    for kv_dtype, size in itertools.product(FORMATS, (16, 64, 80, 96, 128, 256)):
        k, v = (np.round(rng.standard_normal((PAGE_TOKENS, size)) * 8).astype(np.float32) / 8 for _ in range(2))
        chunk = aligned_bytes(chunk_bytes(kv_dtype, size), int(rng.integers(256)))
        kv_append("scalar", kv_dtype, chunk, 0, k, v)
        got_k, got_v = stored(chunk, kv_dtype, size)
        if kv_dtype == "int8":
            got_k = got_k @ hadamard_matrix(size)
        step = 2 * np.abs(k).max() * size**0.5 / 254 if kv_dtype == "int8" else 0
        assert np.abs(got_k - k).max() <= step and np.abs(got_v - v).max() <= np.abs(v).max() / 254 * (step > 0) + 1e-12
        assert paged(kv_dtype, size=size).chunk_bytes == chunk.nbytes


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("act_dtype", ACT)
@pytest.mark.parametrize("hadamard", [False, True])
def test_pages_are_those_of_every_isa(host, kv_dtype, act_dtype, hadamard):
    """Numbers made to hurt: infinities, NaN, ties, tokens of zeros, and sizes at the limits of the formats."""
    layer = paged(kv_dtype, act_dtype, 2, 1, 80, hadamard=hadamard)
    kernels = host.page_kernels(layer)
    scene = Scene(layer, [Run(0, 40)], spread=4.0)
    rows = scene.kv.view(40, 4, 80)
    limits = [torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, 1e5, 6e-8, 3e-8, 1e-5, 0.0, -0.0, 1.5, 3e38]
    for i, number in enumerate(limits):
        rows[i, :, i] = number
    rows[20], rows[21], rows[22] = 0.0, 1.5, torch.arange(80) * 0.5
    rows[23, :, ::2], rows[24] = -1e-34, 1e-7
    scene.append(kernels)
    got = scene.arena.copy()
    for isa in ("scalar", _native.isa_best()):
        want = aligned_bytes(2 * layer.chunk_bytes).reshape(2, -1)
        for head in range(2):
            k, v = (rows[:, i * 2 + head].float().numpy().copy() for i in range(2))
            kv_append(isa, kv_dtype, want[head], 0, k, v, int(hadamard))
        page = int(scene._table[0, 0]) * scene.pages.page_bytes
        assert np.array_equal(got[page : page + want.size], want.ravel()), isa


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_rows_that_are_only_appended_and_rows_beyond_the_counts(host, kv_dtype):
    layer = paged(kv_dtype, "fp16", 2, 4, 64)
    kernels, scene = host.page_kernels(layer), Scene(layer, [Run(100, 4), Run(130, 2)])
    counts = torch.tensor([4, 5], dtype=torch.int32)
    scene.step = replace(scene.step, counts=counts.data_ptr())
    before = scene.arena.copy()
    scene.append(kernels)
    got = scene.arena.copy()
    scene.arena[:] = before
    scene.append(scene.reference)
    assert np.array_equal(got, scene.arena) and not np.array_equal(got, before)
    o, _ = scene.attend(kernels)
    assert (o[4:] == 7).all() and (o[:4] != 7).all()


def test_pages_are_copied_within_an_arena_and_to_bytes_and_back(host):
    """Planes that lie apart, as in an arena that grows."""
    copier, rng = host.copier(), np.random.default_rng(3)
    planes, plane_bytes, plane_stride = 3, 448, 6 * 448 + 1024
    arena = aligned_bytes(planes * plane_stride)
    arena[:] = rng.integers(0, 256, arena.size, np.uint8)

    def page(memory: np.ndarray, i: int) -> list[np.ndarray]:
        starts = [plane * plane_stride + i * plane_bytes for plane in range(planes)]
        return [memory[start : start + plane_bytes] for start in starts]

    def copy(moves: list[tuple[int, int]], *strides: int) -> None:
        table, counts = np.array([*moves, (0, 0)], np.uint64), np.array([len(moves)], np.uint32)
        at = table.ctypes.data, counts.ctypes.data, len(moves) + 1
        copier.copy(0, *at, planes, plane_bytes, *strides)

    def address(memory: np.ndarray, i: int, size: int = plane_bytes) -> int:
        return int(memory.ctypes.data) + i * size

    want = arena.copy()
    for target, source in zip(page(want, 4) + page(want, 2), page(arena, 1) + page(arena, 5), strict=True):
        target[:] = source
    copy([(address(arena, 1), address(arena, 4)), (address(arena, 5), address(arena, 2))], plane_stride, plane_stride)
    assert np.array_equal(arena, want)
    out = aligned_bytes(2 * planes * plane_bytes)
    size = planes * plane_bytes
    copy(
        [(address(arena, 3), address(out, 1, size)), (address(arena, 0), address(out, 0, size))],
        plane_stride,
        plane_bytes,
    )
    assert np.array_equal(out, np.concatenate([*page(arena, 0), *page(arena, 3)]))
    other = aligned_bytes(arena.size, 0)
    copy([(address(out, 1, size), address(other, 5))], plane_bytes, plane_stride)
    assert np.array_equal(np.concatenate(page(other, 5)), out[size:])
    assert np.count_nonzero(other) == np.count_nonzero(out[size:])


# ---- mistakes ----

#: What replaces a text of the source.
MISTAKES = {
    "a row does not see itself": ("larger(position + i + 1 - first_seen(i), 0)", "position + i - first_seen(i)"),
    "a window is a token too long": ("last - (int)window + 1", "last - (int)window"),
    "pages lie closer together": ("(u64)(u32)page * page_bytes", "(u64)(u32)page * (page_bytes - 192)"),
    "every slab reads the first half of its page": ("page_bytes, head), filling % 2,", "page_bytes, head), 0,"),
    "warps do not wait for each other": ("    __syncthreads();\n\n    const auto finish", "    const auto finish"),
    "lanes do not wait for each other": ("fd_wait<STAGES - 2>();\n            __syncwarp();", "fd_wait<STAGES - 2>();"),
    "copies are not waited for": ("fd_wait<STAGES - 2>();", "fd_wait<STAGES - 1>();"),
    "older sums keep their scale": ("*= fade[i % 2] * unit_change;", "*= unit_change;"),
    "merged results have no weights": ("0.0f : fd_exp2(its - *m)", "0.0f : 1.0f"),
    "a counter is not reset": ("(u32)active - 1); /* the last", "99); /* the last"),
    "the stage that is read is filled": ("fd_fill(ring + fill_at", "fd_fill(ring + use_at"),
    "K goes to another token": ("LANES + t % LANES) * WORD + fd_byte_of(d)", "LANES + (t ^ 1) % LANES) * WORD"),
    "queries of other heads": ("query % GROUP) * HEAD + 4 * c", "(query + 1) % GROUP) * HEAD + 4 * c"),
}


@pytest.mark.parametrize("patch", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(host, patch):
    layer, runs = paged("fp16", "fp16", 1, 4, 64, window=40), [Run(600), Run(130, 3), Run(5, 2)]
    layers = [replace(layer, window=window) for window in (0, 40)]
    for right in layers:
        check(host, right, runs, splits=2)
    with pytest.raises((AssertionError, KernelFault)):
        for wrong in layers:
            check(host, wrong, runs, splits=2, patch=patch)


MISTAKES_OF_FORMATS = {
    "the token behind an odd last one": ("bf16", ("fd_clear_odd_token(stage, left, lane);", "")),
    "the unit of V": ("int8", ("unit_change = fd_scales", "fd_scales")),
    "the scales of V": ("int8", ("of_v[2 * y + i / 2][i % 2] = x,", "of_v[2 * y + i / 2][i % 2] = 1.0f,")),
    "the transform of Q": ("int8", ("second ? other - mine : mine + other", "mine + other")),
    "the bytes of a word": ("int8", ("i % 2 * 2 + i / 2 % 2", "i % 4")),
}


@pytest.mark.parametrize(("kv_dtype", "patch"), MISTAKES_OF_FORMATS.values(), ids=MISTAKES_OF_FORMATS)
def test_a_mistake_of_one_format_is_found(host, kv_dtype, patch):
    layer, runs = paged(kv_dtype, "fp16", 1, 4, 64), [Run(700), Run(130, 3)]
    check(host, layer, runs, spread=2.0)
    with pytest.raises((AssertionError, KernelFault)):
        check(host, layer, runs, spread=2.0, patch=patch)


# ---- what is served, and on which device ----


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_dtype": "int4"}, "no int4 KV-cache, only fp16, bf16, int8"),
        ({"kv_dtype": "int8-int4"}, "no int8-int4 KV-cache"),
        ({"kv_dtype": "fp32"}, "no fp32 KV-cache"),
        ({"act_dtype": "fp64"}, "no fp64 activations"),
        ({"size": 72}, "multiples of 16 elements up to 256, not 72"),
        ({"size": 512}, "up to 256, not 512"),
        ({"group": 17}, "16 query heads for a KV head, not 17 for 1"),
        ({"v_size": 32}, "not 32 and 64"),
        ({"v_in_k": True}, "V is a part of K"),
    ],
)
def test_what_is_not_served_is_named(options, named):
    assert named in (unsupported(paged(**options)) or "")


def test_bf16_needs_a_device_with_its_products():
    assert "needs compute capability 8.0, the GPU has 7.5" in (unsupported(paged("bf16"), (7, 5)) or "")
    assert all(unsupported(paged(kv_dtype), (7, 5)) is None for kv_dtype in ("fp16", "int8"))
    assert all(unsupported(paged(kv_dtype), (12, 0)) is None for kv_dtype in FORMATS)


#: Shared memory of a block and of a multiprocessor, from the CUDA programming guide's table of compute capabilities.
SHARED = {(7, 5): (64, 64), (8, 0): (163, 164), (8, 6): (99, 100), (8, 9): (99, 100), (9, 0): (227, 228)}
SHARED |= {(10, 0): (227, 228), (12, 0): (99, 100)}


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_blocks_fit_every_device(kv_dtype, size):
    for capability, (block, multiprocessor) in SHARED.items():
        layer = paged(kv_dtype, group=16, size=size)
        shape = choose_shape(layer, DeviceLimits(capability, 100, block << 10, multiprocessor << 10))
        assert shared_bytes(layer, shape) <= block << 10
        assert shape.at_once * (shared_bytes(layer, shape) + 1024) <= 100 * multiprocessor << 10


def test_long_contexts_are_split_until_the_blocks_fill_the_device(host):
    kernels = host.page_kernels(paged("fp16", "fp16", 2, 4, 64))
    assert kernels.splits(PagedRows(0, 0, 1, 1), 128) == 1
    assert kernels.splits(PagedRows(0, 0, 1, 1), 1 << 17) == SHAPE.at_once // 2
    assert kernels.splits(PagedRows(0, 0, 64, 64), 1 << 12) == 1


ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SIZES = ((64, 4), (128, 16), (80, 1))  # of heads and their groups


@pytest.mark.tools
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_for_every_architecture(architecture):
    """Every architecture with every format and every size, and every format with every size."""
    for i, kv_dtype in enumerate(FORMATS):
        size, group = SIZES[(i + ARCHITECTURES.index(architecture)) % len(SIZES)]
        layer = paged(kv_dtype, "bf16", 1, group, size)
        if unsupported(layer, divmod(int(architecture[3:]), 10)):
            continue
        image = compiled_by_cupy(architecture, ATTENTION_SOURCES, definitions(layer, SHAPE))
        assert all(name.encode() in image for source in ATTENTION_SOURCES for name in kernel_names(source))
    image = compiled_by_cupy(architecture, PAGE_SOURCES, {})
    assert all(name.encode() in image for name in kernel_names(PAGE_SOURCES[0]))
