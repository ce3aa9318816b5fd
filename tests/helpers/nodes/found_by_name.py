"""Nodes that are found by names with several addresses, in a namespace with a name server: `python found_by_name.py
FOLDER`, by `unshare --net --mount`. Fails by an assertion."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import aiohttp
from engines.event_source import EventSource
from engines.routed import SECRET
from engines.scripted_engine import ScriptedEngine
from models.tokenizers_made import byte_level
from wire.name_server import NameServer, enter

from fastdecode.api.app import ApiOptions, make_app
from fastdecode.api.server import bind, serve
from fastdecode.daemon.discovery import DiscoveryError, DnsSet
from fastdecode.text.tokenizer import Tokenizer
from nodes.node_process import Node

S_NODES, ROUTERS = ["127.0.0.2", "127.0.0.3"], ["127.0.0.4", "127.0.0.5"]
ASK = ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 10, "stream": True})


async def a_set_follows_its_name(names: NameServer) -> None:
    """An answer may be cut short: an address has left when three answers in a row have lacked it."""
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2"], ["10.0.0.2", "fd00::1"], *[["10.0.0.2"]] * 3]
    found, read = DnsSet("tcp://r-nodes:7300"), []
    for names.addresses["r-nodes"] in answers:
        read.append(await found.read())
    one, two, six = "tcp://10.0.0.1:7300", "tcp://10.0.0.2:7300", "tcp://[fd00::1]:7300"
    assert read == [[one, two], [one, two], [one, two, six], [two, six], [two, six], [two]], read
    del names.addresses["r-nodes"]
    with contextlib.suppress(DiscoveryError):
        raise AssertionError(await found.read())


async def a_client_finds_the_router_that_is_left(names: NameServer, folder: Path) -> None:
    """And its stream goes on there, at the S-node that has it."""
    tokenizer, go_on = Tokenizer.from_dir(byte_level(folder)), asyncio.Event()
    (folder / "secret").write_bytes(SECRET)
    servers, options = [], ApiOptions(("tiny",), router_secret=SECRET)
    for address in S_NODES:
        engine = ScriptedEngine([*range(20, 24), go_on, *range(24, 30)])
        servers.append(await serve(make_app(engine, tokenizer, options), bind(address, 8001)))
    names.addresses |= {"s-nodes": S_NODES, "routers": ROUTERS[:1]}
    words = ("--port", "8000", "--s-nodes-dns", "http://s-nodes:8001", "--secret-file", str(folder / "secret"))
    routers = [Node(folder, "--host", address, *words, program="router") for address in ROUTERS]
    try:
        for router in routers:
            await asyncio.to_thread(router.wait_for, r"takes requests(?s:.)*takes requests")
        source = EventSource(*ASK)
        async with aiohttp.ClientSession("http://routers:8000") as http:
            await source.read(http, 4)
            names.addresses["routers"] = ROUTERS
            assert await asyncio.to_thread(routers[0].end, signal.SIGKILL) == -signal.SIGKILL
        go_on.set()
        async with aiohttp.ClientSession("http://routers:8000") as http:
            await source.read(http)
        assert source.data[-1] == "[DONE]" and [int(id.rpartition(":")[2]) for id in source.ids] == list(range(11))
    finally:
        for router in routers:
            router.process.kill()
        for server in servers:
            await server.close(grace=0)


async def main(folder: Path) -> None:
    names = NameServer()
    await names.start()
    await a_set_follows_its_name(names)
    await a_client_finds_the_router_that_is_left(names, folder)


if __name__ == "__main__":
    enter(Path(sys.argv[1]))
    asyncio.run(asyncio.wait_for(main(Path(sys.argv[1])), 120))
