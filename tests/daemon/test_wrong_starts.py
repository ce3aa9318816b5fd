"""Wrong starts: `fastdecode-node` answers each in one sentence, before it reads a weight."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from nodes.node_process import Node

from fastdecode.daemon.machine import total_memory
from fastdecode.daemon.node import main
from fastdecode.demo import model_dir

#: Options, and the words of the answer. A name in braces is one of `there`.
S_STARTS = [
    # options that are no values
    ("--port 70000", "argument --port: 70000 is not a TCP port"),
    ("--modle x", "unrecognized arguments: --modle x; did you mean --model?"),
    ("--weights int3", "argument --weights: invalid choice: 'int3'"),
    ("--dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
    ("--kv-memory 64", "argument --kv-memory: 64 is less than a MiB; is 64GiB meant?"),
    ("--kv-lease 0.5", "argument --kv-lease: '0.5' is not a size"),
    ("--kv-memory 4parsecs", "argument --kv-memory: '4parsecs' is not a size such as 4GiB"),
    ("--cors-origin example", "argument --cors-origin: 'example' is not an origin such as https://"),
    ("--otlp-traces-endpoint collector", "argument --otlp-traces-endpoint: 'collector' is not a URL such as http://"),
    ("--lora french", "argument --lora: 'french' is not a name and a directory"),
    ("--r-node http://127.0.0.1:7300", "'http://127.0.0.1:7300' does not begin with a known transport"),
    ("--r-node tcp://127.0.0.1", "argument --r-node: 'tcp://127.0.0.1' is not a URL such as tcp://host:port"),
    ("--prefill-at tcp://a:0", "argument --prefill-at: 'tcp://a:0' is not of the form tcp://host:port"),
    ("--tensor-parallel 65", "--tensor-parallel is at most 64"),
    ("--tensor-parallel 2 --device cuda", "--tensor-parallel is for S-Parts on CPUs"),
    ("--tensor-parallel 2 --backend transformers --lora a={empty}", "are not supported together for LlamaForCausalLM"),
    ("--tensor-parallel 2 --numa-node 0", "--tensor-parallel and --numa-node are not supported together"),
    ("--tensor-parallel 2 --weights int4", "--tensor-parallel and --weights int4 need --no-calibration"),
    ("--weights int8 --save-weights {empty}", "--save-weights {empty}: this exists already"),
    ("--config {none}", "--config {none}: No such file or directory"),
    ("--config {text}", "must be a mapping of options and values"),
    # files
    ("--model {none}", "--model {none}: there is no such directory or file"),
    ("--model meta-llama/Llama-3.2-1B", "does not have it: hf download meta-llama/Llama-3.2-1B"),
    ("--model {empty}", "--model {empty}: the directory has no config.json and no .gguf file"),
    ("--model {broken}", "config.json is not JSON"),
    ("--secret-file {none}", "--secret-file {none}: No such file or directory"),
    ("--secret-file {text}", "--secret-file {text} has 4 bytes and needs 16 or more"),
    ("--api-key-file {none}", "--api-key-file {none}: No such file or directory"),
    ("--ssl-certfile {text}", "not a certificate chain and its private key"),
    ("--chat-template {none}", "--chat-template {none}: No such file or directory"),
    ("--chat-template {jinja}", "the chat template is not valid Jinja: line 1"),
    ("--lora french={none}", "--lora french={none}: there is no such directory"),
    (
        "--lora french={empty}",
        "adapter 'french': {empty} is not the directory of an adapter: it has no adapter_config.json",
    ),
    ("--prefill-file {none} --r-node {open}", "--prefill-file {none}: No such file or directory"),
    ("--r-nodes-file {none} --connect-seconds 0", "no R-nodes: {none}: No such file or directory"),
    # what this machine does not have
    ("--port {taken}", "cannot serve the API on 127.0.0.1:{taken}: Address already in use"),
    ("--host 192.0.2.1", "cannot serve the API on 192.0.2.1:0: Cannot assign requested address"),
    ("--kv-memory 500TiB", "--kv-memory 500.0 TiB is more than the"),
    ("--cpus 1023", "--cpus: 1023 is not a cpu that this process may use"),
    ("--numa-node 99", "--numa-node: there is no NUMA node 99"),
    ("--check --kv-memory 500TiB", "--kv-memory 500.0 TiB is more than the"),
    ("--exchange bypass --device cpu", "--exchange bypass: the exchange 'bypass' is for GPUs"),
    # what the model does not have
    ("--max-model-len 5000", "--max-model-len 5000 is more than the model's 1024 positions"),
    ("--kv-memory 1.1MiB", "--kv-memory 1.1 MiB is too small for 128 tokens of LlamaForCausalLM"),
    ("--partition heads --r-node {open} --r-node {open} --r-node {open}", "3 R-nodes cannot share the 2 KV heads"),
    ("--tensor-parallel 3", "--tensor-parallel 3: 3 ranks cannot share the 8 query heads and 2 KV heads"),
    # R-nodes
    (
        "--r-node shm://{none} --connect-seconds 0",
        "no R-node can be reached at shm://{none}: No such file or directory (is it running? --connect-seconds",
    ),
    ("--r-node tcp://127.0.0.1:{taken}", "tcp://127.0.0.1:{taken} does not answer as an R-node"),
    (
        "--r-node {guarded}",
        "{guarded} refuses: the node asks for a shared secret (--secret-file)",
    ),
    ("--r-node {guarded} --secret-file {secret}", "{guarded} refuses: the shared secrets of the two nodes differ"),
    ("--r-node {open} --secret-file {secret}", "{open} refuses: the node has no shared secret (--secret-file)"),
    ("--prefill-listen tcp://127.0.0.1:{taken} --r-node {open}", "cannot listen on tcp://127.0.0.1:{taken}: Address"),
]
R_STARTS = [
    ("", "--role r needs --listen"),
    ("--listen tcp://127.0.0.1:{taken}", "cannot listen on tcp://127.0.0.1:{taken}: Address already in use"),
    (
        "--listen tcp://0.0.0.0:0",
        "other machines can reach tcp://0.0.0.0:0 and there is no shared secret, so anybody could use this node; "
        "give it a secret (--secret-file), or",
    ),
    ("--listen http://127.0.0.1:7300", "'http://127.0.0.1:7300' does not begin with a known transport"),
    ("--listen shm:///nowhere/socket", "cannot listen on shm:///nowhere/socket: No such file or directory"),
    ("--listen tcp://127.0.0.1:0 --kv-memory 64", "--kv-memory: 64 is less than a MiB; is 64GiB meant?"),
    ("--listen tcp://127.0.0.1:0 --port 80", "--port is not an option of --role r"),
    ("--listen tcp://127.0.0.1:0 --numa-node 99", "--numa-node: there is no NUMA node 99"),
    ("--check --cpus 1023", "--cpus: 1023 is not a cpu that this process may use"),
    ("--listen tcp://127.0.0.1:0 --huge-pages hugetlb --kv-memory 50TiB", "set vm.nr_hugepages to"),
    ("--listen tcp://127.0.0.1:0 --prefault --kv-memory {memory}", "--prefault needs all of --kv-memory"),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What the options name: files, an HTTP server's port, and two R-nodes, one of them with a secret."""
    folder = tmp_path_factory.mktemp("there")
    files = {name: folder / name for name in ("none", "empty", "text", "jinja", "secret", "their-secret")}
    files["empty"].mkdir()
    files["text"].write_text("text")
    files["jinja"].write_text("{% if %}")
    files["secret"].write_text("a secret of sixteen bytes")
    files["their-secret"].write_text("another secret of sixteen bytes")
    for name, file in (("unread", "model.safetensors"), ("broken", "config.json")):
        files[name] = Path(shutil.copytree(model_dir(), folder / name))
        (files[name] / file).write_text("neither weights nor JSON")
    nodes = [
        Node(folder, "--role", "r", "--listen", "tcp://127.0.0.1:0", "--kv-memory", "64MiB", "--threads", "1", *options)
        for options in ((), ("--secret-file", str(files["their-secret"])))
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=_answer_as_http, args=[taken], daemon=True).start()
        urls = [node.wait_for(r"R-node on (tcp://\S+):")[1] for node in nodes]
        yield SimpleNamespace(
            **{name: str(path) for name, path in files.items()},
            taken=taken.getsockname()[1],
            open=urls[0],
            guarded=urls[1],
            memory=total_memory(),
            guarded_log=nodes[1].log,
        )
        taken.shutdown(socket.SHUT_RDWR)
    for node in nodes:
        node.end()


def _answer_as_http(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a start with these options ends with."""
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fastdecode-node: error: ")
    return lines[0]


@pytest.mark.parametrize(("options", "words"), S_STARTS, ids=[options for options, _ in S_STARTS])
def test_an_s_node_answers_before_it_reads_weights(options, words, there, capsys):
    """The weights are no weights, so a start that read them would say so instead."""
    given = options.format(**vars(there)).split()
    defaults = {"--model": there.unread, "--port": "0"}
    argv = ["--role", "s", *(word for name, value in defaults.items() if name not in given for word in (name, value))]
    assert words.format(**vars(there)) in answer([*argv, *given], capsys)


def test_weights_that_are_none_are_said_where_nothing_else_is_wrong(there, capsys):
    assert "safetensors" in answer(["--role", "s", "--model", there.unread, "--port", "0"], capsys)


@pytest.mark.parametrize("options", [["--model", "{none}"], ["--model", "{unread}", "--lora", "a={none}"]], ids=str)
def test_an_option_that_names_no_directory_ends_with_status_2(options, there):
    with pytest.raises(SystemExit) as end:
        main(["--role", "s", "--port", "0", *(option.format(**vars(there)) for option in options)])
    assert end.value.code == 2


@pytest.mark.parametrize(("options", "words"), R_STARTS, ids=[options for options, _ in R_STARTS])
def test_an_r_node_answers(options, words, there, capsys):
    given = options.format(**vars(there)).split()
    assert words.format(**vars(there)) in answer(["--role", "r", *given], capsys)


def test_the_r_node_logs_which_secret_was_wrong(there, capsys):
    answer(["--model", there.unread, "--port", "0", "--r-node", there.guarded, "--secret-file", there.secret], capsys)
    log = there.guarded_log.read_text()
    assert f"{there.guarded} refused 127.0.0.1:" in log and "the shared secrets of the two nodes differ" in log
