"""`fastdecode-bench serve`: the requests that it sends, and its reading of the answers. No figure is judged here."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from fastdecode.bench.serving import client, report, workload
from fastdecode.bench.serving.workload import LoadRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,2.0,ChatGPT,472,18,490,Conversation log
45,2,1.0,ChatGPT,100,0,100,Conversation log
118,3,3.0,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 3500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8, 10]}
"""


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    first, second = workload.read_trace(path)
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-5)


def test_burstgpt_trace_without_its_failed_requests(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURST)
    assert workload.read_trace(path) == [LoadRequest(0.0, 472, 18), LoadRequest(113.0, 1087, 230)]


def test_prompts_of_a_mooncake_trace_share_the_blocks_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    requests = workload.read_trace(path)
    assert [request.arrival for request in requests] == [0.0, 2.5]
    prompts = workload.Prompts(3, 1000, seed=0)
    one, two = (prompts.make(i, request) for i, request in enumerate(requests))
    assert (len(one), len(two)) == (1100, 1030)
    shared = 2 * workload.MOONCAKE_BLOCK
    assert one[:shared] == two[:shared] and one[shared:1030] != two[shared:]
    assert all(3 <= token <= 1000 for token in one)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv is not a trace"):
        workload.read_trace(path)


def test_arrivals_have_the_rate_asked_for() -> None:
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0)):  # of gamma gaps: 1 / sqrt(shape)
        requests = workload.at_rate(workload.fixed(20000, 1, 1), 50.0, burstiness, seed=1)
        gaps = np.diff([request.arrival for request in requests])
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_scaled_requests_fit_the_context() -> None:
    requests = workload.scaled([LoadRequest(0.0, 4000, 900), LoadRequest(1.0, 1, 1)], 0.5, 600)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(300, 300), (1, 1)]


class ScriptedServer:
    """An HTTP server that streams tokens at known times."""

    def __init__(self, first: float, gap: float):
        self.first, self.gap = first, gap
        self.bodies: list[dict] = []
        self.under_way = self.most_under_way = 0
        self.await_under_way = 1  # every answer waits until this many requests have been under way at once

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["prompt"][0] == 999:
            return web.json_response({"error": {"message": "no"}}, status=429)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while self.most_under_way < self.await_under_way:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.first)
        for i in range(body["max_tokens"]):
            if i:
                await asyncio.sleep(self.gap)
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        self.under_way -= 1
        return response


@pytest.fixture
async def scripted():
    server = ScriptedServer(first=0.05, gap=0.02)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield server, client.Target(f"http://127.0.0.1:{port}/v1", "toy")
    await runner.cleanup()


async def load(server: client.Target, requests: list[LoadRequest], **options) -> client.LoadRun:
    prompts = workload.Prompts(3, 900, seed=0)
    options = {"concurrency": None, "timeout": 20.0, "deadline": None, "progress": False} | options
    return await client.run(server, requests, prompts, **options)


async def test_latencies_are_those_of_the_server(scripted) -> None:
    server, where = scripted
    run = await load(where, [LoadRequest(0.1 * i, 5, 6) for i in range(5)])
    result = report.summary(run, slo_ttft=5.0, slo_tbt=None)
    assert (result["completed"], result["failed"]) == (5, 0)
    # The server sleeps at least this long; how much longer is the machine's affair.
    assert result["ttft_ms"]["p50"] >= 50 and result["tbt_ms"]["p50"] >= 20 and result["tpot_ms"]["p50"] >= 20
    assert result["e2e_ms"]["p50"] >= 150
    assert all(len(answer.chunks) == 6 and answer.output_tokens == 6 for answer in run.answers)
    assert [len(body["prompt"]) for body in server.bodies] == [5] * 5
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["stream"] is True
    assert result["goodput_per_s"] == pytest.approx(5 / run.seconds)
    assert sum(point["tokens_per_s"] for point in report.timeline(run)) == 30


async def test_arrivals_do_not_wait_for_answers_and_a_closed_loop_does(scripted) -> None:
    server, where = scripted
    server.await_under_way = 8
    await load(where, workload.fixed(8, 4, 3))
    assert server.most_under_way == 8
    server.most_under_way, server.await_under_way = 0, 2
    await load(where, workload.fixed(8, 4, 3), concurrency=2)
    assert server.most_under_way == 2


async def test_a_deadline_keeps_what_has_come(scripted) -> None:
    _, where = scripted
    run = await load(where, [LoadRequest(0.0, 4, 2), LoadRequest(0.0, 4, 4000)], deadline=5.0)
    result = report.summary(run, None, None)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert "given up at the end of the run" in next(iter(result["errors"]))


async def test_a_refused_request_is_counted_with_its_reason(scripted) -> None:
    _, where = scripted
    prompts = workload.Prompts(999, 999, seed=0)
    options = {"concurrency": None, "timeout": 20.0, "deadline": None, "progress": False}
    run = await client.run(where, workload.fixed(2, 3, 3), prompts, **options)
    assert report.summary(run, None, None)["errors"] == {'HTTP 429: {"error": {"message": "no"}}': 2}
