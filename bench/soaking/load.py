"""The load of a soak: requests whose greedy answers are known, sent in several ways, and a count of the outcomes.

A request's right answer is what the same model answers to the same request alone. Rounding differs with the batch, so
an answer is cut before the first token whose runner-up is within MARGIN; there rounding could decide.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from fastdecode.bench.serving.client import metrics

MARGIN = 1e-3  # nats
_FIRST_ID, _LAST_ID = 300, 4000
_TIMEOUT = aiohttp.ClientTimeout(total=300)
#: How requests are sent, and how often: as one answer, as a stream, with n = 3, and as a stream that the client leaves.
_WAYS = {"whole": 4, "stream": 4, "three": 2, "left": 2}


@dataclass(slots=True)
class KnownRequest:
    """A prompt of token ids and its greedy answer of `max_tokens` tokens."""

    prompt: list[int]
    max_tokens: int
    text: str = ""


@dataclass(slots=True)
class Tally:
    """The outcomes of the requests of one S-node's clients."""

    answers: Counter[str] = field(default_factory=Counter)  # equal, wrong, left, cut (by a kill), failed
    problems: list[str] = field(default_factory=list)  # the first few wrong and failed ones
    tokens: int = 0  # of equal answers

    def record(self, outcome: str, problem: str = "") -> None:
        self.answers[outcome] += 1
        if problem and len(self.problems) < 5:
            self.problems.append(problem)


def make_requests(seed: int, longest: int) -> list[KnownRequest]:
    """Short prompts, prompts that start alike, and prompts of up to `longest` tokens."""
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(n)]

    beginning = ids(longest // 4)
    requests = [KnownRequest(ids(rng.randint(3, 60)), rng.randint(8, 200)) for _ in range(12)]
    requests += [KnownRequest(beginning + ids(rng.randint(1, 80)), rng.randint(4, 60)) for _ in range(8)]
    requests += [KnownRequest(ids(rng.randint(longest // 2, longest)), rng.randint(4, 60)) for _ in range(4)]
    return requests


class SoakClient:
    """Sends requests to one S-node."""

    def __init__(self, session: aiohttp.ClientSession, model: str):
        self.url = ""  # of the S-node, without /v1; may change
        self._session, self._model = session, model

    async def learn(self, requests: list[KnownRequest]) -> list[KnownRequest]:
        """Set the right answers of `requests`, each sent alone. Returns the answered requests. Raises RuntimeError."""
        known = []
        for request in requests:
            (choice,) = await self._whole(request, logprobs=2)
            tops = choice["logprobs"]["top_logprobs"]
            gaps = (max(top.values()) - min(top.values()) if len(top) > 1 else 0.0 for top in tops)
            request.max_tokens = next((i for i, gap in enumerate(gaps) if gap < MARGIN), len(tops))
            if request.max_tokens:
                (choice,) = await self._whole(request)
                request.text = choice["text"]
                known.append(request)
        return known

    async def send(self, request: KnownRequest, way: str, tally: Tally, rng: random.Random) -> None:
        """Send a request in one of the ways and record its outcome. Raises aiohttp.ClientError, OSError."""
        if way == "left":
            await self._leave(request, rng.randint(1, 10))
            tally.record("left")
            return
        if way == "stream":
            texts = [await self._stream(request)]
        else:
            texts = [choice["text"] for choice in await self._whole(request, n=3 if way == "three" else 1)]
        for text in texts:
            if text == request.text:
                tally.record("equal")
                tally.tokens += request.max_tokens
            else:
                size = f"{len(request.prompt)} + {request.max_tokens} tokens, sent as {way!r}"
                tally.record("wrong", f"{self._model}, {size}: {text!r} instead of {request.text!r}")

    async def metrics(self) -> dict[str, float]:
        """The S-node's gauges of its R-node, by name without prefix. Raises aiohttp.ClientError, OSError."""
        async with self._session.get(f"{self.url}/metrics", timeout=_TIMEOUT) as response:
            values = metrics(await response.text())
        mark = "fastdecode:r_node_"
        return {name.removeprefix(mark): value for name, value in values.items() if name.startswith(mark)}

    def _post(self, request: KnownRequest, **fields: Any) -> Any:
        body = {"model": self._model, "prompt": request.prompt, "max_tokens": request.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True} | fields
        return self._session.post(f"{self.url}/v1/completions", json=body, timeout=_TIMEOUT)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise RuntimeError(f"{self._model}: status {response.status}: {await response.text()}")

    async def _whole(self, request: KnownRequest, **fields: Any) -> list[dict[str, Any]]:
        async with self._post(request, **fields) as response:
            await self._check(response)
            answer = await response.json(loads=orjson.loads)
            choices: list[dict[str, Any]] = answer["choices"]
            return choices

    async def _stream(self, request: KnownRequest) -> str:
        text, ended = "", False
        async with self._post(request, stream=True) as response:
            await self._check(response)
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    ended = True
                    continue
                event = orjson.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"{self._model}: a stream ended with {event['error']}")
                text += "".join(choice["text"] for choice in event["choices"])
        if not ended:
            raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
        return text

    async def _leave(self, request: KnownRequest, chunks: int) -> None:
        """Read at most `chunks` chunks of a stream, then close the connection."""
        async with self._post(request, stream=True) as response:
            await self._check(response)
            async for line in response.content:
                chunks -= line.startswith(b"data: ")
                if chunks <= 0:
                    response.close()
                    return


class SoakLoad:
    """Clients of one S-node. While `up` is cleared they wait; a request that a kill cuts off is no failure."""

    def __init__(self, client: SoakClient, requests: list[KnownRequest], seed: int):
        self.client, self.tally = client, Tally()
        self.up = asyncio.Event()
        self.starts = 0  # how often the S-node was started
        self.requests, self._seed = requests, seed

    async def run(self, clients: int, until: asyncio.Event) -> None:
        """Keep `clients` requests under way until the event is set, then let them end."""
        await asyncio.gather(*(self._work(i, until) for i in range(clients)))

    async def _work(self, number: int, until: asyncio.Event) -> None:
        rng = random.Random(f"{self._seed} {number}")
        ways = random.Random(f"{self._seed} {number} ways")
        while not until.is_set():
            await self.up.wait()
            start = self.starts
            way = ways.choices(list(_WAYS), list(_WAYS.values()))[0]
            try:
                await self.client.send(rng.choice(self.requests), way, self.tally, rng)
            except (aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
                if start == self.starts and self.up.is_set():
                    await asyncio.sleep(0.5)  # the connection may end before the killing is noted here
                if start != self.starts or not self.up.is_set():
                    self.tally.record("cut")
                else:
                    self.tally.record("failed", f"{way}: {type(error).__name__}: {error}")
