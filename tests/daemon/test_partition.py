"""`--partition heads` and `tokens` as users run them: R-nodes that share the heads or tokens of every sequence."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess

import openai
import orjson
import pytest
import torch
from nodes.many_streams import N_STREAMS, ManyStreams
from nodes.node_process import NODE, complete, fetch

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.demo import model_dir
from fastdecode.spart.exchange.chosen import BypassImpossible, choose_exchange


def r_nodes(start, tmp_path, n):
    urls = [f"shm://{tmp_path}/r{i}.sock" for i in range(n)]
    nodes = [start("--role", "r", "--listen", url, "--kv-memory", "256MiB", "--threads", "1") for url in urls]
    for node in nodes:
        node.wait_for("R-node on shm")
    return urls, nodes


def test_streams_wait_for_a_member_that_comes_back_and_end_with_an_error_if_none_does(start, tmp_path):
    urls, nodes = r_nodes(start, tmp_path, 2)
    team = ("--partition", "heads", "--r-node", urls[0], "--r-node", urls[1])
    exact = ("--dtype", "fp32", "--kv-dtype", "fp32")  # a recomputed sequence goes on as it would have
    s_node = start("--port", "0", *team, *exact, "--reconnect-seconds", "20")
    r_node = ("--role", "r", "--listen", urls[1], "--kv-memory", "256MiB", "--threads", "1")
    with s_node.api() as api:
        text = complete(api, 40)
        s_node.wait_for("these 2 R-nodes share the KV heads of every sequence")
        base = str(api.base_url).removesuffix("/v1/")
        health = orjson.loads(fetch(f"{base}/health"))
        assert [(node["url"], node["part"], node["alive"]) for node in health["nodes"]] == [
            (urls[0], "1/2", True),
            (urls[1], "2/2", True),
        ]
        counter = r'^fastdecode:r_node_kv_bytes_read_total\{.*r_node="(.*)"\} (.*)$'
        read = re.findall(counter, fetch(f"{base}/metrics"), re.M)
        assert [url for url, _ in read] == urls and read[0][1] == read[1][1] != "0.0"

        def stream(max_tokens=400, n=1):
            return api.completions.create(
                model="fastdecode-demo",
                prompt="It was",
                max_tokens=max_tokens,
                n=n,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )

        undisturbed = "".join(chunk.choices[0].text for chunk in stream())
        with stream() as chunks:
            parts = [next(iter(chunks))]
            nodes[1].end(signal.SIGKILL)
            s_node.wait_for("was lost")
            with pytest.raises(openai.InternalServerError):  # new requests do not wait
                complete(api)
            nodes[1] = start(*r_node)
            parts += chunks
        assert "".join(chunk.choices[0].text for chunk in parts) == undisturbed

        s_node.wait_for(r"R-node .* \+ .* is back")
        with stream(900, 32) as chunks:  # takes seconds
            next(iter(chunks))
            nodes[1].end(signal.SIGKILL)
            with pytest.raises(openai.APIError, match="lost"):  # after --reconnect-seconds
                for _ in chunks:
                    pass
        start(*r_node)
        s_node.wait_for(r"(?s)is back.* is back")
        assert complete(api, 40) == text != ""
    assert s_node.end() == 0


async def test_many_streams_of_a_team_wait_for_a_member_that_is_killed(start, tmp_path):
    urls, nodes = r_nodes(start, tmp_path, 2)
    team = ("--partition", "heads", "--r-node", urls[0], "--r-node", urls[1], "--reconnect-seconds", "60")
    s_node = start("--port", "0", *team, "--dtype", "fp32", "--kv-dtype", "fp32")
    url = (await asyncio.to_thread(s_node.wait_for, r"(http://127\.0\.0\.1:\d+/v1)"))[1]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:
        calm = await ManyStreams(api, N_STREAMS).run()
        streams = ManyStreams(api, N_STREAMS)
        running = asyncio.create_task(streams.run())
        await asyncio.wait_for(streams.begun.wait(), 60)
        nodes[1].process.kill()
        await asyncio.to_thread(s_node.wait_for, "was lost")
        start("--role", "r", "--listen", urls[1], "--kv-memory", "256MiB", "--threads", "1")
        assert await asyncio.wait_for(running, 120) == calm
        print(f"{N_STREAMS} streams: the longest pause was {streams.pause:.2f} s")


def test_r_nodes_that_cannot_share_the_heads_are_refused_before_weights_are_loaded(start, tmp_path):
    """The demo model has two KV heads."""
    argv = ["--partition", "heads", *(f"--r-node=shm://{tmp_path}/r{i}.sock" for i in range(3))]
    node = start("--port", "0", *argv)
    assert node.process.wait(60) in (1, 2)
    [line] = node.log.read_text().splitlines()[-1:]
    sentence = "--partition heads: 3 R-nodes cannot share the 2 KV heads of layer 0 evenly"
    assert sentence in line and "Traceback" not in node.log.read_text()
    check = subprocess.run([*NODE, "--check", "--model", str(model_dir()), *argv], capture_output=True, text=True)
    assert check.returncode in (1, 2) and sentence in check.stderr


def test_a_team_is_given_by_r_node():
    with pytest.raises(ConfigError, match="--partition heads needs --r-node"):
        NodeConfig(partition="heads")
    with pytest.raises(ConfigError, match="--partition tokens needs --r-node"):
        NodeConfig(partition="tokens")
    assert NodeConfig(partition="tokens", r_node=("tcp://a:1", "tcp://b:1")).parts == 2
    with pytest.raises(ConfigError, match="--partition heads needs --r-node"):
        NodeConfig(partition="heads", r_nodes_dns="tcp://r-nodes:7300")
    assert NodeConfig(partition="heads", r_node=("tcp://a:1", "tcp://b:1")).parts == 2
    assert NodeConfig(r_node=("tcp://a:1", "tcp://b:1")).parts == 1


def test_r_nodes_that_share_tokens(start, tmp_path):
    urls, _ = r_nodes(start, tmp_path, 3)
    team = [word for url in urls for word in ("--r-node", url)]
    exact = ("--dtype", "fp32", "--kv-dtype", "fp32")
    alone = start("--port", "0", *exact)
    s_node = start("--port", "0", "--partition", "tokens", *team, *exact)
    with s_node.api() as api, alone.api() as other:
        s_node.wait_for("these 3 R-nodes share the tokens of every sequence")
        assert complete(api, 300) == complete(other, 300)
    assert s_node.end() == 0


def test_the_bypass_is_refused_with_a_reason():
    cuda = torch.device("cuda")
    choice = choose_exchange("auto", cuda, 2, 8, 50, whole_rows=False)
    assert str(choice).startswith("staged (") and "--partition" in str(choice)
    with pytest.raises(BypassImpossible, match="--partition"):
        choose_exchange("bypass", cuda, 2, 8, 50, whole_rows=False)
    assert str(choose_exchange("auto", torch.device("cpu"), 2, 8, 50, whole_rows=False)) == "direct"
