"""Decode steps of other systems on the same device, in a process of their own.

    kv on the GPU       the same decoder, its K and V in the GPU's memory, torch's fused attention
    kv copied           the same decoder; K and V in pinned RAM, copied layer by layer into two buffers while the layer
                        before is computed, and attention on the GPU
    transformers        its static cache

On a GPU each step is captured, and the time is that of its replay. Arguments: a model's directory, a device, a dtype,
and cells such as 32:512 (batch and cached tokens). It prints a JSON object for each peer of each cell.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_REPEATS = 5


class GPUCache:
    """A RowExchange that attends on the S-Part's device to K and V that lie there."""

    def __init__(self, model: Any, batch: int, context: int):
        self.device, shape = model.device, model.config
        self.heads, self.kv_heads, self.size = shape.n_q_heads, shape.n_kv_heads, shape.head_size
        rows = [torch.zeros(batch, n, dtype=model.dtype, device=self.device) for n in shape.row_sizes]
        self.q, self.kv, self.o = rows
        self.batch, self.last = batch, context
        self.prepare(shape.n_layers, (batch, 2 * self.kv_heads, context + 1, self.size), model.dtype)

    def prepare(self, layers: int, size: tuple[int, ...], dtype: torch.dtype) -> None:
        self.caches = [torch.randn(size, dtype=dtype, device=self.device) for _ in range(layers)]

    def cache(self, layer: int) -> torch.Tensor:
        """K and V of a layer with the step's own rows, on the device: [batch, K heads, then V heads, tokens, size]."""
        self.caches[layer][:, :, self.last].copy_(self.kv.view(self.batch, -1, self.size))
        return self.caches[layer]

    def post(self, layer: int, timeout: float = 0.0) -> None:
        k, v = self.cache(layer).split(self.kv_heads, dim=1)
        q = self.q.view(self.batch, self.kv_heads, -1, self.size)  # the query heads of a group read K and V once
        self.o.copy_(F.scaled_dot_product_attention(q, k, v).reshape(self.batch, -1))

    def wait(self, timeout: float = 0.0) -> None:
        """The rows are there."""


class CopiedCache(GPUCache):
    """K and V in pinned RAM. A layer's are copied to the device while the layer before it is computed."""

    def prepare(self, layers: int, size: tuple[int, ...], dtype: torch.dtype) -> None:
        self.on_gpu = self.device.type == "cuda"
        one = torch.randn(size, dtype=dtype)
        self.caches = [torch.empty(size, dtype=dtype, pin_memory=self.on_gpu).copy_(one) for _ in range(layers)]
        self.buffers = [torch.empty(size, dtype=dtype, device=self.device) for _ in range(2)]
        self.rows = torch.empty(size[0], size[1], size[3], dtype=dtype, pin_memory=self.on_gpu)
        self.copies = torch.cuda.Stream(self.device) if self.on_gpu else None

    def begin(self) -> None:
        """Before the first layer of a step."""
        self._fetch(0)

    def _fetch(self, layer: int) -> None:
        """Copy a layer, once the attention that has used the buffer is done."""
        if self.copies is None:
            self.buffers[layer % 2].copy_(self.caches[layer])
            return
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.buffers[layer % 2].copy_(self.caches[layer], non_blocking=True)

    def cache(self, layer: int) -> torch.Tensor:
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
        if layer + 1 < len(self.caches):
            self._fetch(layer + 1)
        buffer, rows = self.buffers[layer % 2], self.kv.view(self.batch, -1, self.size)
        buffer[:, :, self.last].copy_(rows)
        self.rows.copy_(rows, non_blocking=True)  # the host places them in its cache
        return buffer


def step_ms(step: Callable[[], object], device: torch.device) -> float:
    """The time of a step, in milliseconds: the median of several."""
    if device.type == "cpu":
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for _ in range(1 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def by_decoder(spart: Any, cache: GPUCache) -> float:
    device, n = spart.model.device, cache.batch
    inputs = {
        "tokens": torch.randint(5, spart.config.vocab_size, (n,), device=device),
        "positions": torch.full((n,), cache.last, device=device),
        "last rows": torch.arange(n, device=device),
    }

    def step() -> None:
        if isinstance(cache, CopiedCache):
            cache.begin()
        spart.whole_step(inputs, cache).argmax(-1)

    return step_ms(step, device)


def by_transformers(model: Any, batch: int, context: int) -> float:
    from transformers import StaticCache

    device, config = model.device, model.config
    cache: Any = StaticCache(config=config, max_cache_len=context + 1)
    ids = torch.randint(5, config.vocab_size, (batch, 1), device=device)
    positions = torch.full((batch, 1), context, device=device)
    model(ids, cache=cache)  # makes the tensors of the layers
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()

    def step() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)
        model(ids, cache=cache, position_ids=positions).logits.argmax(-1)

    return step_ms(step, device)


def report(peer: str, measure: Callable[[int, int], float], batch: int, context: int) -> None:
    """Print a peer's numbers for a cell, or why it has none."""
    found: dict[str, Any] = {"peer": peer, "batch": batch, "context": context}
    try:
        ms = measure(batch, context)
        found |= {"step_ms": ms, "tokens_per_s": batch / ms * 1e3}
    except Exception as error:  # too large for the memory, for example
        found["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report_decoder(directory: str, device: str, dtype: torch.dtype, cells: list[tuple[int, int]]) -> None:
    from fastdecode.spart import SPart, load_model

    spart = SPart(load_model(directory, device=device, dtype=dtype), [])
    for cell in cells:
        for peer, kind in (("kv on the GPU", GPUCache), ("kv copied", CopiedCache)):
            report(peer, lambda *cell, kind=kind: by_decoder(spart, kind(spart.model, *cell)), *cell)


def report_transformers(directory: str, device: str, dtype: torch.dtype, cells: list[tuple[int, int]]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    for cell in cells:
        report("transformers", functools.partial(by_transformers, model), *cell)


@torch.inference_mode()
def main() -> None:
    directory, device, name, *texts = sys.argv[1:]
    cells = [(int(batch), int(context)) for batch, context in (text.split(":") for text in texts)]
    for of in (report_decoder, report_transformers):
        of(directory, device, getattr(torch, name), cells)


if __name__ == "__main__":
    main()
