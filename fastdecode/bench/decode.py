"""Output tokens a second of the split system, and of the S-Part and the R-Part alone, at a given batch and context.

The two parts set a bound: the time of the slower one if each has cores of its own, the sum of both times if they take
turns on the same cores. The figure to watch is how near the split system comes to the bound. Peers run the same
checkpoint, batch and context in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.peers import PEERS
from fastdecode.bench.steps import run_step
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode, Split, split_machine
from fastdecode.daemon.machine import usable_cpus
from fastdecode.demo import model_dir
from fastdecode.engine.runner import Runner
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region
from fastdecode.spart import Model, SPart, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.batch import Chunk, SampleSpec, StepBatch
from fastdecode.transports._native import Port
from fastdecode.transports.base import Link, TransportError
from fastdecode.transports.registry import connect

COMMAND = ("decode", "output tokens/s of the split system, of S and R alone, and the ratio to the bound that they set")

_FILL_ROWS = 512  # appended by one call when the cache is filled
_TIMEOUT = 60.0  # seconds for a call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: the demo model")
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode at once, over all mini-batches")
    parser.add_argument("--context", type=int, default=512, help="cached tokens of each sequence")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded of each sequence in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mini-batches", type=int, help="default: as an S-node would choose")
    parser.add_argument(
        "--r-node", action="append", metavar="URL", help="R-node to use (repeatable); default: an embedded one"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument("--threads", type=int, help="attention threads of the embedded R-node")
    parser.add_argument("--s-threads", type=int, help="threads of the S-Part if it runs on a CPU")
    parser.add_argument("--cpus", help="CPUs of the attention threads, for example 1 or 4-7")
    parser.add_argument("--spin-us", type=int, help="microseconds that a waiter spins before it sleeps")
    parser.add_argument(
        "--peer", action="append", choices=sorted(PEERS), default=[], help="also run this peer (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    print_result(args, uvloop.run(_run(args)), _print_table)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(args.device)
    directory = args.model or model_dir()
    dtype = choose_dtype(args.dtype, read_config(directory).dtype, device)
    argv = ["--kv-dtype", args.kv_dtype]
    for flag, value in (
        ("--mini-batches", args.mini_batches),
        ("--threads", args.threads),
        ("--s-threads", args.s_threads),
        ("--cpus", args.cpus),
        ("--spin-us", args.spin_us),
    ):
        argv += [flag, str(value)] if value is not None else []
    for url in args.r_node or ():
        argv += ["--r-node", url]
    config = NodeConfig.from_args(argv)
    split = split_machine(config, s_on_gpu=device.type == "cuda")
    args.mini_batches = split.mini_batches
    if args.batch < args.mini_batches:
        raise ValueError("--batch is smaller than --mini-batches")
    all_threads = torch.get_num_threads()
    torch.set_num_threads(split.s_threads)
    model = load_model(directory, device=device, dtype=dtype, progress=True)
    node = None
    if not args.r_node:
        node = EmbeddedRNode(config, split)
        await node.start()
    try:
        bench = await _Bench.open(args, model, [node.url] if node else args.r_node)
        await bench.fill()
        peers = {
            name: PEERS[name](directory, args.batch, args.context, dtype, device, all_threads) for name in args.peer
        }
        samples: dict[str, list[float]] = {"split": [], "s": [], "r": [], **{name: [] for name in peers}}
        for i in tqdm(range(args.rounds + 1), desc="rounds", unit="round"):
            measured = {"split": await bench.split_round(), "s": bench.s_round(), "r": await bench.r_round()}
            for name, peer in peers.items():
                measured[name] = args.batch * args.steps / peer.round(args.steps)
            if i:  # the first round is a warm-up
                for name, value in measured.items():
                    samples[name].append(value)
        await bench.close()
        for peer in peers.values():
            peer.close()
    finally:
        if node:
            await node.stop()
    return _result(args, directory, dtype, split, bench, samples)


def _result(
    args: argparse.Namespace,
    directory: Path,
    dtype: torch.dtype,
    split: Split,
    bench: _Bench,
    samples: dict[str, list[float]],
) -> dict[str, Any]:
    in_turns = bench.model.device.type == "cpu" and split.s_threads + split.r_threads > len(usable_cpus())
    bounds = [1 / (1 / s + 1 / r) if in_turns else min(s, r) for s, r in zip(samples["s"], samples["r"], strict=True)]
    ratios = [x / bound for x, bound in zip(samples["split"], bounds, strict=True)]
    return {
        "model": directory.resolve().name,
        "parameters": bench.model.parameters,
        "batch": args.batch,
        "context": args.context,
        "mini_batches": args.mini_batches,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": args.kv_dtype,
        "s_threads": split.s_threads,
        "r_threads": sum(link.lease.threads for link in bench.links),
        "isa": bench.links[0].lease.isa,
        "rounds": args.rounds,
        "tokens_per_s": statistics.median(samples["split"]),
        "s_tokens_per_s": statistics.median(samples["s"]),
        "r_tokens_per_s": statistics.median(samples["r"]),
        "bound": "S + R" if in_turns else "max(S, R)",
        "bound_ratio": statistics.median(ratios),
        "spread": {name: [min(values), max(values)] for name, values in {**samples, "bound_ratio": ratios}.items()},
        "peers": {
            name: {
                "tokens_per_s": statistics.median(samples[name]),
                "ratio": statistics.median(a / b for a, b in zip(samples["split"], samples[name], strict=True)),
            }
            for name in args.peer
        },
    }


def _print_table(result: dict[str, Any]) -> None:
    shape = f"batch {result['batch']}, context {result['context']}, {result['mini_batches']} mini-batches"
    print(f"{result['model']}: {shape}, {result['dtype']}, KV {result['kv_dtype']}")
    rows = [
        ("split", result["tokens_per_s"]),
        ("S alone", result["s_tokens_per_s"]),
        ("R alone", result["r_tokens_per_s"]),
    ]
    rows += [(name, peer["tokens_per_s"]) for name, peer in result["peers"].items()]
    for name, tokens in rows:
        print(f"  {name:<14}{tokens:10.1f} tokens/s")
    print(f"  {'of the bound':<14}{100 * result['bound_ratio']:10.1f} %, the time of {result['bound']}")
    for name, peer in result["peers"].items():
        print(f"  split / {name}: {peer['ratio']:.2f}x")


class _NoRPart(Link):
    """Replaces a link while the S-Part is timed alone: its region has the same layout, and every message is answered at
    once."""

    def __init__(self, link: Link):
        self.url, self.geometry, self.lease, self.layout = link.url, link.geometry, link.lease, link.layout
        self._memory = Region.create(link.geometry)
        self.region = self._memory.view
        self.port = Port(self.region, geometry_tuple(link.geometry), 0, loopback=True)

    def arm(self, slot: int, entries: np.ndarray) -> None:
        self.port.arm(slot, entries.view(np.uint8))

    def ring(self, slot: int, layer: int) -> None:
        self.port.ring(slot, layer)

    def wait(self, slot: int, timeout: float) -> None:
        self.port.wait(slot, timeout)

    def disarm(self, slot: int) -> None:
        self.port.disarm(slot)

    def failure(self, status: int, message: str) -> TransportError:
        return TransportError(message)

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        pass

    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        pass

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        pass

    async def resize(self, n_pages: int) -> dict[str, int]:
        return {}

    async def stats(self) -> dict[str, int]:
        return {}

    async def closed(self) -> None:
        return None

    async def close(self) -> None:
        self.port.close()
        self._memory.close()


class _Bench:
    """`batch` sequences of `context` cached tokens, spread over the links and the mini-batches."""

    def __init__(self, args: argparse.Namespace, model: Model, links: list[Link]):
        self.args, self.model, self.links = args, model, links
        self.spart = SPart(model, links)
        self.s_alone = SPart(model, [_NoRPart(link) for link in links])
        self.runner = Runner()
        # (link, seq_index) of every sequence: neighbours are on different links; each mini-batch is sorted by link.
        everyone = [(i % len(links), i // len(links)) for i in range(args.batch)]
        self.mini_batches = [sorted(everyone[i :: args.mini_batches]) for i in range(args.mini_batches)]

    @classmethod
    async def open(cls, args: argparse.Namespace, model: Model, urls: list[str]) -> _Bench:
        rows = max(-(-args.batch // args.mini_batches), _FILL_ROWS)
        per_link = -(-args.batch // len(urls))
        tokens = args.context + args.steps + 1
        hello = model.hello(
            n_slots=args.mini_batches, max_rows=rows, kv_dtype=args.kv_dtype, kv_bytes=None, max_seqs=per_link
        )
        links = [await connect(url, dataclasses.replace(hello), None) for url in urls]
        for link in links:
            needed = per_link * -(-tokens // PAGE_TOKENS)
            if link.lease.n_pages < needed:
                raise ValueError(
                    f"{link.url} grants {link.lease.n_pages} KV pages, this batch and context need {needed}"
                )
        return cls(args, model, links)

    async def close(self) -> None:
        self.runner.stop()
        for link in (*self.links, *self.s_alone.links):
            await link.close()

    async def fill(self) -> None:
        """Cache `context` tokens of random K and V for every sequence, with calls that only append."""
        generator = torch.Generator().manual_seed(0)
        for link in self.links:
            y = link.layout
            rows = torch.randn(_FILL_ROWS * y.kv_row_bytes // 4, generator=generator)
            raw = rows.to(self.model.dtype).view(torch.uint8).numpy()[: _FILL_ROWS * y.kv_row_bytes]
            start = y.slot(0) + y.kv
            link.region[start : start + raw.nbytes] = memoryview(raw).cast("B")
        total = self.args.batch * self.args.context
        with tqdm(total=total, desc="filling the KV-cache", unit="token", unit_scale=True) as bar:
            for index, seq_index in sorted(s for batch in self.mini_batches for s in batch):
                for pos in range(0, self.args.context, _FILL_ROWS):
                    n = min(_FILL_ROWS, self.args.context - pos)
                    await asyncio.to_thread(self._append, self.links[index], seq_index, pos, n)
                    bar.update(n)

    def _append(self, link: Link, seq_index: int, pos: int, n: int) -> None:
        link.arm(0, np.array([(seq_index, 1, pos, n, 0, 0)], ROW_DTYPE))
        link.wait(0, _TIMEOUT)
        for layer in range(link.geometry.n_layers):
            link.ring(0, layer)
            link.wait(0, _TIMEOUT)

    async def _trim(self) -> None:
        for index, seq_index in (s for batch in self.mini_batches for s in batch):
            await self.links[index].trim(seq_index, 1, self.args.context)

    def _batch(self, slot: int, step: int) -> StepBatch:
        spec = SampleSpec(temperature=0.0)
        vocab = self.model.config.vocab_size
        return StepBatch(
            slot,
            [
                Chunk(link, seq_index, 1, self.args.context + step, [random.randrange(vocab)], False, spec)
                for link, seq_index in self.mini_batches[slot]
            ],
        )

    async def split_round(self) -> float:
        """Tokens a second of the split system."""

        async def drive(slot: int) -> None:
            for step in range(self.args.steps):
                await self.runner.submit(self.spart.step(self._batch(slot, step)))

        start = time.perf_counter()
        await asyncio.gather(*(drive(slot) for slot in range(self.args.mini_batches)))
        elapsed = time.perf_counter() - start
        await self._trim()
        return float(self.args.batch * self.args.steps / elapsed)

    def s_round(self) -> float:
        """Tokens a second of the S-Part alone, one mini-batch after the other as in the split system."""
        start = time.perf_counter()
        for step in range(self.args.steps):
            for slot in range(self.args.mini_batches):
                run_step(self.s_alone.step(self._batch(slot, step)))
        return float(self.args.batch * self.args.steps / (time.perf_counter() - start))

    async def r_round(self) -> float:
        """Tokens a second of the R-Part alone, with a call in progress in every slot."""
        elapsed = await asyncio.to_thread(self._r_steps)
        await self._trim()
        return float(self.args.batch * self.args.steps / elapsed)

    def _r_steps(self) -> float:
        layers = self.links[0].geometry.n_layers
        start = time.perf_counter()
        for step in range(self.args.steps):
            busy = []
            for slot, batch in enumerate(self.mini_batches):
                for index, link in enumerate(self.links):
                    rows = [
                        (seq_index, 1, self.args.context + step, 1, ROW_ATTEND, 0)
                        for i, seq_index in batch
                        if i == index
                    ]
                    if rows:
                        link.arm(slot, np.array(rows, ROW_DTYPE))
                        busy.append((slot, link))
            for layer in range(layers):
                for slot, link in busy:
                    link.wait(slot, _TIMEOUT)  # for the verdict or for the layer before
                    link.ring(slot, layer)
            for slot, link in busy:
                link.wait(slot, _TIMEOUT)
        return time.perf_counter() - start
