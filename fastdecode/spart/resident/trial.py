"""A trial of the kernels of KV pages on this device: a kernel that computes anything else here must serve nobody."""

from __future__ import annotations

import time

import numpy as np
import torch

from fastdecode.kernels.gpu.cupy_kernels import KernelError
from fastdecode.kernels.gpu.page_kernels import PagedLayer
from fastdecode.region.contract import PAGE_TOKENS, ROW_DTYPE
from fastdecode.spart.prefill.scoring import mask_of_rows, scoring_of
from fastdecode.spart.resident.kernels import ResidentTables
from fastdecode.spart.resident.layers import attention_layers
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.rows import ResidentRows
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.shape import Heads

_ROWS = PAGE_TOKENS + PAGE_TOKENS // 4  # more than a page
#: The most blocks of one sequence that a measurement of their reading takes, its repetitions, and the bytes from which
#: it means something.
_READ_BLOCKS, _READ_TIMES, _LEAST_READ = 2048, 5, 16 << 20
#: Of the largest element of O. int8 rounds K, V, Q and P to 8 bits, by under a hundredth of a row's largest element.
_TOLERANCE = 0.1


def try_kernels(link: ResidentLink) -> None:
    """Append random rows of one sequence to the pages of a new link, let them attend, and compare with torch, for each
    kind of layer. Raises KernelError where they differ."""
    layers = attention_layers(link.arena.hello)
    entries = np.zeros(1, ROW_DTYPE)
    blocks = min(2, link.lease.n_pages // max(1, link.arena.lists.n_sections))
    entries["tag"], entries["n_rows"] = 1, min(_ROWS, blocks * PAGE_TOKENS)
    rows = ResidentRows(link, entries, attending=True)
    rows.arm()
    try:
        rows.upload()
        kv_layers = link.arena.kv_layers
        own = (i for i, kv_layer in enumerate(kv_layers) if kv_layer == i)
        for i in {layers[i]: i for i in own}.values():
            _try_layer(link, rows, int(entries["n_rows"][0]), i, layers[i])
    finally:
        rows.end()
        link.arena.lists.free(0, 1)


def measure_reading(link: ResidentLink) -> float | None:
    """Bytes a second at which the kernels read the pages of a new link, which hold nothing yet. None: no layer reads
    whole sequences, or there are too few pages for a measurement."""
    arena, lists = link.arena, link.arena.lists
    blocks = min(lists.n_pages // lists.n_sections, _READ_BLOCKS)
    whole = [(i, layer) for i, layer in enumerate(attention_layers(arena.hello)) if not (layer.window or layer.segment)]
    if not whole:
        return None
    i, layer = whole[0]
    n_bytes = blocks * layer.n_kv_heads * layer.chunk_bytes
    if n_bytes < _LEAST_READ:
        return None
    device = arena.memory.device
    rows = torch.tensor([0, blocks * PAGE_TOKENS - 1, 0, 0], dtype=torch.int32, device=device)
    pages = torch.arange(blocks, dtype=torch.int32, device=device).expand(lists.n_sections, 1, blocks).contiguous()
    counts = torch.ones(2, dtype=torch.int32, device=device)
    tables = ResidentTables(rows, counts, pages, blocks * PAGE_TOKENS, attending=True)
    q, kv, o = (
        torch.zeros(1, heads * layer.head_size, dtype=TORCH_DTYPES[layer.act_dtype], device=device)
        for heads in (layer.n_q_heads, 2 * layer.n_kv_heads, layer.n_q_heads)
    )
    seconds = []
    for _ in range(_READ_TIMES):
        o.cpu()  # waits for the device
        begun = time.perf_counter()
        link.kernels.pass_layer(i, q, kv, o, tables)
        o.cpu()
        seconds.append(time.perf_counter() - begun)
    return n_bytes / min(seconds)


def _try_layer(link: ResidentLink, rows: ResidentRows, n: int, i: int, layer: PagedLayer) -> None:
    device, dtype, size = link.arena.memory.device, TORCH_DTYPES[layer.act_dtype], layer.head_size
    generator = torch.Generator().manual_seed(i)
    q, k, v = (
        torch.randn(heads, n, size, generator=generator).to(device, dtype)
        for heads in (layer.n_q_heads, layer.n_kv_heads, layer.n_kv_heads)
    )
    o = torch.full((n, layer.n_q_heads * size), torch.nan, dtype=dtype, device=device)
    q_rows, kv_rows = _as_rows(q), _as_rows(torch.cat([k, v]))  # which the device may read after the call
    rows.pass_layer(i, q_rows, kv_rows, o)
    wanted = _as_rows(_attention(link, i, layer, q.float(), k.float(), v.float()))
    furthest = float((o.float() - wanted).abs().max() / wanted.abs().max())
    if not furthest < _TOLERANCE:  # also if it is no number
        raise KernelError(
            f"the kernels of KV pages in {layer.kv_dtype} with heads of {size} differ from torch by {furthest:.2g} on "
            "this device"
        )


def _as_rows(heads: torch.Tensor) -> torch.Tensor:
    """[heads, rows, size] -> [rows, heads * size]."""
    return heads.transpose(0, 1).flatten(1).contiguous()


def _attention(
    link: ResidentLink, i: int, layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """O [heads, rows, size] of a sequence's rows q, k and v, fp32 [heads, rows, size]."""
    options, n_layers = link.arena.hello.layers, len(link.arena.hello.windows)
    heads = Heads(layer.n_q_heads, layer.n_kv_heads, layer.head_size, layer.head_size)
    scoring = scoring_of(options, i, n_layers, heads, q.device)
    mask = mask_of_rows(layer.window, layer.segment, 0, q.shape[1], 0, q)
    return scoring.attend(q.unflatten(0, (-1, layer.group)), k, v, mask, 0, 0, layer.softmax_scale).flatten(0, 1)
