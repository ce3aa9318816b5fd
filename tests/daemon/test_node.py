"""`fastdecode-node` as users run it: processes, signals and sockets, of which nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import openai
import orjson
import pytest
from models.checkpoints import make_checkpoint
from nodes.node_process import NODE, START_SECONDS, complete, fetch, gone, traces, until

from fastdecode.daemon.tasks import run_until
from fastdecode.demo import model_dir


@pytest.mark.quick
def test_demo_model_streams_and_sigterm_ends_both_processes(start, tmp_path):
    before = traces(tmp_path)
    node = start("--port", "0", "--kv-memory", "256MiB")
    stream = node.api().completions.create(
        model="fastdecode-demo", prompt="It was", max_tokens=12, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1 and "".join(pieces) == complete(node.api(), 12)
    children = node.children()
    assert node.end() == 0
    assert all(map(gone, children))
    until(lambda: traces(tmp_path) <= before)


def test_every_line_of_a_json_log_is_json(start):
    """Also on stdout, and in the processes of the API and of the R-node."""
    node = start("--port", "0", "--kv-memory", "256MiB", "--mini-batches", "2", "--log-format", "json")
    complete(node.api())
    assert node.end() == 0
    lines = [orjson.loads(line) for line in node.log.read_bytes().splitlines()]
    text = " ".join(line["message"] for line in lines)
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    assert "Serving fastdecode-demo on http://" in text and "lease of" in text
    assert not re.search(r"\w+\(\w+=|\{'|<\w+ object", text)  # no value as Python writes it
    failed = start("--port", "0", "--model", "/nowhere", "--log-format", "json")
    assert failed.process.wait(START_SECONDS) != 0
    [line] = [orjson.loads(line) for line in failed.log.read_bytes().splitlines()]
    assert line["level"] == "critical" and "/nowhere" in line["message"]


@pytest.mark.parametrize("mini_batches", ["1", "2"])
def test_a_killed_s_node_ends_its_embedded_r_node_and_leaves_nothing_behind(mini_batches, start, tmp_path):
    before = traces(tmp_path)
    node = start("--port", "0", "--kv-memory", "256MiB", "--mini-batches", mini_batches)
    complete(node.api())
    children = node.children()
    assert len(children) == len(node.api_processes()) + (mini_batches == "2")
    node.end(signal.SIGKILL)
    assert all(map(gone, children))
    until(lambda: traces(tmp_path) <= before)


def test_interrupt_from_the_terminal_lets_running_requests_end(start):
    """A terminal sends ^C to the foreground process group, which must not include the embedded R-node."""
    node = start("--port", "0", "--kv-memory", "256MiB", "--drain-seconds", "30", own_group=True)
    ask = {"model": "fastdecode-demo", "prompt": "It was", "max_tokens": 200, "stream": True}
    stream = node.api().completions.create(**ask, extra_body={"ignore_eos": True})
    next(iter(stream))
    os.killpg(node.process.pid, signal.SIGINT)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert node.process.wait(60) == 0


def test_r_node_killed_ends_its_streams_with_an_error_and_the_s_node_stays_up(start, tmp_path):
    before = traces(tmp_path)
    sock = tmp_path / "r.sock"
    r_node = start("--role", "r", "--listen", f"shm://{sock}", "--kv-memory", "256MiB", "--threads", "1")
    r_node.wait_for("R-node on shm")
    s_node = start("--port", "0", "--r-node", f"shm://{sock}", "--reconnect-seconds", "0")
    api = s_node.api()
    stream = api.completions.create(
        model="fastdecode-demo",
        prompt="It was",
        max_tokens=900,
        n=32,  # takes seconds
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    r_node.end(signal.SIGKILL)
    with pytest.raises(openai.APIError, match="lost"):
        for _ in stream:
            pass
    until(lambda: traces(tmp_path) <= before)
    with pytest.raises(openai.InternalServerError):  # 503: the S-node is alive, but no R-node is connected
        complete(api)
    second = start("--role", "r", "--listen", f"shm://{sock}", "--kv-memory", "256MiB", "--threads", "1")
    second.wait_for("R-node on shm")
    s_node.wait_for(f"shm://{re.escape(str(sock))} is back")
    assert complete(api)
    assert s_node.regions() == 1  # the region of the dead link is unmapped
    assert s_node.end() == 0
    assert "the link was closed" not in s_node.log.read_text()  # the engine ended before the links were closed


def test_embedded_r_node_killed_is_started_again(start, tmp_path):
    before = traces(tmp_path)
    node = start("--port", "0", "--kv-memory", "256MiB", "--mini-batches", "2")  # side by side: a child process
    with node.api() as api:
        text = complete(api)
        child = node.r_node()
        for times in (1, 2):
            os.kill(child, signal.SIGKILL)
            node.wait_for("(?s)" + ".*is back" * times)
            assert complete(api) == text
            child, old = node.r_node(), child
            assert child != old
            until(lambda: traces(tmp_path) <= before)
    assert node.regions() == 1  # the regions of the dead links are unmapped
    assert node.end() == 0
    assert gone(child)
    until(lambda: traces(tmp_path) <= before)


def test_the_s_node_waits_for_an_r_node_that_is_not_up_yet(start, tmp_path):
    sock = tmp_path / "r.sock"
    s_node = start("--port", "0", "--r-node", f"shm://{sock}", "--connect-seconds", "30")
    s_node.wait_for(f"no R-node can be reached at shm://{re.escape(str(sock))}.*trying again for 30 s")
    start("--role", "r", "--listen", f"shm://{sock}", "--kv-memory", "64MiB", "--threads", "1")
    with s_node.api() as api:
        assert complete(api)
    waiting = start("--port", "0", "--r-node", f"shm://{tmp_path}/nobody.sock")
    waiting.wait_for("trying again")
    assert waiting.end() == 0


def test_port_in_use_is_noticed_before_the_weights_are_loaded(start, tmp_path):
    """The checkpoint has no weights, so the node would complain about them if it loaded them first."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir() / name).read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = start("--model", str(tmp_path), "--port", str(port))
        assert node.process.wait(START_SECONDS) == 1
    assert f"cannot serve the API on 127.0.0.1:{port}: Address already in use" in node.log.read_text().splitlines()[-1]


def test_tokens_beyond_the_models_vocabulary_are_a_warning_at_start(start, tmp_path):
    for path in model_dir().iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = orjson.loads((model_dir() / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").unlink()
    config["additional_special_tokens"] = ["<|one|>", "<|two|>"]
    (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    node = start("--port", "0", "--kv-memory", "256MiB", "--model", str(tmp_path))
    node.wait_for(re.escape("2 token(s) more than the model's 4096") + ".*" + re.escape("'<|one|>', '<|two|>'"))
    name = tmp_path.name
    with node.api() as api:
        assert api.completions.create(model=name, prompt="It was", max_tokens=2).choices[0].text
        with pytest.raises(openai.BadRequestError, match="outside the model's vocabulary"):
            api.completions.create(model=name, prompt="It was<|two|>", max_tokens=2)


def test_killed_s_node_frees_its_lease(start, tmp_path):
    """The first S-node leases nearly all of the memory, so the second can start only after that lease is freed."""
    sock = tmp_path / "r.sock"
    r_node = start("--role", "r", "--listen", f"shm://{sock}", "--kv-memory", "64MiB", "--threads", "1")
    r_node.wait_for("R-node on shm")
    everything = ("--port", "0", "--r-node", f"shm://{sock}", "--kv-lease", "1GiB")
    first = start(*everything)
    text = complete(first.api())
    refused = start(*everything, "--connect-seconds", "0")
    assert refused.process.wait(START_SECONDS) == 1
    assert "no memory for a KV-cache" in refused.log.read_text()
    first.end(signal.SIGKILL)
    r_node.wait_for(r"lease of \d+ pages ended")
    second = start(*everything)
    assert complete(second.api()) == text


def test_s_nodes_share_an_r_node_and_leases_grow_to_the_limit(start, tmp_path):
    """/health, /metrics and the log say what is leased and what could be had."""
    sock = tmp_path / "r.sock"
    r_node = start(
        *("--role", "r", "--listen", f"shm://{sock}", "--kv-memory", "256MiB", "--max-lease", "64MiB"), "--threads", "1"
    )
    r_node.wait_for("R-node on shm")
    options = ("--port", "0", "--r-node", f"shm://{sock}", "--max-model-len", "256")
    nodes = [start(*options) for _ in range(2)]
    with nodes[0].api() as one, nodes[1].api() as other:
        apis = [one, other]
        texts = {complete(api) for api in apis}
        assert len(texts) == 1
        for node, api in zip(nodes, apis, strict=True):
            room = r"has room for (\d+) tokens of fp16 KV-cache \(.*\), and for (\d+) once"
            leased, most = map(int, node.wait_for(room).groups())
            assert leased == 256
            base = str(api.base_url).removesuffix("/v1/")
            before = orjson.loads(fetch(f"{base}/health"))["nodes"][0]
            assert (before["pages_total"] * 128, before["pages_max"] * 128) == (leased, most)
            api.completions.create(
                model="fastdecode-demo", prompt=["It was"] * 8, max_tokens=200, extra_body={"ignore_eos": True}
            )
            metrics = fetch(f"{base}/metrics")
            pages, pages_max, region = (
                float(re.search(rf"^fastdecode:r_node_{name}{{.*}} (\S+)", metrics, re.M)[1])
                for name in ("pages", "pages_max", "region_bytes")
            )
            assert leased < pages * 128 <= pages_max * 128 == most and region > 4096
            assert pages_max == (64 << 20) // before["page_bytes"]
    assert len(re.findall("lease of .* granted, .* at most, and an activation region of", r_node.log.read_text())) == 2


def test_three_r_nodes_over_tcp_with_a_secret(start, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery staple")
    urls = []
    for _ in range(3):
        r_node = start(
            "--role",
            "r",
            "--listen",
            "tcp://127.0.0.1:0",
            "--kv-memory",
            "64MiB",
            "--threads",
            "1",
            "--secret-file",
            str(secret),
        )
        urls += ["--r-node", r_node.wait_for(r"R-node on (tcp://\S+):")[1]]
    api = start("--port", "0", *urls, "--secret-file", str(secret)).api()
    assert complete(api)
    wrong = tmp_path / "wrong"
    wrong.write_text("staple battery horse correct")
    refused = start("--port", "0", *urls, "--secret-file", str(wrong))
    assert refused.process.wait(START_SECONDS) == 1
    assert "secret" in refused.log.read_text()
    assert complete(api)


def test_check_prints_a_report_of_the_machine():
    out = subprocess.run([*NODE, "--check"], capture_output=True, text=True, check=True).stdout
    for fact in ("ISA", "cores", "memory", "NUMA", "huge pages", "GPU", "RDMA"):
        assert re.search(rf"^{fact}\s+\S", out, re.M), out


def test_both_backends_serve_the_same_tokens_with_and_without_an_api_process(start):
    options = ("--role", "s", "--port", "0", "--dtype", "fp32", "--kv-dtype", "fp32", "--kv-memory", "64MiB")
    texts = []
    for backend, processes in (("native", "1"), ("transformers", "0")):
        node = start(*options, "--backend", backend, "--api-processes", processes)
        node.api()
        assert len(node.api_processes()) == int(processes)
        texts.append(complete(node.api(), 40))
        assert node.end() == 0
    assert texts[0] == texts[1] != ""


def test_a_tiny_model_is_computed_in_one_thread(start):
    options = ("--role", "s", "--port", "0", "--kv-memory", "64MiB")
    tiny = start(*options, "--model", str(make_checkpoint("llama-gqa")))
    demo = start(*options)
    tiny.wait_for(r"S-Part of only \d+ parameters computes in one thread")
    demo.api()
    assert "in one thread" not in demo.log.read_text()


def test_the_log_says_what_ends_a_turn(start):
    node = start("--role", "s", "--port", "0", "--kv-memory", "64MiB", "--model", str(make_checkpoint("llama-gqa")))
    node.wait_for(r"a turn ends at </s> \(1\)")
    node.api()


def test_check_says_what_fits_of_a_model():
    run = subprocess.run([*NODE, "--check", "--model", str(model_dir())], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "by the native backend" in run.stdout and "KV int8" in run.stdout and "per token" in run.stdout


async def test_a_signal_is_waited_for_before_anything_is_said():
    """A SIGTERM right after the first line of the log ended the process before it had a handler for it."""
    begun = []

    async def begin(name):
        begun.append(name)

    await run_until(begin("the work"), begin("the wait for a signal"))
    assert begun == ["the wait for a signal", "the work"]
