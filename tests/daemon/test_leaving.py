"""An R-node that is asked to end: its S-nodes move its sequences away first, and use it again when it is back."""

from __future__ import annotations

import contextlib
import threading

import openai
import pytest
from nodes.node_process import complete, fetch, health, until


@pytest.mark.timeout(300)
def test_an_r_node_that_ends_is_emptied_first_and_used_again_when_it_is_back(start, tmp_path):
    """The other R-node reaches this one by the URL behind the #, as it would from another machine."""
    sock, tcp = tmp_path / "r0.sock", ("--listen", "tcp://127.0.0.1:0")
    r_nodes = [
        start("--role", "r", *listen, *tcp, "--kv-memory", "64MiB", "--threads", "1")
        for listen in (("--listen", f"shm://{sock}"), ())
    ]
    urls = [r_node.wait_for(r"R-node on (tcp:\S+):")[1] for r_node in r_nodes]
    s_node = start("--port", "0", "--r-node", f"shm://{sock}#{urls[0]}", "--r-node", urls[1], "--no-prefix-cache")
    api = s_node.api()
    sock.unlink()
    body = {"ignore_eos": True}

    def text(n):
        answer = api.completions.create(
            model="fastdecode-demo", prompt=f"It was {n}", max_tokens=200, temperature=0, extra_body=body
        )
        return answer.choices[0].text

    expected = [text(n) for n in range(3)]
    texts, ended = [set() for _ in range(3)], threading.Event()

    def client(n):
        while not ended.is_set():
            texts[n].add(text(n))

    clients = [threading.Thread(target=client, args=(n,)) for n in range(3)]
    with contextlib.ExitStack() as stack:
        for thread in clients:
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        until(lambda: all(node["sequences"] for node in health(api)["nodes"]))
        assert r_nodes[1].end() == 0
    assert texts == [{each} for each in expected]
    log = s_node.log.read_text()
    assert f"{urls[1]} is about to end; emptying it" in log and "was lost" not in log
    recomputed = [line for line in fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics").splitlines()
                  if line.startswith("fastdecode:recomputed")]  # fmt: skip
    assert recomputed and all(line.endswith(" 0.0") for line in recomputed)
    start("--role", "r", "--listen", urls[1], "--kv-memory", "64MiB", "--threads", "1")
    s_node.wait_for(f"R-node {urls[1]} has joined")
    assert all(node["alive"] for node in health(api)["nodes"])
    assert complete(api)
    api.close()
    assert s_node.end() == 0


def test_the_only_r_node_waits_no_longer_than_its_drain_seconds(start, tmp_path):
    url = f"shm://{tmp_path}/r.sock"
    argv = ("--role", "r", "--listen", url, "--kv-memory", "64MiB", "--threads", "1", "--drain-seconds", "0.1")
    r_node = start(*argv)
    r_node.wait_for("R-node on shm")
    s_node = start("--port", "0", "--r-node", url, "--reconnect-seconds", "0")
    with (
        s_node.api() as api,
        api.completions.create(
            **{"model": "fastdecode-demo", "prompt": "It was", "stream": True},
            **{"max_tokens": 900, "n": 32, "extra_body": {"ignore_eos": True}},  # takes seconds
        ) as stream,
    ):
        next(iter(stream))
        assert r_node.end() == 0
        with pytest.raises(openai.APIError, match="lost"):
            for _ in stream:
                pass
