"""Streams that begin again and again while nodes come and go: `python steady_streams.py URL CA KEY N STOP`.

The program prints a line once every prompt has been answered in a calm. Once there is a file STOP, it prints how many
more streams it has read, and why some of them failed or differed, as JSON, and ends.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

import orjson
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

N_TOKENS = 300


async def streamed(api: AsyncOpenAI, i: int) -> str:
    """The text of a stream with prompt `i`. Raises OpenAIError."""
    stream = await api.completions.create(
        model="chat",
        prompt=f"It was a {i} of",
        max_tokens=N_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def main(url: str, ca: str, key: str, n: int, stop: Path) -> None:
    http = DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=ca))
    n_ended, wrong = 0, []
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=300, http_client=http) as api:
        calm = await asyncio.gather(*(streamed(api, i) for i in range(n)))

        async def client(i: int) -> None:
            nonlocal n_ended
            while not stop.exists():
                try:
                    text = await streamed(api, i)
                except OpenAIError as error:
                    text = repr(error)
                n_ended += 1
                if text != calm[i]:
                    wrong.append(text)

        print("calm", flush=True)
        await asyncio.gather(*(client(i) for i in range(n)))
    print(orjson.dumps({"ended": n_ended, "wrong": wrong}).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])))
