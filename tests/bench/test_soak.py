"""`fastdecode-bench soak`, for some seconds: S-nodes share an R-node, and are killed."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from nodes.forked import run

from fastdecode.bench.soak import _Soak
from fastdecode.bench.soaking.load import KnownRequest, SoakClient, Tally


@pytest.mark.timeout(400)
def test_three_s_nodes_share_an_r_node_and_are_killed(tmp_path):
    command = ["-m", "fastdecode.bench.cli", "soak", "--minutes", "0.15", "--kill-every", "5", "--json"]
    done = run(*command, "--logs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["faults"] == [] and len(seen["snodes"]) == 3
    for row in seen["snodes"]:
        assert row["equal"] > 0 and row["wrong"] == row["failed"] == 0
    assert sum(row["kills"] for row in seen["snodes"]) >= 1
    assert seen["r_node"]["most_leased"] > 3 << 20
    before, after = seen["r_node"]["before"], seen["r_node"]["after"]
    assert (after["descriptors"], after["threads"], after["free"]) <= (
        before["descriptors"],
        before["threads"],
        before["free"],
    )


def test_a_soak_that_finds_a_fault_says_so(tmp_path):
    """An R-node that refuses its memory ends at start, and the soak with an error."""
    command = ["-m", "fastdecode.bench.cli", "soak", "--snodes", "1", "--kv-memory", "50KiB"]
    done = run(*command, "--logs", str(tmp_path))
    assert done.returncode == 1
    assert "a node ended at start" in done.stderr and "--kv-memory" in done.stderr


async def test_kills_that_are_late_end_with_the_soak():
    soak, over = _Soak(argparse.Namespace(snodes=1, kill_every=0.0), Path(), Path()), asyncio.Event()
    over.set()
    await soak._kill_in_turn(over)


async def test_each_way_of_asking_notices_a_wrong_answer():
    """A server that answers `right` to all is right, wrong, cut off or at fault, as the request and the prompt say."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["prompt"] == [0]:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "right"}] * body.get("n", 1)})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in (b'{"choices": [{"text": "ri"}]}', b'{"choices": [{"text": "ght"}]}'):
            await response.write(b"data: " + event + b"\n\n")
        if body["prompt"] != [1]:
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        client, rng = SoakClient(session, "model"), random.Random(0)
        client.url = str(server.make_url("")).rstrip("/")
        for way, answers in (("whole", 1), ("stream", 1), ("three", 3)):
            for text, outcome in (("right", "equal"), ("right!", "wrong")):
                tally = Tally()
                await client.send(KnownRequest([7], 2, text), way, tally, rng)
                assert tally.answers == {outcome: answers}
                assert tally.tokens == 2 * answers * (outcome == "equal") and bool(tally.problems) == (
                    outcome == "wrong"
                )
            with pytest.raises(RuntimeError, match="500"):
                await client.send(KnownRequest([0], 2, "right"), way, Tally(), rng)
        with pytest.raises(aiohttp.ClientError, match="DONE"):
            await client.send(KnownRequest([1], 2, "right"), "stream", Tally(), rng)
        tally = Tally()
        await client.send(KnownRequest([7], 2, "right"), "left", tally, rng)
        assert tally.answers == {"left": 1}
