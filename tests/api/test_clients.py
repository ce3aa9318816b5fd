"""Clients of other projects, unmodified, against a node with the demo model. lm-eval's is tests/api/test_lm_eval.py.

Their packages exclude each other, so a test is skipped where its package is missing: those of Python are imported,
`guidellm` and `llm` are looked for on the PATH; FASTDECODE_VLLM_PYTHON is the Python of an environment with vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Literal

import pytest
from nodes.node_process import Node
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from fastdecode.demo import model_dir

pytestmark = [pytest.mark.tools, pytest.mark.filterwarnings("ignore")]

MODEL = "fastdecode-demo"
SAY = [{"role": "user", "content": "It was a"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
REQUESTS = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A node's address, up to and with /v1."""
    node = Node(tmp_path_factory.mktemp("node"), "--port", "0", "--kv-memory", "128MiB")
    try:
        yield node.wait_for(r"http://\S+/v1")[0]
    finally:
        node.end()


@pytest.fixture(scope="module")
def expected(url) -> str:
    """The answer that the openai client gets."""
    client = OpenAI(base_url=url, api_key="none")
    return client.chat.completions.create(model=MODEL, messages=SAY, **GREEDY).choices[0].message.content


def run(*command: str, **variables: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


class Person(BaseModel):
    """A person of a novel."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Anne", "Emma"]
    married: bool


PERSON = Person.model_json_schema()


def marry(married: bool) -> str:
    """Record whether a person is married."""
    return f"married: {married}"


def is_person(text: str) -> bool:
    """Whether a text is the JSON of a person."""
    return Person.model_validate_json(text) is not None


def test_openai(url, expected):
    client = OpenAI(base_url=url, api_key="none")
    ask = {"model": MODEL, "messages": SAY} | GREEDY
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    pytest.importorskip("llguidance")
    ask |= {"max_tokens": 400}
    parsed = client.chat.completions.parse(**ask, response_format=Person).choices[0].message.parsed
    assert isinstance(parsed, Person)
    tools = [{"type": "function", "function": {"name": "marry", "parameters": PERSON}}]
    with client.chat.completions.stream(
        **ask, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert is_person(message.tool_calls[0].function.arguments)


def test_litellm(url, expected):
    litellm = pytest.importorskip("litellm")
    server = {"api_base": url, "api_key": "none"}
    chat = {"model": f"openai/{MODEL}", "messages": SAY} | GREEDY | server
    assert litellm.completion(**chat).choices[0].message.content == expected
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="It was a", **GREEDY, **server)
    assert text.usage.completion_tokens == 12
    pytest.importorskip("mcp")  # litellm's responses() imports it
    most = 16  # litellm raises less to 16, OpenAI's minimum
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="It was a", temperature=0, max_output_tokens=most, **server
    )
    assert answer.output[0].content[0].text.startswith(expected) and answer.usage.output_tokens == most


def test_litellm_tools_and_json(url):
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("llguidance")
    chat = {"model": f"openai/{MODEL}", "messages": SAY, "api_base": url, "api_key": "none", "temperature": 0}
    tools = [{"type": "function", "function": {"name": "marry", "parameters": PERSON}}]
    answer = litellm.completion(**chat, max_tokens=400, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert is_person(answer.choices[0].message.tool_calls[0].function.arguments)
    assert is_person(litellm.completion(**chat, max_tokens=400, response_format=Person).choices[0].message.content)


@pytest.mark.parametrize("provider", ["anthropic", "openai"])
async def test_litellm_messages(url, expected, provider):
    """Anthropic's API of LiteLLM, over this server's and over its Responses API."""
    litellm = pytest.importorskip("litellm")
    for package in ("fastapi", "soundfile", "backoff"):  # litellm's streams of messages import its proxy
        pytest.importorskip(package)
    most = 16
    ask = {
        "model": f"{provider}/{MODEL}",
        "messages": SAY,
        "max_tokens": most,
        "temperature": 0.0,
        "api_base": url.removesuffix("/v1") if provider == "anthropic" else url,
        "api_key": "none",
    }
    answer = await litellm.anthropic.messages.acreate(**ask)
    assert answer["content"][0]["text"].startswith(expected) and answer["usage"]["output_tokens"] == most
    events = b""
    async for event in await litellm.anthropic.messages.acreate(**ask, stream=True):
        events += event
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]
    texts = [event["delta"]["text"] for event in data if event["type"] == "content_block_delta"]
    assert "".join(texts) == answer["content"][0]["text"] and data[-1]["type"] == "message_stop"


def test_langchain(url, expected):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=url, api_key="none", model=MODEL, **GREEDY)
    answer = chat.invoke("It was a")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 12
    assert "".join(piece.content for piece in chat.stream("It was a")) == expected
    assert [answer.content for answer in chat.batch(["It was a"] * 2)] == [expected] * 2


def test_langchain_tools_and_json(url):
    langchain = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    chat = langchain.ChatOpenAI(base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=400)
    person = chat.with_structured_output(PERSON, method="json_schema").invoke("It was a")
    assert isinstance(person["married"], bool)
    [call] = (
        chat.bind_tools([marry], tool_choice="required", strict=True, parallel_tool_calls=False)
        .invoke("It was a")
        .tool_calls
    )
    assert call["name"] == "marry" and isinstance(call["args"]["married"], bool)


def test_llama_index(url, expected):
    llama_index = pytest.importorskip("llama_index.llms.openai_like")
    pytest.importorskip("llguidance")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    def client(most):
        return llama_index.OpenAILike(
            model=MODEL,
            api_base=url,
            api_key="none",
            temperature=0,
            max_tokens=most,
            is_chat_model=True,
            is_function_calling_model=True,
        )

    say = [ChatMessage(role="user", content="It was a")]
    assert client(12).chat(say).message.content == expected
    assert "".join(piece.delta or "" for piece in client(12).stream_chat(say)) == expected
    tool = FunctionTool.from_defaults(marry)
    answer = client(400).chat_with_tools([tool], "It was a", tool_required=True)
    [call, *_] = client(400).get_tool_calls_from_response(answer)
    assert call.tool_name == "marry" and isinstance(call.tool_kwargs["married"], bool)
    assert isinstance(client(400).as_structured_llm(Person).chat(say).raw, Person)


def test_instructor(url):
    instructor = pytest.importorskip("instructor")
    pytest.importorskip("llguidance")
    ask = {"model": MODEL, "messages": SAY, "temperature": 0, "max_tokens": 400, "response_model": Person}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
        assert isinstance(client.create(**ask, max_retries=0), Person)
        *_, last = client.create_partial(**ask, max_retries=0)
        assert last.married in (False, True)


async def test_pydantic_ai(url, expected):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    pytest.importorskip("llguidance")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))

    def agent(most, **options):
        return pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": most}, **options)

    assert (await agent(12).run("It was a")).output == expected
    async with agent(12).run_stream("It was a") as streamed:
        assert await streamed.get_output() == expected
    for form in (pydantic_ai.ToolOutput, pydantic_ai.NativeOutput):
        assert isinstance((await agent(400, output_type=form(Person)).run("It was a")).output, Person)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(url, kind):
    agents = pytest.importorskip("agents", reason="needs openai-agents")
    pytest.importorskip("llguidance")
    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none"))

    def agent(choice=None, parallel=None, **options):
        settings = agents.ModelSettings(temperature=0, max_tokens=400, tool_choice=choice, parallel_tool_calls=parallel)
        return agents.Agent(name="x", model=model, model_settings=settings, **options)

    assert isinstance((await agents.Runner.run(agent(output_type=Person), "It was a")).final_output, Person)
    streamed = agents.Runner.run_streamed(agent(output_type=Person), "It was a")
    kinds = [event.type async for event in streamed.stream_events()]
    assert isinstance(streamed.final_output, Person) and kinds.count("raw_response_event") > 10
    called = await agents.Runner.run(
        agent("required", False, tools=[agents.function_tool(marry)], tool_use_behavior="stop_on_first_tool"),
        "It was a",
    )
    assert called.final_output in ("married: True", "married: False")


@pytest.mark.skipif(shutil.which("llm") is None, reason="llm is not installed")
def test_llm(url, expected, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: here, model_name: {MODEL}, api_base: {url}, supports_schema: true, supports_tools: true}}\n"
    )

    def ask(*options: str) -> str:
        greedy = ("-m", "here", "-o", "temperature", "0", "--key", "none", "--no-log", "It was a")
        return run("llm", *greedy, *options, LLM_USER_PATH=str(tmp_path), LLM_LOAD_PLUGINS="").strip()

    assert ask("-o", "max_tokens", "12") == expected.strip()
    assert ask("-o", "max_tokens", "12", "--no-stream") == expected.strip()
    functions = "def marry(married: bool) -> str:\n    return str(married)\n"
    assert ask("-o", "max_tokens", "12", "--functions", functions)
    pytest.importorskip("llguidance")
    assert is_person(ask("-o", "max_tokens", "400", "--schema", json.dumps(PERSON)))


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
