"""/cluster and the files of the page, over HTTP."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import pytest
from engines.api_client import served
from engines.scripted_engine import ScriptedEngine

from fastdecode.api import reports
from fastdecode.api.page import page_routes

pytestmark = pytest.mark.quick


async def report(client):
    async with client.http.get("/cluster") as response:
        assert response.status == 200
        return await response.json()


async def test_counts_of_two_answers(client, model):
    for n in (5, 7):
        await client.openai.completions.create(
            model="tiny", prompt="The quick", max_tokens=n, extra_body={"ignore_eos": True}
        )
    found = await report(client)
    assert found["totals"]["generated_tokens"] == 12
    assert sum(found["histograms"]["first_token"]["counts"]) == 2
    assert sum(found["histograms"]["inter_token"]["counts"]) == 10
    for histogram in found["histograms"].values():
        assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
    [node] = found["nodes"]
    layers = model.config.num_hidden_layers
    assert node["calls"] == found["totals"]["steps"] * layers
    assert node["rows"] >= node["calls"] and node["kv_bytes_read"] > 0
    # Each step has an interval more than layers, one after the other, and they add up to what the S-Part took.
    intervals = found["timeline"]
    assert [number for _, number, *_ in intervals] == [*range(layers + 1)] * found["totals"]["steps"]
    assert all(asked <= replied <= ended for _, _, asked, replied, ended in intervals)
    assert all(before[-1] <= after[2] for before, after in pairwise(intervals))
    computed = sum(ended - replied for *_, replied, ended in intervals) / 1e6
    waited = sum(replied - asked for _, _, asked, replied, _ in intervals) / 1e6
    rounding = 1e-6 * len(intervals)
    assert computed == pytest.approx(found["totals"]["s_seconds"], abs=rounding)
    assert waited == pytest.approx(found["totals"]["r_wait_seconds"], abs=rounding)


async def test_many_watchers_ask_the_r_nodes_once(tokenizer, monkeypatch):
    monkeypatch.setattr(reports, "_FRESH_SECONDS", 60.0)
    engine, asked = ScriptedEngine(), 0

    report_of = engine.report

    async def counted(n):
        nonlocal asked
        asked += 1
        return await report_of(n)

    engine.report = counted

    async with served(engine, tokenizer) as client:
        found = await asyncio.gather(*(report(client) for _ in range(8)))
    assert asked == 1 and all(one == found[0] for one in found)


async def test_the_page_is_open_and_its_figures_ask_for_the_key(tokenizer):
    async with served(ScriptedEngine(), tokenizer, api_keys=["secret"], key="wrong") as client:
        for route in page_routes():
            async with client.http.get(route.path, headers={"Authorization": ""}) as response:
                assert response.status == 200
        async with client.http.get("/cluster") as response:
            assert response.status == 401


async def test_files_are_sent_once_and_name_no_other_host(tokenizer):
    async with served(ScriptedEngine(), tokenizer) as client:
        for route in page_routes():
            async with client.http.get(route.path) as response:
                body, etag = await response.text(), response.headers["ETag"]
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            hosts = set(re.findall(r"https?://[^\s\"'<>]+", body)) - {"http://www.w3.org/2000/svg"}
            assert not hosts or "/vendor/" in route.path, "the comments of a library may name its authors"
            async with client.http.get(route.path, headers={"If-None-Match": etag}) as response:
                assert (response.status, await response.read()) == (304, b"")
