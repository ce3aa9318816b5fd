"""Clients of other projects, unmodified, against a node with the demo model. lm-eval's is tests/api/test_lm_eval.py.

Their packages exclude each other, so a test is skipped where its package is missing. litellm and langchain-openai are
imported, `guidellm` is looked for on the PATH, and FASTDECODE_VLLM_PYTHON names the Python of an environment with vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from fastdecode.demo import model_dir

pytestmark = [pytest.mark.tools, pytest.mark.filterwarnings("ignore")]

MODEL = "fastdecode-demo"
SAY = [{"role": "user", "content": "It was a"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
REQUESTS = 12
PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "married": {"type": "boolean"}},
    "required": ["name", "married"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A node's address, up to and with /v1."""
    command = [sys.executable, "-m", "fastdecode.daemon.node", "--port", "0", "--kv-memory", "128MiB"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+/v1", node.stdout.readline())[0]
    finally:
        node.terminate()
        node.wait(20)
        node.stdout.close()


@pytest.fixture(scope="module")
def expected(url) -> str:
    """The answer that the openai client gets."""
    client = OpenAI(base_url=url, api_key="none")
    return client.chat.completions.create(model=MODEL, messages=SAY, **GREEDY).choices[0].message.content


def run(*command: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_litellm(url, expected):
    litellm = pytest.importorskip("litellm")
    server = {"api_base": url, "api_key": "none"}
    chat = {"model": f"openai/{MODEL}", "messages": SAY} | GREEDY | server
    assert litellm.completion(**chat).choices[0].message.content == expected
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="It was a", **GREEDY, **server)
    assert text.usage.completion_tokens == 12
    pytest.importorskip("mcp")  # litellm's responses() imports it
    most = 16  # litellm raises less to 16, OpenAI's minimum
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="It was a", temperature=0, max_output_tokens=most, **server
    )
    assert answer.output[0].content[0].text.startswith(expected) and answer.usage.output_tokens == most


def test_langchain(url, expected):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=url, api_key="none", model=MODEL, **GREEDY)
    answer = chat.invoke("It was a")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 12
    assert "".join(piece.content for piece in chat.stream("It was a")) == expected
    assert [answer.content for answer in chat.batch(["It was a"] * 2)] == [expected] * 2


def test_langchain_structured_output(url):
    langchain = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    chat = langchain.ChatOpenAI(base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=100)
    person = chat.with_structured_output(PERSON, method="json_schema").invoke("It was a")
    assert isinstance(person["married"], bool) and len(person["name"]) <= 8


@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("guidellm") is None, reason="guidellm is not installed")
def test_guidellm(url, tmp_path):
    result = tmp_path / "result.json"
    run(
        *("guidellm", "run", "--disable-console", "--output", f"kind=json,path={result}"),
        *("--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_dir()}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
    )
    [benchmark] = json.loads(result.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


@pytest.mark.timeout(400)
@pytest.mark.skipif("FASTDECODE_VLLM_PYTHON" not in os.environ, reason="FASTDECODE_VLLM_PYTHON is not set")
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve(url, tmp_path, backend, endpoint):
    result = tmp_path / "result.json"
    run(
        *(os.environ["FASTDECODE_VLLM_PYTHON"], "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", backend, "--endpoint", endpoint, "--base-url", url.removesuffix("/v1")),
        *("--model", MODEL, "--tokenizer", str(model_dir()), "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--save-result", "--result-filename", str(result)),
    )
    figures = json.loads(result.read_text())
    assert (figures["completed"], figures["failed"]) == (REQUESTS, 0)
    assert figures["total_output_tokens"] == 8 * REQUESTS
