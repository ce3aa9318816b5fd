"""Streams that other S-nodes continue with the K and V that they have on R-nodes: real processes, in bf16 with an int8
cache, where tokens that are computed again may change."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest
from nodes.node_process import fetch
from openai import AsyncOpenAI

SECRET = b"a secret of S-nodes and routers"
N_STREAMS = int(os.environ.pop("FASTDECODE_STREAMS", "8"))
#: What must have come of every stream before its S-node is lost, and the whole length of it.
N_BEFORE, N_TOKENS = 20, 200
PROMPTS = [f"{word} was a {k} of" for k in range(16) for word in ("It", "There", "She", "The old man")]


class Cluster:
    """Two R-nodes, two S-nodes and a router."""

    def __init__(self, start, tmp_path, orphan_seconds=20):
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        shared = ("--secret-file", str(secret))
        listen = ("--role", "r", "--listen", "tcp://127.0.0.1:0", "--orphan-seconds", str(orphan_seconds))
        r_nodes = [start(*listen, "--kv-memory", "256MiB", "--threads", "1", *shared) for _ in range(2)]
        at = [word for node in r_nodes for word in ("--r-node", node.wait_for(r"(tcp://127\.0\.0\.1:\d+)")[1])]
        options = (*at, "--s-threads", "1", "--dtype", "bf16", "--kv-dtype", "int8", *shared)
        self.s_nodes = [start("--port", "0", *options, own_group=True) for _ in range(2)]
        self.urls = [s_node.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1] for s_node in self.s_nodes]
        named = [word for url in self.urls for word in ("--s-node", url)]
        self.router = start("--port", "0", *named, *shared, program="router")
        self.router.wait_for(r"takes requests(?s:.)*takes requests")

    def api(self) -> AsyncOpenAI:
        url = self.router.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1]
        return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)

    def counter(self, s_node: int, name: str) -> float:
        return float(
            re.search(rf"^fastdecode:{name}_total{{.*}} (.*)$", fetch(f"{self.urls[s_node]}/metrics"), re.M)[1]
        )


class Streams:
    """Streams of a router, and the longest pauses in them."""

    def __init__(self, api: AsyncOpenAI):
        self._api = api
        self.texts = [""] * N_STREAMS
        self.pause = 0.0
        self.begun = asyncio.Event()  # all of them have N_BEFORE tokens
        self._n = [0] * N_STREAMS

    async def run(self) -> list[str]:
        await asyncio.gather(*(self._run(i) for i in range(N_STREAMS)))
        return self.texts

    async def _run(self, i: int) -> None:
        stream = await self._api.completions.create(
            model="fastdecode-demo",
            prompt=PROMPTS[i % len(PROMPTS)],
            max_tokens=N_TOKENS,
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
            self._n[i] += 1
            if min(self._n) >= N_BEFORE:
                self.begun.set()


@pytest.mark.parametrize("how", ["engine killed", "S-node killed", "drained"])
async def test_streams_go_on_with_their_k_and_v(start, tmp_path, how):
    cluster = await asyncio.to_thread(Cluster, start, tmp_path)
    lost = cluster.s_nodes[0]
    async with cluster.api() as api:
        calm = await Streams(api).run()
        streams = Streams(api)
        running = asyncio.create_task(streams.run())
        await asyncio.wait_for(streams.begun.wait(), 60)
        if how == "engine killed":
            lost.process.kill()
        elif how == "S-node killed":
            lost.kill_group()
        else:
            lost.process.send_signal(signal.SIGTERM)
        texts = await asyncio.wait_for(running, 120)
    print(f"{how}: longest pause {streams.pause:.2f} s; {sum(a != b for a, b in zip(texts, calm, strict=True))} differ")
    assert texts == calm
    assert await asyncio.to_thread(cluster.counter, 1, "adopted") > 0
    assert await asyncio.to_thread(cluster.counter, 1, "adoptions_failed") == 0
