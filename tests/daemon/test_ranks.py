"""`--tensor-parallel` as users run it: the tokens of transformers, and the end of a rank."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models.adapters_made import merged, save_adapter
from models.checkpoints import make_checkpoint, reference, write_tokenizer
from models.hf_models import save_model
from models.mtp_made import make_head
from nodes.node_process import Node, fetch, gone, health
from openai import APIError
from ranks.stopped_thread import stopped_thread, thread_that_computes

from fastdecode.demo import model_dir
from fastdecode.text.tokenizer import Tokenizer

RANKS = ("--port", "0", "--dtype", "fp32", "--kv-dtype", "fp32", "--s-threads", "1")
EMBEDDED = (*RANKS, "--kv-memory", "256MiB", "--threads", "1")


def rank_processes(node: Node) -> list[int]:
    module = b"fastdecode.daemon.rank_process"
    return [pid for pid in node.children() if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def r_node(start, url: str) -> tuple[Node, str]:
    node = start("--role", "r", "--listen", url, "--kv-memory", "256MiB", "--threads", "1")
    return node, node.wait_for(r"R-node on (\S+):")[1]


def greedy(api, prompt, n=24, model="fastdecode-demo", **options):
    ask = {"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0}
    return api.completions.create(**ask, extra_body={"ignore_eos": True}, **options)


def continuation(theirs, prompt: list[int], n: int = 24, **options) -> str:
    theirs.generation_config.eos_token_id = None
    tokens = theirs.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, **options)[0, len(prompt) :]
    return Tokenizer.from_dir(Path(theirs.name_or_path)).decode(tokens.tolist())


def check_against_transformers(api, directory: Path | None = None, cached: int = 650) -> None:
    """Prompts of several lengths at once, and then one whose first tokens are cached."""
    theirs, rng = reference(directory or model_dir()), random.Random(0)
    prompts = [[rng.randrange(3, theirs.config.vocab_size) for _ in range(n)] for n in (1, 17, 300, 700)]
    prompts.append(prompts[3][:650] + prompts[1])
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda prompt: greedy(api, prompt), prompts[:4])]
    answers.append(greedy(api, prompts[4]))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].text == continuation(theirs, prompt)
    assert answers[4].usage.prompt_tokens_details.cached_tokens == cached


def metric(api, name: str) -> float:
    text = fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
    [value] = re.findall(rf"^fastdecode:{name}_total{{.*}} (\S+)$", text, re.M)
    return float(value)


@contextlib.contextmanager
def decoding(api) -> Iterator[None]:
    """Let the S-node decode one sequence after another meanwhile."""
    ended = threading.Event()

    def decode() -> None:
        with contextlib.suppress(APIError):
            while not ended.is_set():
                greedy(api, "It was", 900)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(decode)
        try:
            yield
        finally:
            ended.set()


@contextlib.contextmanager
def streaming(start, n: int, *options: str, check: bool = False) -> Iterator[Node]:
    """An S-node of `n` ranks with embedded R-nodes that decodes. At the end all of its processes have to be gone."""
    node = start(*EMBEDDED, "--tensor-parallel", str(n), *options)
    with node.api() as api:
        if check:
            check_against_transformers(api)
            assert [(r["part"], r["alive"]) for r in health(api)["nodes"]] == [
                (f"{i}/{n}", True) for i in range(1, n + 1)
            ]
        children = node.children()
        with decoding(api):
            try:
                yield node
            finally:
                if node.process.poll() is None:
                    node.end(signal.SIGKILL)
    assert all(gone(pid) for pid in children)


def test_four_ranks_with_an_adapter_and_the_kill_of_one(start, tmp_path):
    adapter = save_adapter(model_dir(), tmp_path / "adapter", 1, r=4, target_modules="all-linear")
    with streaming(start, 4, "--lora", f"tuned={adapter}", check=True) as node:
        prompt = [*range(30, 90)]
        with node.api() as api:
            tuned = greedy(api, prompt, model="tuned").choices[0].text
        assert tuned == continuation(merged(model_dir(), adapter), prompt)
        rank = rank_processes(node)[1]
        os.kill(rank, signal.SIGKILL)
        assert node.process.wait(60) == 1
        assert re.search(rf"the S-node ends, because rank 2 \(pid {rank}\) has ended$", node.log.read_text(), re.M)


@pytest.mark.parametrize("hangs", ["thread", "process"])
def test_the_s_node_ends_if_a_rank_hangs(hangs, start):
    """The thread that computes stops, while the other threads of its process go on or do not."""
    options = ("--kv-dtype", "int4") if hangs == "process" else ()
    with streaming(start, 2, "--mini-batches", "2", *options, check=hangs == "thread") as node:
        [rank] = rank_processes(node)
        if hangs == "process":
            os.kill(rank, signal.SIGSTOP)
            assert node.process.wait(60) == 1
        else:
            with stopped_thread(thread_that_computes(rank)):
                assert node.process.wait(60) == 1
        why = rf"the S-node ends, because rank 1 \(pid {rank}\) (has not gone on for 3.0 s|does not answer)"
        assert re.search(why, node.log.read_text())


def test_ranks_keep_their_parts_of_states(start):
    """Snapshots of states for the prefix cache, mini-batches, guesses of which some are wrong, and preemption."""
    directory = make_checkpoint("qwen3-next")
    options = ("--model", str(directory), "--served-model-name", "fastdecode-demo", "--kv-memory", "2600KiB")
    node = start(*EMBEDDED, "--tensor-parallel", "2", "--mini-batches", "2", "--speculate", "suffix:2", *options)
    with node.api() as api:
        check_against_transformers(api, directory, cached=640)
        # Texts of three tokens repeat themselves.
        theirs, few = reference(directory), (5, 40, 77)
        prompts = [[few[i % 3], *few * (20 + i)] for i in range(8)]
        others = [i for i in range(theirs.config.vocab_size) if i not in few]
        before = metric(api, "num_preemptions")
        # The prompts of one request run at the same time, also on a busy machine.
        answers = greedy(api, prompts, 80, logit_bias={str(i): 100 for i in few}).choices
        expected = [continuation(theirs, prompt, 80, suppress_tokens=others) for prompt in prompts]
        assert [answer.text for answer in sorted(answers, key=lambda answer: answer.index)] == expected
        assert 0 < metric(api, "guessed_right_tokens") < metric(api, "guessed_tokens")
        assert metric(api, "num_preemptions") > before


def test_ranks_of_the_transformers_backend(start):
    """Mini-batches, a cached prefix, and the end of a rank."""
    directory = make_checkpoint("llama-gqa")
    options = ("--model", str(directory), "--served-model-name", "fastdecode-demo", "--backend", "transformers")
    node = start(*EMBEDDED, "--tensor-parallel", "2", "--mini-batches", "2", *options)
    with node.api() as api:
        check_against_transformers(api, directory)
        [rank] = rank_processes(node)
        with decoding(api):
            os.kill(rank, signal.SIGKILL)
            assert node.process.wait(60) == 1
    assert re.search(rf"the S-node ends, because rank 1 \(pid {rank}\) has ended$", node.log.read_text(), re.M)


@pytest.mark.parametrize(("name", "backend"), [("qwen3.5", "native"), ("glm4_moe", "transformers")])
def test_ranks_draft_with_the_head_of_the_model(name, backend, start, tmp_path):
    """Mini-batches, and a head that knows one of the texts, so that some drafts are right and some are wrong."""
    directory = make_checkpoint(name) if backend == "native" else write_tokenizer(save_model(name, tmp_path / "w"))
    head = make_head(directory)
    prompts = [[3 + (7 * i + n) % 60 for i in range(n)] for n in (9, 40, 70, 150)]
    theirs = head.model.generate(torch.tensor([prompts[0]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    head.learn([theirs[0].tolist()], 60)
    path = head.save(directory, tmp_path / "m")
    options = ("--model", str(path), "--served-model-name", "fastdecode-demo", "--speculate", "mtp:2")
    options += ("--backend", backend)
    node = start(*EMBEDDED, "--tensor-parallel", "2", "--mini-batches", "2", *options)
    with node.api() as api:
        answers = greedy(api, prompts, 40).choices
        assert metric(api, "guessed_right_tokens") < metric(api, "guessed_tokens")
        alone = greedy(api, prompts[0], 40).choices[0].text
        assert metric(api, "guessed_right_tokens") > 0
    expected = [continuation(head.model, prompt, 40) for prompt in prompts]
    assert [answer.text for answer in sorted(answers, key=lambda answer: answer.index)] == expected
    assert alone == expected[0]


@pytest.mark.parametrize("decodes", [False, True], ids=["idle", "decoding"])
def test_the_s_node_ends_if_its_own_process_hangs(decodes, start):
    with contextlib.ExitStack() as stack:
        if decodes:
            node = stack.enter_context(streaming(start, 2))
        else:
            node = start(*EMBEDDED, "--tensor-parallel", "2")
            node.api()
        pid, children = node.process.pid, node.children()
        os.kill(pid, signal.SIGSTOP)
        assert node.process.wait(60) == -signal.SIGKILL
        why = rf"the S-node ends, because rank 0 \(pid {pid}\) (has not gone on for 3.0 s|does not run)"
        assert re.search(why, node.log.read_text())
        assert all(gone(child) for child in children)


def test_the_s_node_ends_if_only_its_own_thread_that_computes_hangs(start):
    """It stops outside a sum, while the other rank waits for the next step."""
    node = start(*EMBEDDED, "--tensor-parallel", "2")
    pid, children = node.process.pid, node.children()
    with node.api() as api:
        with decoding(api):
            computes = thread_that_computes(pid)
        time.sleep(4)  # a thread that has nothing to do is not taken for one that hangs
        greedy(api, "It was")
        with stopped_thread(computes):
            assert node.process.wait(60) == 1
    why = rf"the S-node ends, because rank 0 \(pid {pid}\) has not gone on for 3.0 s"
    assert re.search(why, node.log.read_text())
    assert all(gone(child) for child in children)


def test_r_nodes_over_shm_and_tcp_and_their_loss(start, tmp_path):
    """Both R-nodes are killed: the stream goes on when they are back."""
    nodes, urls = zip(*[r_node(start, url) for url in (f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0")], strict=True)
    node = start(
        *RANKS,
        "--tensor-parallel",
        "4",
        *(word for url in urls for word in ("--r-node", url)),
        "--reconnect-seconds",
        "20",
    )
    with node.api() as api:
        check_against_transformers(api)
        assert [n["url"] for n in health(api)["nodes"]] == [urls[0]] * 4 + [urls[1]] * 4
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
