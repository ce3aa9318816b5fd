"""Several links share an R-node's memory: leases grow, a limit bounds each, and activation regions count."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from nodes.rnode_process import KV_BYTES
from wire.link_driver import HANG_S, SMALL, Driver, hello, in_thread
from wire.wire_peers import FakeRNode, attach, open_link

from fastdecode.daemon import rnode
from fastdecode.daemon.rnode import RNode
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.prefixes import CachedSequence
from fastdecode.region.contract import PAGE_TOKENS, ROW_DTYPE
from fastdecode.region.geometry import Geometry, region_layout
from fastdecode.transports.base import LinkDown, LinkRefused
from fastdecode.transports.registry import connect

PAGE = 64 << 10  # bytes of SMALL's fp32 page
REGION = region_layout(SMALL).region_bytes


@contextlib.asynccontextmanager
async def node_with(folder: Path, **options: object) -> AsyncIterator[RNode]:
    """An R-node in this process; its address is `url`."""
    node = RNode(threads=1, name="test", spin_us=20, **options)
    try:
        [node.url] = await node.serve([f"shm://{folder}/r.sock"], None)
        yield node
    finally:
        await node.close()


@pytest.mark.quick
async def test_a_lease_grows_between_steps_and_answers_stay_right(shared_node):
    """Over each transport; every O row is compared with float64."""
    wanted = hello(kv_bytes=2 * PAGE)
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    try:
        assert (link.lease.n_pages, link.lease.max_pages) == (2, (KV_BYTES - REGION) // PAGE)
        before = await link.stats()
        assert before["pages_total"] == 2 and before["region_bytes"] == REGION
        assert before["pages_max"] == (KV_BYTES - REGION) // PAGE == 2 + before["kv_free"] // PAGE
        for seq_index, n_pages in enumerate((3, 7, 20)):
            assert (await link.resize(n_pages))["pages_total"] == n_pages
            await in_thread(driver.fill, seq_index, PAGE_TOKENS + 3)
            await in_thread(driver.step, 0, [(seq_index, 2, True), (7, 3, True)])
        after = await link.resize(1)  # a smaller number changes nothing
        assert after["pages_total"] == 20 and after["kv_free"] == before["kv_free"] - 18 * PAGE
    finally:
        await link.close()


async def test_the_r_node_grants_what_it_has_and_a_lease_that_ends_makes_room(tmp_path):
    async with node_with(tmp_path, kv_bytes=10 * PAGE + 2 * REGION) as node:
        first = await connect(node.url, hello(kv_bytes=2 * PAGE), None)
        second = await connect(node.url, hello(kv_bytes=3 * PAGE), None)
        assert node.kv_free == 5 * PAGE
        assert (await first.stats())["pages_max"] == 7
        assert (await first.resize(100))["pages_total"] == 7
        assert (await second.resize(4))["pages_total"] == 3  # back-pressure, not an error
        assert (await second.stats())["pages_max"] == 3
        with pytest.raises(LinkRefused, match=r"no memory for a KV-cache: 65536 bytes wanted .* 0 free of the"):
            await connect(node.url, hello(kv_bytes=PAGE), None)
        await first.close()
        stats = await second.resize(4)
        assert (stats["pages_total"], stats["pages_max"]) == (4, 10 + REGION // PAGE)
        await second.close()
        assert node.kv_free == 10 * PAGE + 2 * REGION


async def test_max_lease_bounds_each_link(tmp_path):
    async with node_with(tmp_path, kv_bytes=1 << 26, max_lease=6 * PAGE + 1) as node:
        everything = await connect(node.url, hello(kv_bytes=None), None)
        small = await connect(node.url, hello(kv_bytes=PAGE), None)
        assert [link.lease.n_pages for link in (everything, small)] == [6, 1]
        assert [link.lease.max_pages for link in (everything, small)] == [6, 6]
        for link in (everything, small):
            assert (await link.resize(1000))["pages_total"] == 6
            await link.close()
        greedy = await connect(node.url, hello(kv_bytes=1 << 25), None)
        assert greedy.lease.n_pages == 6
        await greedy.close()


async def test_leases_with_very_many_layers_do_not_grow(tmp_path, monkeypatch):
    """Their memory mappings would be more than a process may have."""
    monkeypatch.setattr(rnode, "_MAX_GROWING_LAYERS", 2 * SMALL.n_layers + 1)
    async with node_with(tmp_path, kv_bytes=1 << 24) as node:
        links = [await connect(node.url, hello(kv_bytes=PAGE), None) for _ in range(3)]
        assert [link.lease.max_pages > 1 for link in links] == [True, True, False]
        assert (await links[2].resize(5))["pages_total"] == 1
        await links[0].close()
        links[0] = await connect(node.url, hello(kv_bytes=PAGE), None)
        assert (await links[0].resize(5))["pages_total"] == 5
        for link in links:
            await link.close()


async def test_activation_regions_count_against_the_memory(tmp_path):
    """A region of 8 MiB and more leaves no room for a page, and two small regions leave less than one."""
    large = hello(dataclasses.replace(SMALL, max_rows=8192), kv_bytes=PAGE)
    assert region_layout(large.geometry).region_bytes > 8 << 20
    async with node_with(tmp_path, kv_bytes=8 << 20) as node:
        with pytest.raises(LinkRefused, match="beside an activation region of"):
            await connect(node.url, large, None)
        assert node.kv_free == 8 << 20
        links = []
        for n in range(1, 4):
            links.append(await connect(node.url, hello(kv_bytes=PAGE), None))
            assert node.kv_free == (8 << 20) - n * (PAGE + REGION)
        for link in links:
            await link.close()
        assert node.kv_free == 8 << 20


async def test_an_r_node_that_grants_more_than_a_resize_asked_for_is_not_believed():
    fake = FakeRNode()
    fake.stats = {"pages_total": 2**31}
    async with fake as url:
        link = await connect(url, hello(), None)
        with pytest.raises(LinkDown, match="asked for a lease of 5 pages, the R-node speaks of 2147483648"):
            await link.resize(5)
        await link.closed()


async def test_hostile_resizes(r_node, bystander):
    for bad in (0, -1, 2**32, 1.5, "7", None):
        control, token = await open_link(r_node.tcp, kv_bytes=PAGE)
        control.send_message({"type": "RESIZE", "id": 5, "n_pages": bad})
        answer = await control.read_message()
        assert answer["type"] == "ERROR" and answer["message"].endswith("- at `$.n_pages`"), answer
        await control.read_to_end()  # the R-node closes the connection once the lease is free
        await control.close()
    control, token = await open_link(r_node.tcp, kv_bytes=PAGE)
    data = await attach(r_node.tcp, token)
    granted = r_node.kv_free // PAGE + 1
    for n_pages in (2**32 - 1, 1):
        control.send_message({"type": "RESIZE", "id": 5, "n_pages": n_pages})
        answer = await control.read_message()
        assert (answer["type"], answer["id"], answer["stats"]["pages_total"]) == ("OK", 5, granted)
    assert r_node.kv_free < PAGE
    await data.close()
    await control.close()


@pytest.mark.timeout(300)  # three seconds of Python, and the default limit ends it on a machine that is very busy
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_100000_sequences_of_a_page_each_on_one_link(tmp_path, transport):
    """The S-node's account, the control messages and the R-node agree on as many, used up, freed and used again."""
    n, rows = 100_000, 50_000
    geometry = Geometry(n_slots=1, max_rows=rows, n_layers=1, n_q_heads=1, n_kv_heads=1, head_size=8, act_dtype="fp32")
    async with node_with(tmp_path, kv_bytes=1 << 29) as node:
        if transport == "tcp":
            [node.url] = await node.serve(["tcp://127.0.0.1:0"], None)
        link = await connect(node.url, hello(geometry, kv_dtype="int8", kv_bytes=1 << 16, max_seqs=n), None)
        assert link.lease.max_seqs == n
        ledger = RNodeLedger(0, link, grows=True)
        answer = await link.resize(n)
        ledger.resized(answer["pages_total"], answer["pages_max"])
        assert ledger.free_pages == n
        for _ in range(2):
            sequences = [CachedSequence(*ledger.admit(PAGE_TOKENS, None, PAGE_TOKENS)) for _ in range(n)]
            handles = [sequence.handle for sequence in sequences]
            assert not ledger.has_free_index and not ledger.free_pages
            for first in range(0, n, rows):
                table = np.zeros(rows, ROW_DTYPE)
                table["seq_index"], table["tag"] = np.array(handles[first : first + rows]).T
                table["n_rows"] = 1
                link.arm(0, table)
                await in_thread(link.wait, 0, HANG_S)
                for layer in range(geometry.n_layers):
                    link.ring(0, layer)
                    await in_thread(link.wait, 0, HANG_S)
            stats = await link.stats()
            assert (stats["seqs"], stats["pages_used"], stats["pages_total"]) == (n, n, n)
            for sequence in sequences:
                ledger.end_running(PAGE_TOKENS)
                ledger.release(sequence)
            released = ledger.take_released()
            await link.free([sequence.handle for sequence in released])
            ledger.acknowledge_free(released)
            stats = await link.stats()
            assert (stats["seqs"], stats["pages_used"], ledger.free_pages) == (0, 0, n)
        await link.close()
