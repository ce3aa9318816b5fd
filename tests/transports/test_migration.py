"""Pages of a sequence that an R-node sends to another one. Every O row behind them is compared with float64."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import pytest
from attention.rengine_peer import SELECT_OWN, SELECT_SHARED
from nodes.rnode_process import KV_BYTES, LISTEN_URLS, RNodeProcess
from quick import quick
from wire.link_driver import HANG_S, SMALL, Driver, hello, in_thread, until
from wire.moving import SECRET, r_nodes, token, two_links
from wire.wire_peers import Caller

from fastdecode.daemon.migrations import IncomingSequence
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, PROTOCOL_VERSION
from fastdecode.region.geometry import Geometry
from fastdecode.transports import migration
from fastdecode.transports.base import CallRefused, LayerOptions, LinkDown
from fastdecode.transports.registry import connect

SLOPES = (np.float32(2) ** -np.arange(1, 7, dtype=np.float32)).astype("<f4").tobytes()
#: Layers with heads of their own share planes.
DIFFERENT = Geometry(2, 64, 3, n_q_heads=6, n_kv_heads=2, head_size=64, v_size=128, act_dtype="fp32")
LATENT = Geometry(2, 64, 2, n_q_heads=20, n_kv_heads=1, head_size=40, v_size=32, act_dtype="fp32", v_in_k=True)
SPARSE = dataclasses.replace(LATENT, index_heads=4, index_size=16, index_topk=60)


async def move(source: Driver, target: Driver, seq: int, to: int, *, rounds=(), url: str | None = None) -> None:
    """Move a sequence, its pages up to each of `rounds` first."""
    shadow = source.shadows[seq]
    length, handle, admitted = len(shadow.k[0]), (seq, shadow.tag), token()
    tag = target.next_tag
    target.next_tag += 1
    await target.link.admit_migration((to, tag), length + 2 * PAGE_TOKENS, admitted)
    sent = 0
    for pages in rounds:
        await source.link.migrate(handle, range(sent, pages), 0, url or target.link.url, admitted)
        sent = pages
    n_pages = -(-length // PAGE_TOKENS)
    await source.link.migrate(handle, range(sent, n_pages), length, url or target.link.url, admitted)
    target.shadows[to] = type(shadow)(tag, *shadow.cut(length))


async def delivering(url: str, admitted: str, page_bytes: int, mac: str | None = None) -> tuple[Caller, str]:
    """A migration connection that presents a token, and the type of the R-node's answer."""
    caller = await Caller.dial(url)
    await caller.read_message()
    caller.send_message(
        {"type": "DELIVER", "version": PROTOCOL_VERSION, "nonce": "11" * 32, "mac": mac, "token": admitted}
        | {"page_bytes": page_bytes}
    )
    return caller, (await caller.read_message())["type"]


@pytest.mark.parametrize("kv_dtype", quick(KV_DTYPES, "int8"))
async def test_a_moved_sequence_goes_on_as_if_it_had_not_moved(tmp_path, kv_dtype):
    """With every format; pages first, then the rest, while both R-nodes work for other sequences."""
    wanted = hello(SMALL if kv_dtype == "int8-int4" else LATENT, kv_dtype, kv_bytes=4 << 20)
    async with (
        r_nodes(f"shm://{tmp_path}/a.sock", "tcp://127.0.0.1:0") as urls,
        two_links(*urls, wanted) as (source, target),
    ):
        for length in (1, PAGE_TOKENS - 1, PAGE_TOKENS, 3 * PAGE_TOKENS + 50):
            await in_thread(source.fill, 0, length)
            await in_thread(target.fill, 5, 20)
            await move(source, target, 0, 3, rounds=(length // PAGE_TOKENS,))
            await in_thread(target.step, 0, [(3, 4, True), (5, 1, True)])
            await in_thread(source.step, 0, [(0, 2, True)])  # the source keeps what it has
            assert (await target.link.stats())["pages_used"] == 1 + -(-(length + 4) // PAGE_TOKENS)
            for driver, seq in ((source, 0), (target, 3), (target, 5)):
                await driver.free_seq(seq)


@pytest.mark.parametrize("kv_dtype", quick(KV_DTYPES, "int8"))
async def test_a_sequence_goes_to_another_link_of_its_r_node_without_a_connection(kv_dtype):
    """At an address where nobody listens. Windows, layers of different sizes and index keys are copied, too."""
    layers = LayerOptions(heads=((6, 2, 64, 64), (6, 3, 24, 40), (4, 4, 48, 8)), kv_layers=(0, 1, 2), slopes=SLOPES)
    selecting = LayerOptions(selections=(SELECT_OWN, SELECT_SHARED))
    for wanted in (
        hello(kv_dtype=kv_dtype, kv_bytes=4 << 20),
        hello(DIFFERENT, kv_dtype, windows=(0, 40, 0), kv_bytes=16 << 20, layers=layers),
        *([hello(SPARSE, kv_dtype, kv_bytes=4 << 20, layers=selecting)] if kv_dtype != "int8-int4" else []),
    ):
        async with r_nodes("tcp://127.0.0.1:0") as [url], two_links(url, url, wanted) as (source, target):
            for length in (1, PAGE_TOKENS, 2 * PAGE_TOKENS + 50):
                await in_thread(source.fill, 0, length)
                await in_thread(target.fill, 5, 20)
                await move(source, target, 0, 3, rounds=(length // PAGE_TOKENS,), url="tcp://127.0.0.1:1")
                await in_thread(target.step, 0, [(3, 4, True), (5, 1, True)])
                await in_thread(source.step, 0, [(0, 2, True)])
                for driver, seq in ((source, 0), (target, 3), (target, 5)):
                    await driver.free_seq(seq)


async def test_what_is_refused_between_two_links_of_an_r_node():
    async with r_nodes("tcp://127.0.0.1:0") as [url], two_links(url, url) as (source, target):
        await in_thread(source.fill, 0, 300)
        await in_thread(source.fill, 1, 300)
        (mine, other), admitted = ((seq, source.shadows[seq].tag) for seq in (0, 1)), token()
        await target.link.admit_migration((3, 7), 500, admitted)
        with pytest.raises(CallRefused, match="room for 4 pages"):
            await source.link.migrate(mine, range(0, 5), 0, url, admitted)
        with pytest.raises(CallRefused, match="has 3 blocks"):
            await source.link.migrate(mine, range(2, 4), 0, url, admitted)
        await source.link.migrate(mine, range(0, 2), 0, url, admitted)
        with pytest.raises(CallRefused, match="no sequence waits for this token"):
            await source.link.migrate(other, range(0, 2), 0, url, admitted)
        await target.link.free([(3, 7)])
        with pytest.raises(CallRefused, match="no R-node can be reached"):
            await source.link.migrate(mine, range(2, 3), 300, "tcp://127.0.0.1:1", admitted)
        await in_thread(source.step, 0, [(0, 2, True), (1, 2, True)])
        small = hello(Geometry(1, 64, 1, 4, 2, 64, act_dtype="fp32"), kv_bytes=4 << 20)
        async with two_links(url, url, small) as (_, third):
            await third.link.admit_migration((3, 7), 300, admitted)
            with pytest.raises(CallRefused, match="bytes there and"):
                await source.link.migrate(mine, range(0, 2), 0, url, admitted)


async def test_pages_that_are_pushed_twice_at_once_are_copied(caplog):
    async with r_nodes("tcp://127.0.0.1:0") as [url], two_links(url, url) as (source, target):
        await in_thread(source.fill, 0, 300)
        shadow, admitted = source.shadows[0], token()
        await target.link.admit_migration((3, 7), 300, admitted)
        pushes = [source.link.migrate((0, shadow.tag), range(0, 3), 300, url, admitted) for _ in range(2)]
        assert await asyncio.gather(*pushes) == [None, None]
        target.shadows[3] = type(shadow)(7, *shadow.cut(300))
        await in_thread(target.step, 0, [(3, 2, True)])
    assert not [record for record in caplog.records if record.exc_info]


async def test_layers_that_share_planes(tmp_path):
    layers = LayerOptions(heads=((6, 2, 64, 64), (6, 3, 24, 40), (4, 4, 48, 8)), kv_layers=(0, 1, 2), slopes=SLOPES)
    wanted = hello(DIFFERENT, "fp16", windows=(0, 40, 0), kv_bytes=16 << 20, layers=layers)
    async with (
        r_nodes("tcp://127.0.0.1:0", f"shm://{tmp_path}/b.sock") as urls,
        two_links(*urls, wanted) as (source, target),
    ):
        await in_thread(source.fill, 0, 2 * PAGE_TOKENS + 9)
        await move(source, target, 0, 1, rounds=(1, 2))
        await in_thread(target.step, 0, [(1, 3, True)])


@pytest.mark.parametrize("transport", LISTEN_URLS)
async def test_between_processes_over_each_transport(tmp_path, transport):
    if transport == "rdma" and "FASTDECODE_RDMA_HOST" not in os.environ:
        pytest.skip("needs an RDMA device")
    nodes = []
    try:
        for name in ("a", "b"):
            (folder := tmp_path / name).mkdir()
            nodes.append(RNodeProcess.over(transport, folder))
        async with two_links(*(node.url for node in nodes)) as (source, target):
            await in_thread(source.fill, 0, 300)
            await move(source, target, 0, 0, rounds=(1,))
            await in_thread(target.step, 0, [(0, 4, True)])
    finally:
        for node in nodes:
            node.end()


async def test_with_a_secret_both_ends_prove_that_they_know_it():
    async with (
        r_nodes("tcp://127.0.0.1:0", secret=SECRET) as [a],
        r_nodes("tcp://127.0.0.1:0", secret=SECRET) as [b],
        two_links(a, b, secret=SECRET) as (source, target),
    ):
        await in_thread(source.fill, 0, 200)
        await move(source, target, 0, 0, rounds=(1,))
        await in_thread(target.step, 0, [(0, 4, True)])
        # Somebody who has overheard a token can do nothing with it.
        admitted = token()
        await target.link.admit_migration((2, 9), 100, admitted)
        for mac in (None, "00" * 32):
            caller, answer = await delivering(b, admitted, target.link.lease.page_bytes, mac)
            assert answer == "REFUSED"
            await caller.close()


async def test_wrong_moves_are_refused_and_cost_the_links_nothing():
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b) as (source, target):
        await in_thread(source.fill, 0, 300)
        await in_thread(target.fill, 0, 30)
        handle, admitted = (0, source.shadows[0].tag), token()
        for seq, length, why in (((0, 5), 10, "not empty"), ((99, 5), 10, "outside"), ((1, 5), 1 << 30, "pages")):
            with pytest.raises(CallRefused, match=why):
                await target.link.admit_migration(seq, length, token())
        await target.link.admit_migration((1, 5), 100, admitted)
        with pytest.raises(CallRefused, match="token is in use"):
            await target.link.admit_migration((2, 5), 10, admitted)
        for pages, length, why in (
            (range(2), 0, "room for 1"),
            (range(1), 200, "room for 1"),
            (range(2, 9), 0, "has 3"),
        ):
            with pytest.raises(CallRefused, match=why):
                await source.link.migrate(handle, pages, length, b, admitted)
            with pytest.raises(CallRefused, match="no sequence waits for this token"):  # it was valid once
                await source.link.migrate(handle, range(1), 0, b, admitted)
            await target.link.free([(1, 5)])
            admitted = token()
            await target.link.admit_migration((1, 5), 100, admitted)
        for url, why in (
            ("tcp://127.0.0.1:1", "no R-node can be reached"),
            ("shm:///nowhere/r.sock", "no R-node can be reached"),
            ("http://x", "known transport"),
        ):
            with pytest.raises(CallRefused, match=why):
                await source.link.migrate(handle, range(1), 0, url, admitted)
        with pytest.raises(CallRefused, match="has 3 blocks"):
            await target.link.admit_migration((3, 1), 900, wide := token())
            await source.link.migrate(handle, range(2, 7), 0, b, wide)
        with pytest.raises(CallRefused, match="no sequence waits"):
            await source.link.migrate(handle, range(1), 0, b, token())
        await in_thread(source.step, 0, [(0, 3, True)])
        await in_thread(target.step, 0, [(0, 3, True)])


async def test_pages_of_another_size_are_refused():
    other = Geometry(SMALL.n_slots, SMALL.max_rows, 3, 4, 2, 16, "fp32")
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b) as (source, _):
        link = await connect(b, hello(other), None)
        await in_thread(source.fill, 0, 30)
        await link.admit_migration((0, 1), 30, admitted := token())
        with pytest.raises(CallRefused, match="bytes there and"):
            await source.link.migrate((0, source.shadows[0].tag), range(1), 30, b, admitted)
        await link.close()


@contextlib.contextmanager
def counted_connections(monkeypatch) -> Iterator[list[str]]:
    """The URLs to which migration connections are opened."""
    opened: list[str] = []
    dial = migration.dial

    async def counted(url):
        opened.append(url)
        return await dial(url)

    with monkeypatch.context() as patch:
        patch.setattr(migration, "dial", counted)
        yield opened


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_sequences_take_one_connection_one_after_the_other(monkeypatch, secret):
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2, secret=secret) as urls, two_links(*urls, secret=secret) as links:
        source, target = links
        with counted_connections(monkeypatch) as opened:
            for seq in range(3):
                await in_thread(source.fill, seq, 140 + seq)
                await move(source, target, seq, seq + 1, rounds=(1,))
            await in_thread(target.step, 0, [(1, 2, True), (2, 1, True), (3, 3, True)])
            assert opened == [urls[1]]
            with pytest.raises(CallRefused, match="no sequence waits"):
                await source.link.migrate((0, source.shadows[0].tag), range(1), 0, urls[1], token())
            assert len(opened) == 2  # the R-node's refusal of NEXT ends a connection; a new one says why
            await in_thread(source.fill, 4, 20)
            await move(source, target, 4, 5)
            assert len(opened) == 3


def open_sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


async def test_a_connection_that_waits_too_long_is_closed_at_both_ends(monkeypatch):
    monkeypatch.setattr(migration, "IDLE_S", 2.0)
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as urls, two_links(*urls) as (source, target):
        with counted_connections(monkeypatch) as opened:
            for seq in range(2):
                before = open_sockets()
                await in_thread(source.fill, seq, 20)
                await move(source, target, seq, seq + 1)
                assert open_sockets() == before + 2

                async def closed(before: int = before) -> bool:
                    return open_sockets() == before

                await until(closed, HANG_S)
            assert len(opened) == 2


async def test_a_restarted_r_node_gets_a_new_connection(tmp_path):
    """The kept one leads to nobody, which the sequence does not feel."""
    wanted = hello(kv_bytes=4 << 20)
    async with r_nodes("tcp://127.0.0.1:0") as [url]:
        source = Driver(await connect(url, wanted, None), wanted, 0)
        for seq in range(2):
            receiver = RNodeProcess(f"shm://{tmp_path}/r.sock", KV_BYTES)
            try:
                target = Driver(await connect(receiver.url, wanted, None), wanted, 1)
                await in_thread(source.fill, seq, 200)
                await move(source, target, seq, 3)
                await in_thread(target.step, 0, [(3, 2, True)])
                await target.link.close()
            finally:
                receiver.end()
        await source.link.close()


BIG = hello(Geometry(1, 32, 2, 8, 8, 128, "fp32"), kv_bytes=96 << 20)


async def stuck_push(source: Driver, target: Driver, receiver: RNodeProcess) -> asyncio.Task[None]:
    """A PUSH of more bytes than sockets hold, to an R-node that has been stopped."""
    handle, admitted = (0, source.shadows[0].tag), token()
    await target.link.admit_migration((1, 5), 10 * PAGE_TOKENS, admitted)
    await source.link.migrate(handle, range(1), 0, target.link.url, admitted)
    receiver.stop()
    return asyncio.create_task(source.link.migrate(handle, range(1, 10), 0, target.link.url, admitted))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_an_r_node_that_dies_while_it_receives_costs_the_source_nothing(tmp_path, transport):
    """The source answers other requests during a PUSH, and its sequence goes on."""
    receiver = RNodeProcess(LISTEN_URLS[transport].format(folder=tmp_path), 128 << 20)
    async with r_nodes("tcp://127.0.0.1:0") as [a], two_links(a, receiver.url, BIG) as (source, target):
        await in_thread(source.fill, 0, 10 * PAGE_TOKENS)
        push = await stuck_push(source, target, receiver)
        for _ in range(5):
            await source.link.stats()
        await in_thread(source.step, 0, [(0, 1, True)])
        assert not push.done()
        receiver.end(9)
        with pytest.raises(CallRefused):
            await push
        assert isinstance(await target.link.closed(), LinkDown)
        await in_thread(source.step, 0, [(0, 1, True)])


async def test_a_sequence_that_is_freed_takes_no_more_pages():
    """The pages belong to another sequence at once, into which nothing may be written."""
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b, BIG) as (source, target):
        await in_thread(source.fill, 0, 10 * PAGE_TOKENS)
        for _ in range(5):
            admitted = token()
            await target.link.admit_migration((1, 5), 10 * PAGE_TOKENS, admitted)
            push = asyncio.create_task(source.link.migrate((0, source.shadows[0].tag), range(10), 0, b, admitted))
            await asyncio.sleep(0.002)
            await target.link.free([(1, 5)])
            await in_thread(target.fill, 2, 10 * PAGE_TOKENS)
            with contextlib.suppress(CallRefused):
                await push
            await in_thread(target.step, 0, [(2, 1, True)])
            await target.free_seq(2)
            assert (await target.link.stats())["pages_used"] == 0


async def test_pages_wait_until_the_os_has_found_memory_for_them(monkeypatch):
    """Over a connection, and from another link of the R-node: a target that is freed meanwhile refuses them."""
    free = asyncio.Event()

    async def late(incoming):
        await free.wait()

    monkeypatch.setattr(IncomingSequence, "_fault_in", late)
    async with r_nodes("tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as urls:
        for second in urls:
            async with two_links(urls[0], second) as (source, target):
                await in_thread(source.fill, 0, 2 * PAGE_TOKENS)
                moving = asyncio.create_task(move(source, target, 0, 3))
                await asyncio.sleep(0.2)
                assert not moving.done()
                await target.link.free([(3, target.next_tag - 1)])
                with pytest.raises((CallRefused, LinkDown)):
                    await asyncio.wait_for(moving, HANG_S)


async def test_a_link_that_ends_ends_its_transfers(tmp_path, monkeypatch):
    receiver = RNodeProcess(f"shm://{tmp_path}/r.sock", 128 << 20)
    try:
        async with r_nodes("tcp://127.0.0.1:0") as [a], two_links(a, receiver.url, BIG) as (source, target):
            await in_thread(source.fill, 0, 10 * PAGE_TOKENS)
            push = await stuck_push(source, target, receiver)
            await asyncio.sleep(0.05)
            await source.link.close()
            with pytest.raises(LinkDown):
                await push
            receiver.go_on()
    finally:
        receiver.end()


async def test_a_transfer_that_stalls_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(migration, "STALLED_S", 3.0)
    receiver = RNodeProcess(f"shm://{tmp_path}/r.sock", 128 << 20)
    try:
        async with r_nodes("tcp://127.0.0.1:0") as [a], two_links(a, receiver.url, BIG) as (source, target):
            await in_thread(source.fill, 0, 10 * PAGE_TOKENS)
            push = await stuck_push(source, target, receiver)
            with pytest.raises(CallRefused, match="has moved no byte"):
                await push
            receiver.go_on()
    finally:
        receiver.end()


async def test_a_migration_connection_that_says_something_else_is_closed():
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b) as (_, target):
        page_bytes = target.link.lease.page_bytes
        for hostile in ({"type": "PING", "id": 1}, {"type": "PAGES", "first": 0, "n_pages": 2**32 - 1, "length": 1}):
            await target.link.admit_migration((1, 5), 300, admitted := token())
            caller, reply = await delivering(b, admitted, page_bytes)
            assert reply == "ACCEPTED"
            caller.send_message(hostile)
            await asyncio.wait_for(caller.read_to_end(), HANG_S)
            await caller.close()
            await target.link.free([(1, 5)])

        async def empty() -> bool:
            return (await target.link.stats())["pages_used"] == 0

        await until(empty, HANG_S)


async def test_what_follows_a_whole_sequence_is_another_one_or_the_end():
    async with r_nodes(*["tcp://127.0.0.1:0"] * 2) as (a, b), two_links(a, b) as (_, target):
        page_bytes = target.link.lease.page_bytes
        for hostile, answer in (
            ({"type": "PING", "id": 1}, None),
            ({"type": "PAGES", "first": 0, "n_pages": 1, "length": 1}, None),
            ({"type": "NEXT", "token": token(), "page_bytes": page_bytes}, "no sequence waits for this token"),
        ):
            await target.link.admit_migration((1, 5), 100, admitted := token())
            caller, reply = await delivering(b, admitted, page_bytes)
            assert reply == "ACCEPTED"
            caller.send_message({"type": "PAGES", "first": 0, "n_pages": 1, "length": 100})
            caller.send(bytes(page_bytes))
            assert (await caller.read_message())["type"] == "OK"
            caller.send_message(hostile)
            if answer is not None:
                assert answer in (await caller.read_message())["message"]
            assert await asyncio.wait_for(caller.read_to_end(), HANG_S) == b""
            await caller.close()
            await target.link.free([(1, 5)])
