"""Drain an R-node under load: how long each stream pauses while its K and V move to another R-node, in steps.

Two R-nodes have equally many streams, and one of them is drained. A stream's pause is the number of steps of its
mini-batch between two of its tokens that had no row of it; without a move there is none. It is no whole number if the
stream goes on in another mini-batch. Times are those between two tokens of a stream, before and during the drain, of
all streams, moved or not. Some steps are long without a drain, because a machine does other things too; so the longest
time during the drain stands beside the longest one of about as many undisturbed steps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from fastdecode.bench.options import print_result
from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.daemon.process import freeze
from fastdecode.demo import model_dir
from fastdecode.engine.engine import Engine
from fastdecode.engine.request import EngineError, SamplingParams, TokenEvent
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import SPart, choose_device, choose_dtype, load_model, read_config
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.threads import set_threads
from fastdecode.transports.registry import connect

COMMAND = ("drain", "how long streams pause while an R-node is drained, in steps and in milliseconds")

#: Tokens of each stream before the drain begins, for the times of undisturbed steps: about as many as a drain of 64
#: streams takes.
_BEFORE = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: the demo model")
    parser.add_argument("--streams", type=int, default=64, help="streams on each of the two R-nodes")
    parser.add_argument("--context", type=int, default=300, help="prompt tokens of each stream")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="tcp")
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp16")
    parser.add_argument("--kv-memory", type=int, default=1 << 30, metavar="BYTES", help="of each R-node")
    parser.add_argument("--prefault", action="store_true", help="fault in the memory of both R-nodes first")
    parser.add_argument("--s-threads", type=int, default=1, help="threads of the S-Part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the drain and print its figures. Raises RuntimeError, ValueError, TransportError."""
    print_result(args, uvloop.run(_run(args)), _print_table)


class _Stream:
    """The times of a stream's tokens, and how many steps of the engine were complete then."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.tokens: list[tuple[float, int]] = []
        self.fault: EngineError | None = None

    def take(self, event: TokenEvent | EngineError | None) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append((time.perf_counter(), self._engine.totals.steps))
        elif event is not None:
            self.fault = event

    def gaps(self, since: float, until: float) -> list[tuple[float, int]]:
        """Seconds and steps between neighbouring tokens, the second of which came in [since, until]."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [(t - before, step - seen) for (before, seen), (t, step) in pairs if since <= t <= until]


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    set_threads(args.s_threads)
    directory = args.model or model_dir()
    device = choose_device("cpu")
    dtype = choose_dtype("auto", read_config(directory).dtype, device)
    model = in_own_thread(load_model, directory, device=device, dtype=dtype)
    set_threads(args.s_threads, model)
    rows = max(256, 2 * args.streams)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        links = []
        for name in ("a", "b"):
            url = f"shm://{folder}/{name}.sock" if args.transport == "shm" else "tcp://127.0.0.1:0"
            child = RNodeChild(url, 50, args.kv_memory, None, prefault=args.prefault)
            stack.callback(child.close)
            hello = model.hello(args.mini_batches, rows, args.kv_dtype, args.kv_memory // 2, 4 * args.streams)
            links.append(await connect(child.url, hello, None))
            stack.push_async_callback(links[-1].close)
        for link in links:
            while (await link.stats())["prefault_left"]:
                await asyncio.sleep(0.01)
        engine = Engine(
            SPart(model, links),
            links,
            mini_batches=args.mini_batches,
            max_batch_size=2 * args.streams,
            max_batch_tokens=rows,
        )
        await engine.start()
        stack.push_async_callback(engine.stop)
        freeze()
        return await _drain(args, engine, links)


async def _drain(args: argparse.Namespace, engine: Engine, links: list[Any]) -> dict[str, Any]:
    rng = random.Random(args.seed)
    vocabulary = engine.spart.config.vocab_size
    streams = [_Stream(engine) for _ in range(2 * args.streams)]
    most = engine.max_model_len - args.context
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    running = []
    for i, stream in enumerate(streams):
        prompt = [rng.randrange(3, vocabulary) for _ in range(args.context)]
        running += engine.submit_choices(prompt, params, {f"drain-{i}": stream.take})

    async def tokens(n: int) -> None:
        """Wait until every stream has `n` more tokens."""
        goals = [len(stream.tokens) + n for stream in streams]
        while any(len(stream.tokens) < goal for stream, goal in zip(streams, goals, strict=True)):
            if fault := next((stream.fault for stream in streams if stream.fault), None):
                raise RuntimeError(f"a stream has failed: {fault}")
            if not all(seq in engine._live for seq in running):
                raise RuntimeError("a stream has ended before the drain was over: --context is too long for the model")
            await asyncio.sleep(0.001)

    await tokens(2)  # prompts lengthen the first steps
    on_first = len(engine.scheduler.running_on(engine.cluster.nodes[0]))
    began = time.perf_counter()
    await tokens(_BEFORE)
    drained = time.perf_counter()
    pages = engine.cluster.nodes[0].pages_used
    await engine.r_nodes.drain(0)
    ended = time.perf_counter()
    await tokens(2)
    totals = engine.stats.totals
    before = [gap for stream in streams for gap in stream.gaps(began, drained)]
    longest = [max(stream.gaps(drained, time.perf_counter())) for stream in streams]
    most_before, most_during = (max(seconds for seconds, _ in gaps) for gaps in (before, longest))
    missed = [max(0.0, round(steps / args.mini_batches - 1, 2)) for _, steps in longest]
    for seq in running:
        engine.cancel(seq)
    usual = statistics.median(seconds for seconds, _ in before)
    return {
        "streams": on_first,
        "transport": args.transport,
        "moved": totals.moved,
        "recomputed": totals.recomputed,
        "mebibytes": pages * links[0].lease.page_bytes / 2**20,
        "drain_seconds": ended - drained,
        "gap_ms_before": {"median": usual * 1e3, "longest": most_before * 1e3},
        "gap_ms_during": {
            "median": statistics.median(seconds for seconds, _ in longest) * 1e3,
            "longest": most_during * 1e3,
        },
        "steps_missed": {f"{n:g}": missed.count(n) for n in sorted(set(missed))},
        "longest_pause_steps": max(missed),
        "longest_beyond_undisturbed_in_usual_steps": (most_during - most_before) / usual,
        "longest_beyond_median_in_usual_steps": most_during / usual - 1,
    }


def _print_table(result: dict[str, Any]) -> None:
    before, during = result["gap_ms_before"], result["gap_ms_during"]
    print(
        f"{result['moved']} of {result['streams']} streams moved over {result['transport']}, {result['recomputed']} "
        f"recomputed; {result['mebibytes']:.0f} MiB in {result['drain_seconds']:.2f} s"
    )
    print(f"between two tokens: {before['median']:.1f} ms before (median; longest {before['longest']:.1f})")
    print(
        f"longest of each stream during the drain: {during['median']:.1f} ms (median; longest {during['longest']:.1f})"
    )
    print("steps missed by a stream: " + ", ".join(f"{n}: {k} streams" for n, k in result["steps_missed"].items()))
    beyond = result["longest_beyond_undisturbed_in_usual_steps"], result["longest_beyond_median_in_usual_steps"]
    print(f"longest pause: {beyond[0]:.1f} usual steps beyond the longest before, {beyond[1]:.1f} beyond the median")
