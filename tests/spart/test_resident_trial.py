"""The trial of the kernels of KV pages at start: right ones pass it, in every format and kind of layer; wrong ones do
not, so that no sequence is placed on the device."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.page_kernels_on_host import HostPageKernels
from gpu.page_reference import ReferencePageKernels

from fastdecode.kernels.gpu.cupy_kernels import KernelError
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import Geometry
from fastdecode.spart.resident import trial
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.trial import measure_reading, try_kernels
from fastdecode.transports.base import Hello, LayerOptions

N_LAYERS, N_HEADS = 3, 8


def link(kv_dtype: str, load: Any = ReferencePageKernels, n_pages: int = 8, **options: Any) -> ResidentLink:
    """A link whose kernels run at once in this process."""
    windows = options.pop("windows", (0,) * N_LAYERS)
    hello = Hello(
        Geometry(1, 32, N_LAYERS, N_HEADS, 2, 32, "fp32"),
        kv_dtype=kv_dtype,
        kv_bytes=0,
        max_seqs=4,
        softmax_scale=32**-0.5,
        windows=windows,
        layers=LayerOptions(**options),
    )
    copier: Any = None
    made = ResidentLink(hello, n_pages, torch.device("cpu"), lambda arena: ResidentKernels(arena, load, copier, int))
    made.arena.memory.zero_()
    return made


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"windows": (0, 40, 130)},
    "segments": {"segments": (0, 64, 64)},
    "softcaps": {"softcaps": (0.0, 5.0, 5.0)},
    "sinks": {"sinks": struct.pack(f"<{N_LAYERS * N_HEADS}f", *(0.5 * i for i in range(N_LAYERS * N_HEADS)))},
    "slopes": {"slopes": struct.pack(f"<{N_HEADS}f", *(2.0**-i for i in range(N_HEADS)))},
    "shared": {"kv_layers": (0, 0, 2)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8"])
def test_right_kernels_pass(kv_dtype: str, kind: str) -> None:
    tried = link(kv_dtype, **KINDS[kind])
    try_kernels(tried)
    assert tried.arena.lists.n_sequences == 0 and tried.arena.lists.n_free == tried.lease.n_pages


def test_few_pages_are_enough() -> None:
    try_kernels(link("fp16", n_pages=1))


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8"])
def test_the_kernels_of_the_repository_pass(kv_dtype: str, tmp_path: Path) -> None:
    """Whatever the memory of the pages had in it: here no numbers."""
    host = HostPageKernels(tmp_path)
    tried = link(kv_dtype, host.page_kernels)
    tried.arena.memory.fill_(0xFF)
    try_kernels(tried)


class Wrong(ReferencePageKernels):
    """Kernels with a fault."""

    fault = ""

    def append(self, stream: int, kv: int, kv_stride: int, rows: Any, pages: Any) -> None:
        if self.fault != "appends nothing":
            super().append(stream, kv, kv_stride, rows, pages)

    def attend(self, stream: int, q: int, q_stride: int, o: int, *rest: Any, **options: Any) -> None:
        match self.fault:
            case "another row's queries":
                super().attend(stream, q + 4 * q_stride, 0, o, *rest, **options)
            case "no launch":
                pass
            case _:
                super().attend(stream, q, q_stride, o, *rest, **options)


@pytest.mark.parametrize("fault", ["appends nothing", "another row's queries", "no launch"])
def test_wrong_kernels_are_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "fault", fault)
    tried = link("fp16", Wrong)
    with pytest.raises(KernelError, match=r"in fp16 with heads of 32 differ from torch by"):
        try_kernels(tried)
    assert tried.arena.lists.n_sequences == 0


class Timed(ReferencePageKernels):
    """Kernels that only tell how much they would read: by a clock of their own 1 GB a second, and half as much at
    first."""

    now, seconds_for_byte = 0.0, 2e-9

    def append(self, stream: int, kv: int, kv_stride: int, rows: Any, pages: Any) -> None:
        pass

    def attend(self, *arguments: Any, **_: Any) -> None:
        rows, pages = arguments[5:7]
        [(_, (sequence, position, _, first))] = self._rows(rows, 0)
        begin = max(first, position - self.layer.window + 1 if self.layer.window else 0)
        for block in range(begin // PAGE_TOKENS, position // PAGE_TOKENS + 1):
            for head in range(self.layer.n_kv_heads):
                Timed.now += self._chunk(pages, sequence, block, head).nbytes * Timed.seconds_for_byte
        Timed.seconds_for_byte = 1e-9


@pytest.mark.parametrize("windows", [(0, 0, 0), (40, 0, 40)])
def test_the_reading_of_pages_is_measured(windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer that reads whole sequences; the best of some tries."""
    monkeypatch.setattr(Timed, "seconds_for_byte", 2e-9)
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: Timed.now))
    assert measure_reading(link("fp16", Timed, 1536, windows=windows)) == pytest.approx(1e9)


def test_few_pages_and_layers_with_windows_tell_nothing_about_reading() -> None:
    assert measure_reading(link("fp16")) is None
    assert measure_reading(link("fp16", n_pages=512, windows=(40,) * N_LAYERS)) is None


def test_the_kernels_of_the_repository_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LEAST_READ", 0)
    speed = measure_reading(link("fp16", HostPageKernels(tmp_path).page_kernels))
    assert speed is not None and 0 < speed < 1e12  # no memory of a host is as fast
