"""Structured output of a running server: are all answers valid, and what do token masks cost?

The command sends requests of twenty JSON schemas and judges every finished answer with the package jsonschema. Then it
times the steps of a full batch with masks and without, in turns, by the server's own metric of a step. Nothing else may
use the server meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.schemas import SCHEMAS, fault
from fastdecode.bench.serving.client import first_model, metrics

COMMAND = ("structured", "validity of structured output, and the cost of its token masks")

#: A schema whose answers do not end within any round, and whose masks change with every token.
_ENDLESS = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 100_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench structured`."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="the server, up to and with /v1")
    add("--model", metavar="NAME", help="model to ask for; default: the first that the server lists")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key to present")
    add("--requests", type=int, default=1000, metavar="N", help="requests that are judged, spread over the schemas")
    add("--batch", type=int, default=32, metavar="N", help="requests under way at once, in both parts")
    add("--max-tokens", type=int, default=1000, metavar="N", help="of a judged answer; a longer one counts as cut")
    add("--rounds", type=int, default=6, metavar="N", help="rounds with masks, and as many without")
    add("--tokens", type=int, default=64, metavar="N", help="tokens of each answer in a round")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Print the figures. Raises RuntimeError if an answer is not valid or a request fails, ValueError, OSError."""
    if min(args.requests, args.batch, args.max_tokens, args.tokens) < 1 or args.rounds < 0:
        raise ValueError("--requests, --batch, --max-tokens and --tokens must be at least 1, --rounds at least 0")
    result = uvloop.run(_run(args))
    print_result(args, result, _print_table)
    if wrong := [*result["invalid"], *result["failed"]]:
        raise RuntimeError(f"{len(wrong)} of {args.requests} answers are not valid: {wrong[0]}")


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    key = args.api_key_file.read_text().strip() if args.api_key_file else None
    url = args.url.rstrip("/")
    model = args.model or await first_model(url, key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as http:
        server = _Server(http, url, model)
        return {"url": url, "model": model} | await _judge(args, server) | await _time(args, server)


class _Server:
    def __init__(self, http: aiohttp.ClientSession, url: str, model: str):
        self._http, self._url, self._model = http, url, model

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's only choice. Raises RuntimeError for a status other than 200, OSError."""
        async with self._http.post(f"{self._url}/completions", json={"model": self._model} | body) as response:
            answer = await response.json()
        if response.status != 200:
            raise RuntimeError(answer["error"]["message"])
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    async def steps(self) -> tuple[float, float]:
        """Seconds of all steps since the server's start, and their number."""
        async with self._http.get(f"{self._url.removesuffix('/v1')}/metrics") as response:
            text = await response.text()
        values = metrics(text)
        return values["fastdecode:step_seconds_sum"], values["fastdecode:step_seconds_count"]


async def _judge(args: argparse.Namespace, server: _Server) -> dict[str, Any]:
    """Ask for answers of all schemas, and check those that the model finished."""
    gate = asyncio.Semaphore(args.batch)
    ends: Counter[str] = Counter()
    cut: Counter[str] = Counter()  # answers that --max-tokens ended, by schema
    failed: list[str] = []
    invalid: list[str] = []
    names = list(SCHEMAS)
    bar = tqdm(total=args.requests, desc="answers", unit="answer", disable=not sys.stderr.isatty())

    async def one(i: int) -> None:
        name = names[i % len(names)]
        body = {
            "prompt": "Answer: ",
            "max_tokens": args.max_tokens,
            "seed": args.seed + i,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}},
        }
        async with gate:
            try:
                choice = await server.complete(body)
            except (RuntimeError, aiohttp.ClientError, OSError, TimeoutError) as error:
                failed.append(f"{name}: {error}")
            else:
                ends[choice["finish_reason"]] += 1
                cut[name] += choice["finish_reason"] == "length"
                if choice["finish_reason"] == "stop" and (why := fault(choice["text"], SCHEMAS[name])):
                    invalid.append(f"{name}: {choice['text']!r}: {why}")
        bar.update()

    begun = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(args.requests)))
    bar.close()
    seconds = time.perf_counter() - begun
    return {
        "requests": args.requests,
        "schemas": len(SCHEMAS),
        "finished": ends["stop"],
        "cut": ends["length"],
        "cut_by_schema": {name: n for name, n in cut.items() if n},
        "invalid": invalid,
        "failed": failed,
        "seconds": seconds,
    }


async def _time(args: argparse.Namespace, server: _Server) -> dict[str, Any]:
    """Steps of a batch with masks and without, in turns."""
    kinds: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "masked": {"guided_json": _ENDLESS}}
    step_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
    rate: dict[str, list[float]] = {kind: [] for kind in kinds}
    body = {"max_tokens": args.tokens, "temperature": 1.0}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=not sys.stderr.isatty()):
        for kind, fields in kinds.items():
            begun, (seconds, steps) = time.perf_counter(), await server.steps()
            prompts: list[dict[str, Any]] = [{"prompt": f"Answer {i}: ", "seed": i} for i in range(args.batch)]
            await asyncio.gather(*(server.complete(body | fields | prompt) for prompt in prompts))
            after, steps_after = await server.steps()
            step_ms[kind].append(1e3 * (after - seconds) / (steps_after - steps))
            rate[kind].append(args.batch * args.tokens / (time.perf_counter() - begun))
    if not args.rounds:
        return {}
    return {
        "batch": args.batch,
        "step_ms": {kind: {"least": min(v), "median": statistics.median(v)} for kind, v in step_ms.items()},
        "tokens_per_s": {kind: {"most": max(v), "median": statistics.median(v)} for kind, v in rate.items()},
        "ratio": {
            "least": min(step_ms["masked"]) / min(step_ms["free"]),
            "median": statistics.median(step_ms["masked"]) / statistics.median(step_ms["free"]),
        },
    }


def _print_table(result: dict[str, Any]) -> None:
    finished, cut = result["finished"], result["cut"]
    invalid, failed = len(result["invalid"]), len(result["failed"])
    print(
        f"{result['requests']} requests of {result['schemas']} schemas in {result['seconds']:.1f} s: "
        f"{finished} finished, {invalid} of them not valid; {cut} cut by --max-tokens, {failed} failed"
    )
    if cut:
        print("cut, by schema: " + ", ".join(f"{name} {n}" for name, n in result["cut_by_schema"].items()))
    if "ratio" not in result:
        return
    for kind, name in (("free", "without masks"), ("masked", "with masks")):
        step, rate = result["step_ms"][kind], result["tokens_per_s"][kind]
        print(
            f"{name:>13}: a step of {result['batch']} takes {step['least']:.2f} ms at least, {step['median']:.2f} in "
            f"the median; {rate['most']:.0f} and {rate['median']:.0f} tokens/s"
        )
    print(f"        ratio: {result['ratio']['least']:.3f} at least, {result['ratio']['median']:.3f} in the median")
