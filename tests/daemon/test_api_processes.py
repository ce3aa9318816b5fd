"""Deaths of the API's processes, and of the engine's: they cost their own requests, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import openai
import pytest
from engines.scripted_engine import ScriptedEngine
from nodes.node_process import START_SECONDS, complete, fetch, gone, traces, until

from fastdecode.api.server import bind
from fastdecode.daemon import api_processes
from fastdecode.daemon.config import NodeConfig
from fastdecode.service import host

#: A request that takes seconds.
LONG = {"model": "fastdecode-demo", "prompt": "It was", "max_tokens": 900, "n": 32, "stream": True}
LONG |= {"extra_body": {"ignore_eos": True}}
NODE = ("--port", "0", "--kv-memory", "256MiB")


def health(api: openai.OpenAI) -> str:
    return fetch(str(api.base_url).removesuffix("/v1/") + "/health")


def wait_until_idle(api: openai.OpenAI) -> None:
    deadline = time.monotonic() + 60
    while not re.search(r'"running":0,"waiting":0', health(api)):
        assert time.monotonic() < deadline, health(api)
        time.sleep(0.05)


def stream_of(api: openai.OpenAI, others: list[int], request: dict[str, Any]) -> Any:
    """A stream that none of the processes `others` serves: they are stopped while it begins."""
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        stream = api.completions.create(**request)
        next(iter(stream))
        return stream
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def test_a_killed_api_process_costs_its_own_connections_and_is_started_again(start, tmp_path):
    before = traces(tmp_path)
    node = start(*NODE, "--api-processes", "2")
    api = node.api()
    one, other = node.api_processes()
    apis = [node.api(), node.api()]
    lost = stream_of(apis[0], [other], LONG)
    kept = stream_of(apis[1], [one], LONG | {"max_tokens": 600, "n": 1})
    os.kill(one, signal.SIGKILL)
    with pytest.raises((openai.APIError, OSError)):
        for _ in lost:
            pass
    assert [chunk.choices[0].finish_reason for chunk in kept if chunk.choices][-1] == "length"
    node.wait_for(rf"API process {one} ended by SIGKILL.*starting another")
    wait_until_idle(api)  # the engine has cancelled the lost stream
    assert complete(api)
    assert len(node.api_processes()) == 2 and one not in node.api_processes()
    children = node.children()
    assert node.end() == 0
    assert all(map(gone, children))
    until(lambda: traces(tmp_path) <= before)


def test_a_killed_engine_process_ends_the_streams_with_a_clear_error_and_leaves_nothing_behind(start, tmp_path):
    before = traces(tmp_path)
    node = start(*NODE)
    api, children = node.api(), node.children()
    stream = api.completions.create(**LONG | {"n": 16})  # sockets hold all chunks of 16 choices unread, not of 32
    next(iter(stream))
    node.end(signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the engine's process has ended"):
        for _ in stream:
            pass
    assert all(map(gone, children))
    assert re.search("CRITICAL .*: the engine's process has ended, and with it 16 choices", node.log.read_text())
    until(lambda: traces(tmp_path) <= before)


#: Starts a program that ends when this one does.
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-m", "fastdecode.cluster.leash", str(os.getpid()), sys.executable, *sys.argv[1:]]
subprocess.Popen(command).wait()
"""


def test_the_log_of_an_idle_node_that_ends_with_its_parent_ends_calmly(tmp_path):
    log = tmp_path / "node.log"
    with log.open("wb") as out:
        command = [sys.executable, "-c", PARENT, "-m", "fastdecode.daemon.node", *NODE]
        parent = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + START_SECONDS
    while "Serving" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while "the engine's process has ended" not in log.read_text():
        assert time.monotonic() < deadline + 60, log.read_text()
        time.sleep(0.1)
    assert not re.search("WARNING|ERROR|CRITICAL", log.read_text())


def test_a_client_that_vanishes_frees_its_request_and_connections_wait_for_the_next_api_process(start):
    node = start(*NODE)
    api = node.api()
    stream = api.completions.create(**LONG)
    next(iter(stream))
    assert not re.search(r'"running":0', health(api))
    stream.close()
    wait_until_idle(api)
    [pid] = node.api_processes()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert complete(node.api())
    assert node.end() == 0


async def test_a_hung_api_process_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr(host, "_HEARTBEAT_SECONDS", 0.25)
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    processes = api_processes.ApiProcesses(NodeConfig(), sockets)
    [child] = processes._children
    try:
        await processes.serve(ScriptedEngine())
        os.kill(child.process.pid, signal.SIGSTOP)
        answer = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/version")
        assert "version" in answer
    finally:
        await processes.close()
    assert f"API process {child.process.pid} hangs; killing it" in caplog.text
    assert child.process.returncode == -signal.SIGKILL


async def test_a_hung_api_process_does_not_keep_the_node_from_ending(monkeypatch, caplog):
    monkeypatch.setattr(api_processes, "_DRAIN_SECONDS", 0.5)
    monkeypatch.setattr(api_processes, "_END_SECONDS", 0.5)
    processes = api_processes.ApiProcesses(NodeConfig(), bind("127.0.0.1", 0))
    [child] = processes._children
    try:
        await processes.serve(ScriptedEngine())
        os.kill(child.process.pid, signal.SIGSTOP)
        await processes.drain(0)
        assert "has not ended its requests" in caplog.text
    finally:
        await processes.close()
    assert f"API process {child.process.pid} does not end; killing it" in caplog.text
    assert child.process.returncode == -signal.SIGKILL


def test_an_api_process_that_cannot_start_ends_the_node_with_a_sentence(start, tmp_path):
    """The chat template is valid when the engine's process reads it, and no more when the API process does."""
    template = tmp_path / "template.jinja"
    os.mkfifo(template)
    node = start(*NODE, "--chat-template", str(template))
    template.write_text("{{ messages }}")  # returns once the engine's process reads it
    node.wait_for("by the native backend")
    template.write_text("{% if %}")
    assert node.process.wait(60) == 1
    assert re.search(r"error: API process \d+ ended with exit status 1 before it served", node.log.read_text())
