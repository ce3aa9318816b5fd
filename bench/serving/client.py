"""The client: sends each request when it is due, independently of earlier ones, and records when tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from tqdm import tqdm

from fastdecode.bench.serving.workload import LoadRequest, Prompts

#: Gauges of /metrics that are sampled; each server has a prefix of its own.
_GAUGES = (":num_requests_running", ":num_requests_waiting", ":kv_cache_usage_perc")


@dataclass(slots=True)
class TimedAnswer:
    """The result of one request. Times are seconds since the run's start."""

    request: LoadRequest
    sent: float
    chunks: list[float] = field(default_factory=list)  # when each chunk with a token arrived
    output_tokens: int = 0  # as the server counts them; else one for each chunk
    finished: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.chunks)


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test."""

    url: str  # up to and with /v1
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request's body


@dataclass(slots=True)
class LoadRun:
    """The answers to one workload, and samples of the server's own metrics."""

    answers: list[TimedAnswer]
    seconds: float
    samples: list[dict[str, float]]  # one about every second: `t` and the gauges of /metrics


async def first_model(url: str, api_key: str | None) -> str:
    """The name of the first model that the server lists. Raises RuntimeError."""
    try:
        async with aiohttp.ClientSession(headers=_headers(api_key)) as session, session.get(f"{url}/models") as got:
            got.raise_for_status()
            return str((await got.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise RuntimeError(f"no OpenAI-compatible server at {url}: {error}") from None


async def run(
    server: Target,
    requests: Sequence[LoadRequest],
    prompts: Prompts,
    *,
    concurrency: int | None,
    timeout: float,
    deadline: float | None,
    progress: bool,
) -> LoadRun:
    """Send every request at its arrival time; at most `concurrency` are in progress at once (None: any number).

    A request is given up after `timeout` seconds. After `deadline` seconds nothing more is sent and what is under way
    is given up: the answers so far are kept.
    """
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # servers close idle connections when they like
    limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0))
    answers: list[TimedAnswer] = []
    samples: list[dict[str, float]] = []
    # All bodies are made before the start, so that this work does not delay a request.
    bodies = [_body(server, prompts.make(i, request), request.output_tokens) for i, request in enumerate(requests)]
    start = time.perf_counter()
    bar = tqdm(total=len(requests), desc="requests", unit="req", disable=not progress)

    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=_headers(server.api_key), read_bufsize=1 << 18
    ) as session:

        async def one(request: LoadRequest, data: bytes) -> None:
            await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
            async with gate:
                answer = TimedAnswer(request, time.perf_counter() - start)
                answers.append(answer)
                try:
                    await _stream(session, f"{server.url}/completions", data, answer, start)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    answer.error = f"{type(error).__name__}: {error}"
                except asyncio.CancelledError:
                    answer.error = "given up at the end of the run"
                    raise
                finally:
                    bar.update()

        sampling = asyncio.create_task(_sample(session, server.url, samples, start))
        tasks = [asyncio.create_task(one(*pair)) for pair in zip(requests, bodies, strict=True)]
        try:
            await asyncio.wait(tasks, timeout=deadline)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            seconds = time.perf_counter() - start
        finally:
            sampling.cancel()
            bar.close()
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return LoadRun(answers, seconds, samples)


def _body(server: Target, prompt: list[int], output_tokens: int) -> bytes:
    """A request for exactly `output_tokens` greedy tokens."""
    fields: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": output_tokens}
    fields |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return orjson.dumps(fields | server.extra)


async def _stream(session: aiohttp.ClientSession, url: str, data: bytes, answer: TimedAnswer, start: float) -> None:
    """Send one request and read its server-sent events to the end."""
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            answer.error = f"HTTP {response.status}: {text}"
            return
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            now = time.perf_counter() - start
            if payload == b"[DONE]":
                break
            event = orjson.loads(payload)
            if "error" in event:
                answer.error = str(event["error"])
                return
            if usage := event.get("usage"):
                answer.output_tokens = int(usage.get("completion_tokens") or 0)
            if event.get("choices"):
                answer.chunks.append(now)
                answer.finished = now
    if not answer.chunks:
        answer.error = answer.error or "the stream ended without a token"
    answer.output_tokens = answer.output_tokens or len(answer.chunks)


async def _sample(session: aiohttp.ClientSession, url: str, samples: list[dict[str, float]], start: float) -> None:
    """Read the server's gauges about once a second, if it has a /metrics."""
    where = url.removesuffix("/v1") + "/metrics"
    while True:
        try:
            async with session.get(where) as response:
                if response.status != 200:
                    return
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return
        gauges = {name.partition(":")[2]: value for name, value in metrics(text).items() if name.endswith(_GAUGES)}
        samples.append({"t": time.perf_counter() - start} | gauges)
        await asyncio.sleep(1.0)


def metrics(text: str) -> dict[str, float]:
    """The values in the text of /metrics, by name. Values that differ in their labels alone are added up."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
