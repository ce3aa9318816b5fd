"""`--tensor-parallel` as users run it: the tokens of transformers, and the end of a rank."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models.checkpoints import reference
from nodes.node_process import Node, gone, health

from fastdecode.demo import model_dir
from fastdecode.text.tokenizer import Tokenizer

TWO = ("--port", "0", "--tensor-parallel", "2", "--dtype", "fp32", "--kv-dtype", "fp32", "--s-threads", "1")
EMBEDDED = (*TWO, "--kv-memory", "256MiB", "--threads", "1")


def rank_processes(node: Node) -> list[int]:
    module = b"fastdecode.daemon.rank_process"
    return [pid for pid in node.children() if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def r_node(start, url: str) -> tuple[Node, str]:
    node = start("--role", "r", "--listen", url, "--kv-memory", "256MiB", "--threads", "1")
    return node, node.wait_for(r"R-node on (\S+):")[1]


def greedy(api, prompt, n=24, **options):
    ask = {"model": "fastdecode-demo", "prompt": prompt, "max_tokens": n, "temperature": 0}
    return api.completions.create(**ask, extra_body={"ignore_eos": True}, **options)


def check_against_transformers(api) -> None:
    """Prompts of several lengths at once, and then one whose first pages are cached."""
    theirs, tokenizer = reference(model_dir()), Tokenizer.from_dir(model_dir())
    theirs.generation_config.eos_token_id = None
    rng = random.Random(0)
    prompts = [[rng.randrange(3, theirs.config.vocab_size) for _ in range(n)] for n in (1, 17, 300, 700)]
    prompts.append(prompts[3][:650] + prompts[1])
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda prompt: greedy(api, prompt), prompts[:4])]
    answers.append(greedy(api, prompts[4]))
    for prompt, answer in zip(prompts, answers, strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert answer.choices[0].text == tokenizer.decode(want.tolist())
    assert answers[4].usage.prompt_tokens_details.cached_tokens == 650


@pytest.mark.parametrize(
    ("mini_batches", "lost", "how"),
    [("1", signal.SIGKILL, "has ended"), ("2", signal.SIGSTOP, "does not answer")],
)
def test_embedded_r_nodes_and_the_loss_of_a_rank(mini_batches, lost, how, start):
    node = start(*EMBEDDED, "--mini-batches", mini_batches)
    with node.api() as api:
        check_against_transformers(api)
        assert [(n["part"], n["alive"]) for n in health(api)["nodes"]] == [("1/2", True), ("2/2", True)]
        stream = greedy(api, "It was", 900, stream=True)
        next(stream)
        [rank], children = rank_processes(node), node.children()
        os.kill(rank, lost)
        assert node.process.wait(8) == 1
        stream.close()
    assert f"rank 1 of --tensor-parallel 2 (pid {rank}) {how}, and with it the S-node" in node.log.read_text()
    assert all(gone(pid) for pid in children)


def test_r_nodes_over_shm_and_tcp_and_their_loss(start, tmp_path):
    """Both R-nodes are killed: the stream goes on when they are back."""
    nodes, urls = zip(*[r_node(start, url) for url in (f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0")], strict=True)
    node = start(*TWO, *(word for url in urls for word in ("--r-node", url)), "--reconnect-seconds", "20")
    with node.api() as api:
        check_against_transformers(api)
        assert [n["url"] for n in health(api)["nodes"]] == [urls[0], urls[0], urls[1], urls[1]]
        undisturbed = greedy(api, "It was", 300).choices[0].text
        stream = greedy(api, "It was", 300, stream=True)
        parts = [next(stream).choices[0].text]
        for killed in nodes:
            killed.end(signal.SIGKILL)
        node.wait_for("(?s)was lost.*was lost")
        for url in urls:
            r_node(start, url)
        parts += [chunk.choices[0].text for chunk in stream]
        assert "".join(parts) == undisturbed
        node.wait_for("(?s)is back.*is back")
    children = node.children()
    assert node.end() == 0
    assert all(gone(pid) for pid in children)


def test_the_ranks_end_with_the_s_node(start):
    node = start(*EMBEDDED)
    node.api().close()
    children = node.children()
    node.end(signal.SIGKILL)
    assert all(gone(pid) for pid in children)
