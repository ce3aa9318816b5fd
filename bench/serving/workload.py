"""Workloads: requests and their arrival times, from traces of real services or drawn at random."""

from __future__ import annotations

import csv
import gzip
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import orjson

#: Tokens that one hash id of a Mooncake trace stands for.
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload."""

    arrival: float  # seconds after the first
    prompt_tokens: int
    output_tokens: int
    #: Equal beginnings of two lists are shared prefixes of the prompts, each entry MOONCAKE_BLOCK tokens; may be empty.
    blocks: tuple[int, ...] = ()
    choices: int = 1  # answers that it asks for


def read_trace(path: Path) -> list[LoadRequest]:
    """Read a trace, gzipped or not, by its form: Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT's
    (Timestamp, Request tokens, Response tokens) or Mooncake's (JSON lines with timestamp, input_length, output_length,
    hash_ids). Arrivals count from the first request. Raises ValueError, OSError."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    try:
        requests = list(_mooncake(text) if text.lstrip().startswith("{") else _table(text))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of a known form: {error}") from None
    if not requests:
        raise ValueError(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival)
    return from_zero(requests)


def from_zero(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """The requests with arrivals that count from the first of them."""
    start = requests[0].arrival
    return [replace(request, arrival=request.arrival - start) for request in requests]


def _mooncake(text: str) -> Iterator[LoadRequest]:
    for line in text.splitlines():
        if line.strip():
            row = orjson.loads(line)
            blocks = tuple(row.get("hash_ids", ()))
            yield LoadRequest(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


def _table(text: str) -> Iterator[LoadRequest]:
    for row in csv.DictReader(io.StringIO(text)):
        if "ContextTokens" in row:
            arrival = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        else:
            arrival = float(row["Timestamp"])
            prompt, output = int(row["Request tokens"]), int(row["Response tokens"])
        if prompt > 0 and output > 0:  # BurstGPT keeps failed requests, with no response
            yield LoadRequest(arrival, prompt, output)


def fixed(n: int, prompt_tokens: int, output_tokens: int) -> list[LoadRequest]:
    """`n` equal requests that all arrive at once."""
    return [LoadRequest(0.0, prompt_tokens, output_tokens)] * n


def at_rate(requests: Sequence[LoadRequest], rate: float, burstiness: float, seed: int) -> list[LoadRequest]:
    """The requests in the same order with gamma-distributed gaps of mean 1/rate seconds and shape `burstiness`: 1 is a
    Poisson process, less is burstier. An infinite rate lets all arrive at once."""
    rng = random.Random(seed)
    arrival, result = 0.0, []
    for request in requests:
        result.append(replace(request, arrival=arrival))
        if rate != float("inf"):
            arrival += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return result


def sped_up(requests: Sequence[LoadRequest], factor: float) -> list[LoadRequest]:
    """The trace's own arrivals, `factor` times as fast."""
    return [replace(request, arrival=request.arrival / factor) for request in requests]


def scaled(requests: Sequence[LoadRequest], factor: float, longest: int | None) -> list[LoadRequest]:
    """Lengths times `factor`, at least 1 token; a request longer than `longest` tokens in all has its prompt cut."""
    result = []
    for request in requests:
        prompt = max(1, round(request.prompt_tokens * factor))
        output = max(1, round(request.output_tokens * factor))
        if longest is not None:
            output = min(output, max(1, longest // 2))
            prompt = min(prompt, longest - output)
        result.append(replace(request, prompt_tokens=prompt, output_tokens=output))
    return result


class Prompts:
    """Makes the token ids of prompts: random ids, but equal ones where the trace says that prefixes are shared."""

    def __init__(self, first_id: int, last_id: int, seed: int, block_scale: float = 1.0):
        """Ids are drawn from first_id..last_id. `block_scale`: the factor that lengths were scaled by."""
        self._ids = (first_id, last_id)
        self._seed = seed
        self._block = max(1, round(MOONCAKE_BLOCK * block_scale))

    def make(self, index: int, request: LoadRequest) -> list[int]:
        """The prompt of request number `index`."""
        ids: list[int] = []
        for block in request.blocks:
            if len(ids) >= request.prompt_tokens:
                break
            ids += self._draw(f"block {block}", self._block)
        if len(ids) < request.prompt_tokens:
            ids += self._draw(f"request {index}", request.prompt_tokens - len(ids))
        return ids[: request.prompt_tokens]

    def _draw(self, what: str, n: int) -> list[int]:
        first, last = self._ids
        if first == last:
            return [first] * n
        rng = random.Random(f"{self._seed} {what}")
        return [rng.randint(first, last) for _ in range(n)]
