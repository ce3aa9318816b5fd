"""Many streams of a router at once, and the longest pause in any of them.

As a script, `python many_streams.py URL N FILE`: it prints their texts and that pause as JSON, and makes FILE once
every stream has its first tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import orjson
from openai import AsyncOpenAI

N_STREAMS = int(os.environ.pop("FASTDECODE_STREAMS", "8"))  # nodes refuse variables that they do not know
#: How many tokens of every stream have come before its S-node is lost, and how many a stream has, if the test gives no
#: other number.
N_BEFORE, N_TOKENS = 20, 200
_PROMPTS = [f"{word} was a {k} of" for k in range(16) for word in ("It", "There", "She", "The old man")]


class ManyStreams:
    """`n` streams, of which every fourth is sampled."""

    def __init__(self, api: AsyncOpenAI, n: int, n_tokens: int = N_TOKENS):
        self._api, self._length = api, n_tokens
        self.texts = [""] * n
        self.pause = 0.0  # seconds
        self.begun = asyncio.Event()  # all of them have N_BEFORE tokens
        self._n_tokens = [0] * n

    async def run(self) -> list[str]:
        """Their texts, once all have ended. Raises the error of one that has failed."""
        ends = await asyncio.gather(*(self._run(i) for i in range(len(self.texts))), return_exceptions=True)
        if errors := [error for error in ends if error is not None]:
            raise errors[0]
        return self.texts

    async def _run(self, i: int) -> None:
        stream = await self._api.completions.create(
            model="fastdecode-demo",
            prompt=_PROMPTS[i % len(_PROMPTS)],
            max_tokens=self._length,
            temperature=0.7 if i % 4 == 3 else 0.0,
            seed=i,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        last = None
        async for chunk in stream:
            now = time.monotonic()
            self.pause = max(self.pause, now - (last or now))
            last = now
            self.texts[i] += chunk.choices[0].text
            self._n_tokens[i] += 1
            if min(self._n_tokens) >= N_BEFORE:
                self.begun.set()


async def main(url: str, n: int, begun: Path) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:
        streams = ManyStreams(api, n)
        running = asyncio.create_task(streams.run())
        await streams.begun.wait()
        begun.touch()
        print(orjson.dumps({"texts": await running, "pause": streams.pause}).decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
