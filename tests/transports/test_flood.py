"""Connections that prove nothing, and links that wait for a data connection that never comes.

There may be any number of them. They cost the S-nodes beside them nothing.
"""

from __future__ import annotations

import pytest
from wire.link_driver import hello
from wire.wire_peers import Caller, attach, attach_message, hello_message, open_link

from fastdecode.daemon.rnode import RNode
from fastdecode.transports import connections, server
from fastdecode.transports.registry import connect

#: A flood of 88 connections a second during one round trip of 100 ms.
FLOOD = 9


class Flood:
    """Connections that say nothing, or begin a frame and do not end it."""

    def __init__(self, url: str):
        self._url = url
        self.callers: list[Caller] = []

    async def rise(self, n: int) -> None:
        for _ in range(n):
            caller = await Caller.dial(self._url)
            if len(self.callers) % 2:
                caller.send(b"\x10\0\0\0{")
            self.callers.append(caller)

    async def end(self) -> None:
        for caller in self.callers:
            await caller.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_many_silent_connections_keep_no_s_node_out(r_node, bystander, transport):
    url = getattr(r_node, transport)
    flood = Flood(url)
    await flood.rise(connections.MAX_UNPROVED + 8)
    link = await connect(url, hello(), None)
    await link.close()
    for caller in flood.callers[:8]:
        assert b"REFUSED" not in await caller.read_to_end()  # the server dropped it at once, not at the deadline
    await flood.end()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_hand_shakes_with_long_round_trips_succeed_during_a_flood(r_node, bystander, transport):
    """Between any two messages of each hand-shake as many connections come as in a round trip of 100 ms."""
    url = getattr(r_node, transport)
    flood = Flood(url)
    for _ in range(8):
        control = await Caller.dial(url)
        await flood.rise(FLOOD)
        assert (await control.read_message())["type"] == "CHALLENGE"
        control.send_message(hello_message())
        await flood.rise(FLOOD)
        token = (await control.read_message())["token"]
        await flood.rise(FLOOD)
        data = await Caller.dial(url)
        await flood.rise(FLOOD)
        assert (await data.read_message())["type"] == "CHALLENGE"
        data.send_message(attach_message(token))
        await flood.rise(FLOOD)
        assert (await data.read_message())["type"] == "ATTACHED"
        control.send_message({"type": "PING", "id": 1})
        assert (await control.read_message())["type"] == "OK"
        await control.close()
        await data.read_to_end()
        await data.close()
    await flood.end()


async def test_a_flood_from_one_address_costs_another_address_nothing(r_node, bystander, monkeypatch):
    """However slow the S-node at the other address is."""
    monkeypatch.setattr(connections, "MAX_UNPROVED", 16)
    flood = Flood(r_node.tcp)
    await flood.rise(8)
    control = await Caller.dial(r_node.tcp, local_addr=("127.0.0.2", 0))
    await flood.rise(4 * connections.MAX_UNPROVED)
    await control.read_message()
    control.send_message(hello_message())
    assert (await control.read_message())["type"] == "WELCOME"
    await control.close()
    await flood.end()


async def wait_in_vain(node: RNode, n: int, **options: object) -> list[Caller]:
    return [(await open_link(node.tcp, max_seqs=1, kv_bytes=1 << 20, **options))[0] for _ in range(n)]


async def test_links_that_wait_for_their_data_connection_have_a_limit_of_their_own(r_node, bystander, monkeypatch):
    """The oldest link of the address that has most of them ends; a link that has its data connection never does."""
    monkeypatch.setattr(server, "MAX_UNATTACHED", 4)
    attached, token = await open_link(r_node.tcp)
    data = await attach(r_node.tcp, token)
    far, far_token = await open_link(r_node.tcp, local_addr=("127.0.0.2", 0))
    near = await wait_in_vain(r_node, 5)
    for control in near[:2]:
        assert "too many links wait for their data connection" in (await control.read_message())["message"]
        assert await control.read_to_end() == b""
    far_data = await attach(r_node.tcp, far_token)
    for control in (far, attached, *near[2:]):
        control.send_message({"type": "PING", "id": 1})
        assert (await control.read_message())["type"] == "OK"
    for caller in (*near, far, attached):
        await caller.close()
    for caller in (data, far_data):
        await caller.read_to_end()
        await caller.close()
