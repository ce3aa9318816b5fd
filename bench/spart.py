"""The S-Part's time for a decode step, by format and memory of the weights, backend, LoRA adapters and batch size.

Every variant decodes the same sequences, a few tokens long, over its own link to one R-node, in interleaved rounds. The
time is that of the S-Part alone: waiting for the R-node is not counted. All variants are in memory at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file
from tqdm import tqdm

from fastdecode.bench import products
from fastdecode.bench.options import print_result
from fastdecode.bench.steps import run_step
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.decoding import DecodeShape, kv_bytes
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.option_values import count, format_bytes
from fastdecode.daemon.options import WEIGHTS
from fastdecode.daemon.split import Split
from fastdecode.spart import SPart, choose_device, choose_dtype
from fastdecode.spart.backend import Backend, choose_backend
from fastdecode.spart.linears.huge_pages import small_pages
from fastdecode.spart.lora.files import Adapter, read_adapter
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.spart.threads import set_threads
from fastdecode.transports.registry import connect

COMMAND = ("spart", "time of the S-Part by format of the weights and backend")

_WARM_UP = 2  # steps
_RANK = 16  # of the adapters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--weights", action="append", choices=WEIGHTS, help="format (repeatable); default: dense, int8 and int4")
    add("--backend", action="append", choices=("native", "transformers"),
        help="backend (repeatable), each with each format; default: native")  # fmt: skip
    add("--pages", action="append", choices=("huge", "small"),
        help="memory of weights on a CPU (repeatable), each with each format; default: huge")  # fmt: skip
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="as for fastdecode-node")
    add("--lora", type=count, metavar="N", help="time one random adapter for all sequences, then N adapters and the "
        "base model in equal shares, then the base model alone")  # fmt: skip
    add("--products", action="append", type=products.shape, metavar="OUTSxINS", help="in place of a model's steps, "
        "time products with a bf16 matrix of this shape (repeatable), beside oneDNN's and the speed at which the "
        "threads read memory")  # fmt: skip
    add("--batch", action="append", type=count,
        help="sequences, or rows of --products (repeatable); default: 1 and 32, or seven from 1 to 2048")  # fmt: skip
    add("--threads", type=count, help="threads of the S-Part; default: all cores")
    add("--steps", type=count, default=10, help="steps of each cell in a round")
    add("--rounds", type=count, default=5)


def run(args: argparse.Namespace) -> None:
    if args.products:
        print_result(args, products.run(args), products.print_table)
        return
    print_result(args, uvloop.run(_run(args)), _print_table)


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['model']}, activations in {result['dtype']}, {result['threads']} thread(s); ms a step, S-Part alone"
    )
    for row in result["rows"]:
        size = format_bytes(row["weight_bytes"])
        ratio = f"{row['speedup']:5.2f}x the first" if row["speedup"] else ""
        what = f"{row['backend']:<13}{row['weights']:<6}{row['pages']:<6}{size:>10}"
        cell = f"{what}  {row['adapters']:<12}batch {row['batch']:>3}"
        print(f"  {cell}{1e3 * row['seconds']:10.3f} ms{row['batch'] / row['seconds']:10.1f} tokens/s  {ratio}")


@dataclass(slots=True)
class _Variant:
    backend: str
    weights: str
    pages: str
    weight_bytes: int
    spart: SPart
    adapters: str  # what the sequences use, for people
    uses: Sequence[int | None] = (None,)  # the adapters of the sequences, again and again
    pos: dict[int, int] = field(default_factory=dict)  # cached tokens of each batch's sequences
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def step(self, batch: int, first: int, timed: bool) -> None:
        """Decode a token of each of `batch` sequences, whose indexes on the link begin at `first`."""
        pos = self.pos.get(batch, 0)
        spec = SampleSpec(temperature=0.0)
        chunks = [
            Chunk(0, first + i, 1, pos, [3 + (7 * i + pos) % 64], False, spec, adapter=use, state=first + i)
            for i, use in zip(range(batch), itertools.cycle(self.uses))
        ]
        output = run_step(self.spart.step(StepBatch(0, chunks)))
        self.pos[batch] = pos + 1
        if timed:
            self.seconds.setdefault(batch, []).append(output.s_seconds)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    path = NodeConfig(model=args.model).model_path()
    device = choose_device("auto")
    threads = args.threads or torch.get_num_threads()
    set_threads(threads)
    batches: list[int] = args.batch or [1, 32]
    firsts = {batch: sum(batches[:i]) for i, batch in enumerate(batches)}
    variants: list[_Variant] = []
    async with contextlib.AsyncExitStack() as stack:
        node = EmbeddedRNode(NodeConfig(), Split(s_threads=1, r_threads=1, mini_batches=1))
        stack.push_async_callback(node.stop)
        with _as_batch():
            await node.start()
        for name in args.backend or ["native"]:
            backend = choose_backend(name, path)
            dtype = choose_dtype(args.dtype, backend.config.dtype, device)
            for weights, pages in itertools.product(args.weights or ["dense", "int8", "int4"], args.pages or ["huge"]):
                adapters = _make_adapters(Path(stack.enter_context(TemporaryDirectory())), backend, args.lora or 0)
                with small_pages() if pages == "small" else contextlib.nullcontext():
                    model = backend.load(device, dtype, weights=weights, adapters=adapters)
                cached = DecodeShape(sum(batches), 1, (1 + args.rounds) * (_WARM_UP + args.steps), 1, "fp16")
                hello = model.hello(1, max(batches), "fp16", kv_bytes(model, cached), sum(batches))
                for used, uses in _uses(len(adapters)).items():
                    link = await connect(node.url, hello, None)
                    stack.push_async_callback(link.close)
                    spart = backend.make_spart(model, [link], state_slots=sum(batches))
                    variants.append(_Variant(name, weights, pages, model.weight_bytes, spart, used, uses))
        rounds = [False] + [True] * args.rounds
        for timed in tqdm(rounds, desc="rounds", unit="round"):
            for batch in batches:
                for variant in variants:
                    set_threads(threads, variant.spart.model)
                    for i in range(_WARM_UP + args.steps):
                        variant.step(batch, firsts[batch], timed and i >= _WARM_UP)
    rows = []
    for batch in batches:
        base = statistics.median(variants[0].seconds[batch])
        for variant in variants:
            seconds = statistics.median(variant.seconds[batch])
            rows.append(
                {
                    "backend": variant.backend,
                    "weights": variant.weights,
                    "pages": variant.pages,
                    "weight_bytes": variant.weight_bytes,
                    "adapters": variant.adapters,
                    "batch": batch,
                    "seconds": seconds,
                    "speedup": None if variant is variants[0] else base / seconds,
                }
            )
    return {"model": path.resolve().name, "dtype": str(dtype).removeprefix("torch."), "threads": threads, "rows": rows}


@contextlib.contextmanager
def _as_batch() -> Iterator[None]:
    """Let processes that start meanwhile not take the core of the process that wakes them. An R-node that attended on
    the S-Part's core, before the S-Part has returned from asking it, would count as the S-Part's time."""
    policy, unchanged = os.sched_getscheduler(0), os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, unchanged)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, unchanged)


def _uses(n_adapters: int) -> dict[str, Sequence[int | None]]:
    """The adapters that the sequences of each variant use, by the variant's name."""
    base: dict[str, Sequence[int | None]] = {"base model": (None,)}
    if not n_adapters:
        return base
    return {"1 adapter": (0,), f"{n_adapters} adapters": (None, *range(n_adapters))} | base


def _make_adapters(directory: Path, backend: Backend, n: int) -> list[Adapter]:
    """Write `n` random adapters that change all linears of the model's blocks."""
    adapters = []
    for i in range(n):
        path = directory / str(i)
        path.mkdir()
        config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
        (path / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, (outs, ins) in backend.linears().items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(_RANK, ins) * ins**-0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outs, _RANK) * 0.01
        save_file(tensors, path / "adapter_model.safetensors")
        adapters.append(read_adapter(str(i), path))
    return adapters
