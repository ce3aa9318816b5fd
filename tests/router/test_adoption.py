"""Streams that other S-nodes continue with the K and V that they have on R-nodes: real processes, in bf16 with an int8
cache, where tokens that are computed again may change."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest
from models.checkpoints import make_checkpoint
from models.mtp_made import make_head
from nodes.many_streams import N_STREAMS, ManyStreams
from nodes.node_process import fetch
from openai import APIError, AsyncOpenAI
from wire.link_driver import hello

from fastdecode.transports.registry import connect

SECRET = b"a secret of S-nodes and routers"
N_SECONDS = 10  # for which pages wait to be adopted, where nobody does so
N_TOKENS = 500  # of each stream, so that all go on while their S-node is lost


class Nodes:
    """Two R-nodes, two S-nodes and a router."""

    def __init__(self, start, tmp_path, orphan_seconds=120, more=()):
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        shared = ("--secret-file", str(secret))
        listen = ("--role", "r", "--listen", "tcp://127.0.0.1:0", "--orphan-seconds", str(orphan_seconds))
        self.r_nodes = [start(*listen, "--kv-memory", "256MiB", "--threads", "1", *shared) for _ in range(2)]
        self.r_node_urls = [node.wait_for(r"(tcp://127\.0\.0\.1:\d+)")[1] for node in self.r_nodes]
        at = [word for url in self.r_node_urls for word in ("--r-node", url)]
        options = (*at, "--s-threads", "1", "--dtype", "bf16", "--kv-dtype", "int8", *shared, *more)
        self.s_nodes = [start("--port", "0", *options, own_group=True) for _ in range(2)]
        self.urls = [s_node.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1] for s_node in self.s_nodes]
        named = [word for url in self.urls for word in ("--s-node", url)]
        self.router = start("--port", "0", *named, *shared, program="router")
        self.router.wait_for(r"takes requests(?s:.)*takes requests")

    def api(self) -> AsyncOpenAI:
        url = self.router.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1]
        return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str) -> float:
        """A number in the /metrics of the second S-node, the sum over its R-nodes if each has one."""
        text = fetch(f"{self.urls[1]}/metrics")
        return sum(float(value) for value in re.findall(rf"^fastdecode:{name}{{.*}} (.*)$", text, re.MULTILINE))


def lose(s_node, how):
    """End an S-node in a way that has a name."""
    match how:
        case "engine killed":
            s_node.process.kill()
        case "API killed":
            for pid in s_node.api_processes():
                os.kill(pid, signal.SIGKILL)
        case "S-node killed":
            s_node.kill_group()
        case "drained":
            s_node.process.send_signal(signal.SIGTERM)


#: The texts of a run in which nothing happens, by the model.
_calm = {}


async def calm_and_disturbed(nodes, how, model="demo", n_tokens=N_TOKENS):
    """The texts of a run in which nothing happens, and of one in which the first S-node ends; and the longest pause."""
    async with nodes.api() as api:
        if model not in _calm:
            _calm[model] = await ManyStreams(api, N_STREAMS, n_tokens).run()
        streams = ManyStreams(api, N_STREAMS, n_tokens)
        running = asyncio.create_task(streams.run())
        await asyncio.wait_for(streams.begun.wait(), 60)
        lose(nodes.s_nodes[0], how)
        return _calm[model], await asyncio.wait_for(running, 120), streams.pause


@pytest.mark.parametrize("how", ["engine killed", "API killed", "S-node killed", "drained"])
async def test_streams_go_on_with_their_k_and_v(start, tmp_path, how):
    nodes = await asyncio.to_thread(Nodes, start, tmp_path)
    calm, texts, pause = await calm_and_disturbed(nodes, how)
    print(f"{N_STREAMS} streams, {how}: the longest pause was {pause:.2f} s")
    assert texts == calm
    assert await asyncio.to_thread(nodes.metric, "adopted_total") > 0
    assert await asyncio.to_thread(nodes.metric, "adoptions_failed_total") == 0


@pytest.mark.parametrize("how", ["S-node killed", "drained"])
async def test_streams_of_a_model_with_states_go_on(start, tmp_path, how):
    """Nobody adopts states, so they are computed again, and in fp32 no token changes; the tokens that the model's MTP
    head drafts change none either."""
    base = make_checkpoint("qwen3.5")
    model = make_head(base).save(base, tmp_path / "model")
    more = ("--model", str(model), "--served-model-name", "fastdecode-demo", "--dtype", "fp32", "--kv-dtype", "fp32")
    nodes = await asyncio.to_thread(Nodes, start, tmp_path, more=(*more, "--speculate", "mtp:2"))
    calm, texts, _ = await calm_and_disturbed(nodes, how, "qwen3.5", n_tokens=200)
    assert texts == calm
    assert await asyncio.to_thread(nodes.metric, "adopted_total") == 0


async def test_pages_that_nobody_adopts_are_free_for_the_living(start, tmp_path):
    """The router is killed with the S-node, so nobody continues the streams. A link of the test's own sees how much
    memory an R-node has free."""
    nodes = await asyncio.to_thread(Nodes, start, tmp_path, N_SECONDS)
    r_node = nodes.r_nodes[0]
    link = await connect(nodes.r_node_urls[0], hello(), SECRET)
    async with nodes.api() as api:
        streams = ManyStreams(api, N_STREAMS, N_TOKENS)
        running = asyncio.create_task(streams.run())
        await asyncio.wait_for(streams.begun.wait(), 60)
        nodes.router.process.kill()
        nodes.s_nodes[0].kill_group()
        killed = time.monotonic()
        with pytest.raises(APIError):
            await running
    await asyncio.to_thread(r_node.wait_for, "of a link that has ended stay")
    kept = (await link.stats())["kv_free"]
    await asyncio.to_thread(r_node.wait_for, "nobody has adopted")
    while (await link.stats())["kv_free"] <= kept:
        assert time.monotonic() < killed + N_SECONDS + 60
        await asyncio.sleep(0.02)
    print(f"all pages were free {time.monotonic() - killed:.1f} s after the kill")
    await link.close()
