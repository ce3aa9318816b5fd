"""Prefill and decode on S-nodes of their own: what long prompts cost the streams that run beside them.

Two layouts serve the same requests on the same cores, one after the other. "together": one S-node on all cores.
"split": an S-node that decodes on the first core, one that prefills (`--prefill-at`) on the others. An R-node with one
thread shares the first core, or all cores, with them. Streams run all the time, and long prompts arrive at a steady
rate. "TBT" is the time between two events of a stream while prompts arrive; "quiet" is the same before the first
prompt. Every text is compared between the two layouts, which compute in fp32 with an fp32 KV-cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from fastdecode.bench import checkpoint
from fastdecode.bench.options import numbers, print_result
from fastdecode.bench.soaking.processes import Node
from fastdecode.demo import model_dir

COMMAND = (
    "split",
    "time between tokens while long prompts arrive: one S-node, or one that prefills and one that decodes",
)

_STREAM_PROMPT = 32  # tokens
_QUIET_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint; default: one of 30 M random parameters")
    parser.add_argument("--cores", type=numbers, default=[0, 1], metavar="LIST", help="the cores of all nodes")
    parser.add_argument("--streams", type=int, default=8, help="streams that run all the time")
    parser.add_argument("--prompts", type=int, default=6, help="long prompts that arrive")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--answer-tokens", type=int, default=8, help="tokens of the answer to each long prompt")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="time between two long prompts")
    parser.add_argument("--target-tbt-ms", type=float, default=200.0, help="that of the S-nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Serve in both layouts and print the times. Raises RuntimeError, OSError."""
    print_result(args, asyncio.run(_run(args)), _print_table)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    if len(args.cores) < 2:
        raise ValueError("--cores: two layouts need two cores or more")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = args.model or _random_model(folder / "model")
        layouts = {name: await _serve(args, folder, model, name) for name in ("together", "split")}
    texts = [layout.pop("texts") for layout in layouts.values()]
    shared = [min(len(a), len(b)) for a, b in zip(*texts, strict=True)]
    differing = sum(a[:n] != b[:n] for a, b, n in zip(*texts, shared, strict=True))
    before, after = (layouts[name]["tbt_ms"]["p99"] for name in ("together", "split"))
    names = ("cores", "streams", "prompts", "prompt_tokens", "every", "target_tbt_ms")
    return {name: getattr(args, name) for name in names} | {
        "layouts": layouts,
        "p99_ratio": before / after,
        "texts_compared": len(shared),
        "tokens_compared": sum(shared),
        "texts_that_differ": differing,
    }


def _random_model(directory: Path) -> Path:
    vocabulary = len(orjson.loads((model_dir() / "tokenizer.json").read_bytes())["model"]["vocab"])
    parser = argparse.ArgumentParser()
    checkpoint.add_arguments(parser)
    shape = {"layers": 8, "hidden": 512, "intermediate": 1536, "heads": 8, "kv-heads": 2, "vocab": vocabulary}
    words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    checkpoint.write(parser.parse_args(["--out", str(directory), "--dtype", "fp32", *words]))
    return directory


@contextlib.contextmanager
def _pinned(cores: list[int]) -> Iterator[None]:
    """Processes that are started run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.asynccontextmanager
async def _nodes(args: argparse.Namespace, folder: Path, model: Path, layout: str) -> AsyncIterator[str]:
    """The address of a layout's API."""
    first, others = args.cores[:1], args.cores[1:]
    url = f"shm://{folder}/{layout}.sock"
    argv = ["--model", str(model), "--r-node", url, "--port", "0", "--dtype", "fp32", "--kv-dtype", "fp32"]
    argv += ["--target-tbt-ms", str(args.target_tbt_ms), "--mini-batches", "1"]
    started: list[Node] = []

    def start(name: str, cores: list[int], *options: str) -> Node:
        with _pinned(cores):
            started.append(Node(folder / f"{layout}-{name}.log", *options))
        return started[-1]

    try:
        split = layout == "split"
        start("r", first if split else args.cores, "--role", "r", "--listen", url, "--threads", "1",
              "--kv-memory", "2GiB")  # fmt: skip
        if split:
            at = f"tcp://127.0.0.1:{_free_port()}"
            options = [*argv, "--s-threads", str(len(others)), "--prefill-listen", at]
            await start("prefill", others, *options).read(r"(http://\S+)/v1")
            node = start("decode", first, *argv, "--s-threads", "1", "--prefill-at", at)
        else:
            node = start("both", args.cores, *argv, "--s-threads", str(len(args.cores)))
        yield await node.read(r"(http://\S+)/v1")
    finally:
        for node in reversed(started):
            await node.end()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


async def _serve(args: argparse.Namespace, folder: Path, model: Path, layout: str) -> dict[str, Any]:
    """The times of one layout, and the texts, each a list with an entry for each event."""
    rng = random.Random(args.seed)

    def body(n_prompt: int, n_answer: int) -> dict[str, Any]:
        prompt = [rng.randrange(100, 900) for _ in range(n_prompt)]
        return {"prompt": prompt, "max_tokens": n_answer, "temperature": 0, "stream": True, "ignore_eos": True}

    streams = [body(_STREAM_PROMPT, 8000) for _ in range(args.streams)]
    prompts = [body(args.prompt_tokens, args.answer_tokens) for _ in range(args.prompts)]
    async with _nodes(args, folder, model, layout) as server, aiohttp.ClientSession(f"{server}/v1/") as session:
        await _ask(session, body(args.prompt_tokens, 2), [])  # compiles, faults in and connects what a first one does
        answers: list[list[tuple[float, str]]] = [[] for _ in range(args.streams + args.prompts)]
        running = [asyncio.create_task(_ask(session, ask, answers[i])) for i, ask in enumerate(streams)]
        while not all(answers[: args.streams]):
            await asyncio.sleep(0.05)
        begun = time.monotonic()
        await asyncio.sleep(_QUIET_SECONDS)
        first = time.monotonic()
        asked, waiting = [], []
        for i, ask in enumerate(prompts):
            await asyncio.sleep(max(0.0, first + i * args.every - time.monotonic()))
            asked.append(time.monotonic())
            waiting.append(asyncio.create_task(_ask(session, ask, answers[args.streams + i])))
        await asyncio.gather(*waiting)
        last = time.monotonic()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        metrics = await (await session.get(f"{server}/metrics")).text()
    taken = next(line for line in metrics.splitlines() if line.startswith("fastdecode:prompts_taken_total"))
    long = answers[args.streams :]
    if layout == "split" and float(taken.split()[-1]) <= args.prompts:
        raise RuntimeError(f"the prefill S-node has computed {taken.split()[-1]} of {args.prompts + 1} prompts")
    return {
        "quiet_tbt_ms": _spread(_gaps(answers[: args.streams], begun, first)),
        "tbt_ms": _spread(_gaps(answers[: args.streams], first, last)),
        "ttft_ms": _spread([1e3 * (answer[0][0] - at) for answer, at in zip(long, asked, strict=True)]),
        "stream_tokens_per_second": sum(first <= t <= last for s in answers[: args.streams] for t, _ in s)
        / (last - first),
        "texts": [[text for _, text in answer] for answer in answers],
    }


async def _ask(session: aiohttp.ClientSession, body: dict[str, Any], events: list[tuple[float, str]]) -> None:
    """Stream a completion: the time and the text of each event."""
    async with session.post("completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                events.append((time.monotonic(), event["choices"][0]["text"]))


def _gaps(streams: list[list[tuple[float, str]]], since: float, until: float) -> list[float]:
    """Milliseconds between neighbouring events of each stream, the second of which came in [since, until]."""
    pairs = (pair for events in streams for pair in itertools.pairwise(events))
    return [1e3 * (t - before) for (before, _), (t, _) in pairs if since <= t <= until]


def _spread(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 99)} | {"most": max(values)}


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['streams']} streams; {result['prompts']} prompts of {result['prompt_tokens']} tokens, one every "
        f"{result['every']:g} s; cores {','.join(map(str, result['cores']))}; milliseconds"
    )
    print(f"{'':10}{'TBT quiet p50/p99':>20}{'TBT p50/p99/most':>24}{'TTFT p50/p99':>20}{'stream tokens/s':>18}")
    for name, layout in result["layouts"].items():
        quiet, tbt, ttft = layout["quiet_tbt_ms"], layout["tbt_ms"], layout["ttft_ms"]
        columns = (
            f"{quiet['p50']:.1f} / {quiet['p99']:.1f}",
            f"{tbt['p50']:.1f} / {tbt['p99']:.1f} / {tbt['most']:.1f}",
            f"{ttft['p50']:.0f} / {ttft['p99']:.0f}",
            f"{layout['stream_tokens_per_second']:.0f}",
        )
        print(f"{name:10}{columns[0]:>20}{columns[1]:>24}{columns[2]:>20}{columns[3]:>18}")
    print(
        f"p99 of TBT: {result['p99_ratio']:.2f} times shorter when split; {result['texts_that_differ']} of "
        f"{result['texts_compared']} texts differ ({result['tokens_compared']} tokens compared)"
    )
