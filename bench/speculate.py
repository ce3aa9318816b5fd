"""Speculative decoding against plain decoding: tokens a second of one sequence at a time.

Two engines with one model take turns, one of them with --speculate. There are three tasks: to quote prose that the
prompt gives and begins to repeat, to write code that the prompt gives before and after an edit, and to draw tokens at
temperature 1 after random ones, where hardly a guess is right. Both engines must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import re
import statistics
import time
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import torch
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode
from fastdecode.daemon.option_values import count, guesses, mtp_drafts
from fastdecode.daemon.split import Split
from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.state import sequence
from fastdecode.engine.state.request import EngineError, SamplingParams, TokenEvent
from fastdecode.spart import choose_device, choose_dtype
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.threads import pool_threads, set_threads
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.registry import connect

COMMAND = ("speculate", "speculative against plain decoding, one sequence at a time")

_ROWS = 128
_PROMPT_TOKENS = 400
_BEGUN_TOKENS = 16  # of a text that the model is to finish
_KV_BYTES = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--speculate", type=_suffix_guesses, default=8, metavar="suffix:K", help="as for fastdecode-node")
    add("--prose", type=Path, metavar="FILE", help="text to quote; default: fastdecode's README")
    add("--code", type=Path, metavar="FILE", help="code to edit; default: a file of fastdecode")
    add("--tokens", type=count, default=200, help="tokens to generate")
    add("--threads", type=count, help="threads of the S-Part; default: all cores")
    add("--rounds", type=count, default=5)


def _suffix_guesses(text: str) -> int:
    if mtp_drafts(text):
        raise argparse.ArgumentTypeError("drafts of an MTP head are not measured here")
    return guesses(text)


def run(args: argparse.Namespace) -> None:
    print_result(args, uvloop.run(_run(args)), _print_table)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['dtype']}, {result['threads']} thread(s); tokens/s, medians")
    print(f"{'task':<8} {'plain':>8} {'guessing':>9} {'ratio':>6} {'spread':>13} {'guesses right':>14}")
    for row in result["rows"]:
        low, high = row["spread"]
        right = f"{row['right']} of {row['guessed']}"
        print(
            f"{row['task']:<8} {row['plain']:8.1f} {row['guessing']:9.1f} {row['ratio']:6.2f} "
            f"{low:6.2f}..{high:.2f} {right:>14}"
        )


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    path = NodeConfig(model=args.model).model_path()
    set_threads(args.threads or torch.get_num_threads())
    backend, device = choose_backend("auto", path), choose_device("auto")
    dtype = choose_dtype("auto", backend.config.dtype, device)
    model = backend.load(device, dtype)
    set_threads(pool_threads(), model)
    greedy = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    tokenizer = Tokenizer.from_dir(path)
    prose = args.prose.read_text() if args.prose else str(metadata("fastdecode").json["description"])
    code = (args.code or Path(sequence.__file__)).read_text()
    rng = random.Random(0)
    tasks = {
        "quote": (_quote(tokenizer, prose), greedy),
        "edit": (_edit(tokenizer, code), greedy),
        "random": (
            [rng.randrange(model.config.vocab_size) for _ in range(_PROMPT_TOKENS)],
            dataclasses.replace(greedy, temperature=1.0, seed=0),
        ),
    }
    rates: dict[str, dict[str, list[float]]] = {task: {"plain": [], "guessing": []} for task in tasks}
    judged: dict[str, tuple[int, int]] = {}
    async with contextlib.AsyncExitStack() as stack:
        node = EmbeddedRNode(NodeConfig(), Split(s_threads=1, r_threads=1, mini_batches=1))
        stack.push_async_callback(node.stop)
        await node.start()
        engines = {}
        for name, most in (("plain", 0), ("guessing", args.speculate)):
            link = await connect(node.url, model.hello(1, _ROWS, "fp16", _KV_BYTES, 8), None)
            stack.push_async_callback(link.close)
            engine = Engine(
                backend.make_spart(model, [link]),
                [link],
                EngineOptions(SchedulerLimits(mini_batches=1, max_batch_tokens=_ROWS, max_batch_size=1), guesses=most),
            )
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines[name] = engine
        for round_ in tqdm(range(1 + args.rounds), desc="rounds", unit="round"):  # round 0 warms up
            for task, (prompt, params) in tasks.items():
                answers = []
                before = dataclasses.replace(engines["guessing"].stats.totals)
                for name, engine in sorted(engines.items(), reverse=round_ % 2 == 0):
                    answer, seconds = await _decode(engine, prompt, params)
                    answers.append(answer)
                    if round_ > 0:
                        rates[task][name].append((len(answer) - 1) / seconds)
                after = engines["guessing"].stats.totals
                judged[task] = (after.guessed_right - before.guessed_right, after.guessed - before.guessed)
                if answers[0] != answers[1]:
                    raise RuntimeError(f"the {task} task gave other tokens with guesses than without")
    return {
        "model": path.resolve().name,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": pool_threads(),
        "rows": [_row(task, rates[task], *judged[task]) for task in tasks],
    }


def _quote(tokenizer: Tokenizer, prose: str) -> list[int]:
    """A prompt of a text and its beginning, which a model goes on to repeat."""
    text = tokenizer.encode(prose)[:_PROMPT_TOKENS]
    return text + tokenizer.encode("\n\n", add_special_tokens=False) + text[:_BEGUN_TOKENS]


def _edit(tokenizer: Tokenizer, code: str) -> list[int]:
    """A prompt of code, the same code with another name for its longest word, and the beginning of that."""
    before = tokenizer.decode(tokenizer.encode(code)[: _PROMPT_TOKENS // 2])
    after = before.replace(max(re.findall(r"\w+", before), key=len), "renamed")
    heading = "\n```\n\nThe same file with another name:\n```python\n"
    begun = tokenizer.decode(tokenizer.encode(after)[:_BEGUN_TOKENS])
    return tokenizer.encode(f"```python\n{before}{heading}{after}{heading}{begun}")


async def _decode(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """The tokens after a prompt, and the seconds from the first one to the last."""
    events: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()
    engine.submit_choices(prompt, params, {"speculate": events.put_nowait})
    tokens, start, ended = [], 0.0, False
    while not ended:
        event = await events.get()
        if isinstance(event, EngineError):
            raise event
        tokens.append(event.token)
        start = start or time.perf_counter()
        ended = event.finish_reason is not None
    return tokens, time.perf_counter() - start


def _row(task: str, rates: dict[str, list[float]], right: int, guessed: int) -> dict[str, Any]:
    ratios = [guess / plain for plain, guess in zip(rates["plain"], rates["guessing"], strict=True)]
    plain, guessing = (statistics.median(rates[name]) for name in ("plain", "guessing"))
    return {
        "task": task,
        "plain": plain,
        "guessing": guessing,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "right": right,
        "guessed": guessed,
    }
