"""Attention over pages in the GPU's memory by the page kernels, beside torch's over a dense cache, in its own process.

Arguments: a device, and cells such as 256:512 (sequences and their tokens). It prints a JSON object for each format and
cell: the microseconds of each, the page kernels' GB/s of K and V, and the largest difference of their answers, relative
to the largest element. On a CPU it runs the kernels as compiled for the host.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu.page_kernels_on_host import HostPageKernels

from fastdecode.kernels.gpu.page_kernels import LayerPages, PagedLayer, PagedRows, PageKernels
from fastdecode.region.contract import PAGE_TOKENS
from gpu_proof.peers import step_ms

_HEADS, _GROUP, _SIZE = 8, 4, 128  # Llama-3-8B


def cell(kernels: PageKernels, sequences: int, tokens: int, device: torch.device) -> dict[str, object]:
    c = kernels.layer
    blocks = -(-tokens // PAGE_TOKENS)
    page_bytes = c.n_kv_heads * c.chunk_bytes
    arena = torch.zeros(sequences * blocks * page_bytes, dtype=torch.uint8, device=device)
    table = torch.randperm(sequences * blocks, device=device).to(torch.int32).view(sequences, blocks)
    pages = LayerPages(arena.data_ptr(), page_bytes, table.data_ptr(), blocks)
    kv = torch.randn(sequences, tokens, 2, c.n_kv_heads, c.head_size, device=device, dtype=torch.float16)
    q = torch.randn(sequences, c.n_q_heads, 1, c.head_size, device=device, dtype=torch.float16)
    o, width = torch.empty_like(q), c.n_q_heads * c.head_size

    tables: list[torch.Tensor] = []  # of the device, as long as this function runs

    def rows(n: int, *columns: torch.Tensor) -> PagedRows:
        tables.append(torch.stack(torch.broadcast_tensors(*columns), -1).view(n, 4).to(torch.int32))
        tables.append(torch.tensor([n, n], dtype=torch.int32, device=device))
        return PagedRows(tables[-2].data_ptr(), tables[-1].data_ptr(), n, n)

    sequence, position = torch.arange(sequences, device=device)[:, None], torch.arange(tokens, device=device)
    zero = torch.zeros_like(position[:1])
    everything = rows(sequences * tokens, sequence, position, position, zero)
    kernels.append(_stream(device), kv.data_ptr(), kv[0, 0].numel(), everything, pages)
    last = rows(sequences, sequence, position[-1:], zero, zero)
    splits = kernels.splits(last, tokens)
    scratch = torch.zeros(kernels.scratch_bytes(last, splits), dtype=torch.uint8, device=device)

    def by_pages() -> None:
        at = q.data_ptr(), width, o.data_ptr(), width
        kernels.attend(_stream(device), *at, last, pages, scratch.data_ptr(), splits)

    k, v = kv.permute(2, 0, 3, 1, 4).contiguous()
    dense = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    us = step_ms(by_pages, device) * 1e3
    error = ((o - dense).abs().max() / dense.abs().max()).item()
    torch_us = step_ms(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), device) * 1e3
    found = {"kv_dtype": c.kv_dtype, "sequences": sequences, "tokens": tokens, "splits": splits, "pages_us": us}
    return found | {"gb_per_s": arena.nbytes / us / 1e3, "torch_us": torch_us, "difference": f"{error:.1e}"}


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@torch.inference_mode()
def main() -> None:
    device = torch.device(sys.argv[1])
    for kv_dtype in ("fp16", "bf16", "int8"):
        layer = PagedLayer(kv_dtype, "fp16", _HEADS * _GROUP, _HEADS, _SIZE, _SIZE**-0.5)
        with tempfile.TemporaryDirectory() as folder:
            if device.type == "cuda":
                kernels = PageKernels.load(layer, device.index or 0)
            else:
                kernels = HostPageKernels(Path(folder)).page_kernels(layer)
            for size in sys.argv[2:]:
                sequences, tokens = map(int, size.split(":"))
                print(json.dumps(cell(kernels, sequences, tokens, device)), flush=True)


if __name__ == "__main__":
    main()
