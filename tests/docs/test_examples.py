"""The examples run, as their users start them, on the demo model."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes.node_process import Node
from nodes.ports import ports_in_a_row
from openai import OpenAI
from sources.folders import ROOT

EXAMPLES = ROOT / "examples"
GREEDY = {"model": "fastdecode-demo", "max_tokens": 12, "temperature": 0}


def run(command: list[str], stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """An S-node with an embedded R-node."""
    node = Node(tmp_path_factory.mktemp("node"), "--port", "0", "--kv-memory", "128MiB")
    try:
        yield node.wait_for(r"http://\S+/v1")[0]
    finally:
        node.end()


def test_chat_client_holds_a_conversation(url):
    done = run([sys.executable, str(EXAMPLES / "chat_client.py"), "--url", url, "--max-tokens", "12"], "Emma\nAnne\n\n")
    assert done.returncode == 0, done.stderr
    answers = [answer.strip() for answer in done.stdout.split("> ")]
    assert len(answers) == 4 and answers[1] and answers[2]


def test_chat_client_answers_one_message(url):
    done = run([sys.executable, str(EXAMPLES / "chat_client.py"), "--url", url, "--max-tokens", "5", "Emma was"])
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("name", ["chat_client.py", "batch_completions.py"])
def test_a_client_without_a_server_says_so(name, tmp_path):
    words = tmp_path / "prompts.txt"
    words.write_text("It was\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and no other process gets the port
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        done = run([sys.executable, str(EXAMPLES / name), str(words), "--url", url])
    assert done.returncode == 1 and "cannot be asked" in done.stderr and len(done.stderr.splitlines()) == 1


def test_batch_completions_are_those_of_single_requests_in_order(url, tmp_path: Path):
    prompts = [f"It was the {word} time that" for word in ("first", "second", "last", "only", "same", "worst")]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n")
    script = [sys.executable, str(EXAMPLES / "batch_completions.py"), str(tmp_path / "prompts.txt"), "--url", url]
    done = run([*script, "--max-tokens", "12", "--concurrency", "4"])
    assert done.returncode == 0, done.stderr
    assert "6 prompts, 72 tokens" in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    with OpenAI(base_url=url, api_key="none") as client:
        alone = client.completions.create(prompt=prompts[-1], **GREEDY).choices[0]
    assert lines[-1]["finish_reason"] == alone.finish_reason == "length"
    assert lines[-1]["completion"][:10] == alone.text[:10]  # batches round differently, so later tokens may differ


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_two_r_nodes_lose_one_and_no_token():
    # `fastdecode-node` of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with ports_in_a_row(3) as port:
        env = {"PATH": path, "PORT": str(port), "R_PORTS": f"{port + 1} {port + 2}", "KV_MEMORY": "64MiB"}
        done = run([str(EXAMPLES / "two_r_nodes.sh")], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was lost" in done.stdout and "character for character" in done.stdout
