"""ResidentKernels with the page kernels compiled for the host, against the reference's float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.page_kernels_on_host import HostPageKernels
from gpu.page_reference import ReferencePageKernels

from fastdecode.kernels.gpu.page_kernels import BlockShape
from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.rows import ResidentRows
from fastdecode.transports.base import Hello

TOKENS = 520  # of a sequence before the steps: enough for several blocks of the kernel to share it
HEADS, SIZE = 8, 32
MANY = 9  # sequences: with 8 KV heads they have counters beyond the first 256 bytes


def link(load: Any) -> ResidentLink:
    geometry = Geometry(1, 32, 1, HEADS, HEADS, SIZE, "fp32")
    hello = Hello(geometry, kv_dtype="fp16", kv_bytes=0, max_seqs=MANY, softmax_scale=SIZE**-0.5, windows=(0,))
    copier: Any = None
    made = ResidentLink(hello, 50, torch.device("cpu"), lambda arena: ResidentKernels(arena, load, copier, int))
    made.arena.memory.zero_()
    return made


def answers(made: ResidentLink) -> Iterator[torch.Tensor]:
    """O of steps of MANY sequences, of one, and of MANY again, which have TOKENS tokens before, and a new one each."""
    random = torch.Generator().manual_seed(0)

    def step(sequences: list[int], pos: list[int], n_rows: int, flags: int) -> torch.Tensor:
        entries = np.array([(s, 1, at, n_rows, flags, 0) for s, at in zip(sequences, pos, strict=True)], ROW_DTYPE)
        rows = ResidentRows(made, entries, attending=bool(flags))
        n = len(sequences) * n_rows
        q, kv = torch.randn(n, HEADS * SIZE, generator=random), torch.randn(n, 2 * HEADS * SIZE, generator=random)
        o = torch.ones_like(q)
        rows.arm()
        rows.upload()
        rows.pass_layer(0, q, kv, o)
        rows.end()
        return o

    for sequence in range(MANY):
        step([sequence], [0], TOKENS, 0)
    lengths = [TOKENS] * MANY
    for n in (MANY, 1, MANY):
        yield step(list(range(n)), lengths[:n], 1, ROW_ATTEND)
        lengths[:n] = [length + 1 for length in lengths[:n]]


def test_steps_of_several_sizes_share_the_memory_of_partial_results(tmp_path: Path) -> None:
    """A step of few rows has partial results where one of more rows has its counters, which have to be zero."""
    shape = BlockShape(warps=4, stages=3, at_once=256)
    host = link(partial(HostPageKernels(tmp_path).page_kernels, shape=shape))
    for got, want in zip(answers(host), answers(link(ReferencePageKernels)), strict=True):
        assert torch.allclose(got, want, atol=4e-3)
