"""Sequences that one link adopts from another of the same R-node. Every O row behind them is compared with float64."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from quick import quick
from wire.link_driver import HANG_S, SMALL, Driver, hello, in_thread, until

from fastdecode.daemon.migrations import IncomingSequence
from fastdecode.daemon.rnode import RNode
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import CallRefused, LayerOptions
from fastdecode.transports.registry import connect
from fastdecode.transports.team import Team, part_of
from fastdecode.transports.token_team import TokenTeam, token_part_of

KV_BYTES = 64 << 20
LONG = 3 * PAGE_TOKENS + 50


@contextlib.asynccontextmanager
async def r_node(seconds: float = 60.0, kv_bytes: int = KV_BYTES) -> AsyncIterator[tuple[RNode, str]]:
    node = RNode(threads=2, kv_bytes=kv_bytes, spin_us=20, orphan_seconds=seconds)
    try:
        [url] = await node.serve(["tcp://127.0.0.1:0"], None)
        yield node, url
    finally:
        await node.close()


@contextlib.asynccontextmanager
async def linked(url: str, wanted=None, seed: int = 0) -> AsyncIterator[Driver]:
    wanted = wanted or hello(kv_bytes=4 << 20)
    driver = Driver(await connect(url, wanted, None), wanted, seed)
    try:
        yield driver
    finally:
        await driver.link.close()


async def keep(driver: Driver, seq: int) -> str:
    key = secrets.token_hex(32)
    await driver.link.keep([(seq, driver.shadows[seq].tag, key)])
    return key


async def adopt(target: Driver, source: Driver, seq: int, to: int, length: int, key: str) -> None:
    """Let `target` adopt the first tokens of a sequence of `source`."""
    shadow, tag = source.shadows[seq], target.next_tag
    target.next_tag += 1
    assert await target.link.find(key, length)
    await target.link.adopt((to, tag), length, key)
    copies = [[rows.copy() for rows in layers] for layers in shadow.cut(length)]
    target.shadows[to] = type(shadow)(tag, *copies)


@pytest.mark.parametrize("kv_dtype", quick(KV_DTYPES, "int8"))
@pytest.mark.parametrize("alive", [True, False])
async def test_an_adopted_sequence_goes_on_as_if_its_link_had_not_ended(kv_dtype, alive):
    """All of its tokens, or fewer. While the first link serves, that one's sequence goes on, too."""
    wanted = hello(SMALL, kv_dtype, kv_bytes=4 << 20)
    async with r_node() as (_, url), linked(url, wanted) as source, linked(url, wanted, 1) as target:
        lengths = (1, PAGE_TOKENS, LONG)
        for seq, length in enumerate(lengths):
            await in_thread(source.fill, seq, length + seq)
        await in_thread(source.fill, 5, 40)  # has no key
        keys = [await keep(source, seq) for seq in range(len(lengths))]
        await in_thread(target.fill, 7, 20)
        if not alive:
            await source.link.close()
        for seq, length in enumerate(lengths):
            await adopt(target, source, seq, seq, length, keys[seq])
            assert not await target.link.find(keys[seq], 1), "a key is void after one adoption"
            await in_thread(target.step, 0, [(seq, 4, True), (7, 1, True)])
            if alive:
                await in_thread(source.step, 0, [(seq, 2, True), (5, 1, True)])


async def test_layers_of_different_sizes_and_windows_are_adopted():
    geometry = Geometry(2, 64, 3, n_q_heads=6, n_kv_heads=2, head_size=64, v_size=128, act_dtype="fp32")
    layers = LayerOptions(heads=((6, 2, 64, 64), (6, 3, 24, 40), (4, 4, 48, 8)), kv_layers=(0, 1, 2))
    wanted = hello(geometry, "int8", windows=(0, 40, 0), kv_bytes=16 << 20, layers=layers)
    async with r_node() as (_, url), linked(url, wanted) as source, linked(url, wanted) as target:
        await in_thread(source.fill, 0, LONG)
        key = await keep(source, 0)
        await source.link.close()
        await adopt(target, source, 0, 1, LONG, key)
        await in_thread(target.step, 0, [(1, 3, True)])


@pytest.mark.parametrize("team", [Team, TokenTeam])
async def test_teams_adopt_member_by_member(team):
    """The members in another order find nothing, because member i has a part of its own."""
    part = part_of if team is Team else token_part_of

    async def connected(urls):
        links = [await connect(url, part(wanted, i, 2), None) for i, url in enumerate(urls)]
        return Driver(team(links, wanted), wanted)

    wanted = hello(kv_bytes=4 << 20)
    async with r_node() as (_, a), r_node() as (_, b):
        source, target, other = [await connected(urls) for urls in ((a, b), (a, b), (b, a))]
        keys = {}
        for seq, length in enumerate((20, LONG)):  # of the first, member 1 of a team that shares tokens has none
            await in_thread(source.fill, seq, length)
            keys[seq] = await keep(source, seq)
        await source.link.close()
        for seq, length in enumerate((20, LONG)):
            assert not await other.link.find(keys[seq], length)
            with pytest.raises(CallRefused):
                await other.link.adopt((seq, 1), length, keys[seq])
            await adopt(target, source, seq, seq, length, keys[seq])
            await in_thread(target.step, 0, [(seq, 3, True)])
        for driver in (target, other):
            await driver.link.close()


async def test_what_is_refused():
    async with r_node() as (_, url), linked(url) as source, linked(url) as target:
        await in_thread(source.fill, 0, 300)
        key, tag = await keep(source, 0), source.shadows[0].tag
        for wrong, length in ((key, 301), (secrets.token_hex(32), 1), (key[:-1] + ("0" if key[-1] != "0" else "1"), 1)):
            assert not await target.link.find(wrong, length)
            with pytest.raises(CallRefused, match="no sequence of this length"):
                await target.link.adopt((0, 7), length, wrong)
        await in_thread(target.fill, 3, 10)
        for wrong, why in (((1, 1, key), "key is in use"), ((8, 1, secrets.token_hex(32)), "outside the lease")):
            good = secrets.token_hex(32)
            with pytest.raises(CallRefused, match=why):
                await target.link.keep([wrong, (3, target.shadows[3].tag, good)])
            assert await source.link.find(good, 10), "the others of a KEEP get their keys"
        for seq, length, why in (((3, target.shadows[3].tag), 300, "not empty"), ((8, 1), 300, "outside the lease")):
            with pytest.raises(CallRefused, match=why):
                await target.link.adopt(seq, length, key)
        others = [
            hello(replace(SMALL, n_layers=3), kv_bytes=4 << 20),
            hello(replace(SMALL, n_q_heads=8), kv_bytes=4 << 20),  # whose pages have the same size
            hello(kv_dtype="fp16", kv_bytes=4 << 20),
            hello(windows=(0, 9), kv_bytes=4 << 20),
            replace(hello(kv_bytes=4 << 20), softmax_scale=0.5),
        ]
        for wanted in others:
            async with linked(url, wanted) as other:
                assert not await other.link.find(key, 300)
                with pytest.raises(CallRefused, match="of another geometry"):
                    await other.link.adopt((0, 1), 300, key)
        await source.link.keep([(1, 1, key)])  # the stream's sequence is another one now, which is empty yet
        assert not await target.link.find(key, 1)
        await source.link.keep([(0, tag, key)])
        assert await target.link.find(key, 300)
        await source.link.keep([(0, tag, None)])
        assert not await target.link.find(key, 300)
        key = await keep(source, 0)
        await source.free_seq(0)
        assert not await target.link.find(key, 1)


async def test_a_link_with_other_slots_may_adopt():
    async with r_node() as (_, url), linked(url) as source:
        await in_thread(source.fill, 0, 300)
        key = await keep(source, 0)
        async with linked(url, hello(replace(SMALL, n_slots=1, max_rows=64), kv_bytes=8 << 20, max_seqs=3)) as target:
            await adopt(target, source, 0, 1, 299, key)
            await in_thread(target.step, 0, [(1, 3, True)])


async def test_without_room_nothing_is_adopted_and_the_key_stays():
    async with r_node() as (_, url), linked(url) as source:
        await in_thread(source.fill, 0, LONG)
        key = await keep(source, 0)
        block = 2 * PAGE_TOKENS * SMALL.n_layers * SMALL.n_kv_heads * SMALL.head_size * 4
        async with linked(url, hello(kv_bytes=3 * block)) as small:
            with pytest.raises(CallRefused, match="pages"):
                await small.link.adopt((0, 1), LONG, key)
        async with linked(url) as target:
            await adopt(target, source, 0, 0, LONG, key)
            await in_thread(target.step, 0, [(0, 3, True)])


async def test_only_one_link_adopts_a_sequence(monkeypatch):
    """And one that frees the sequence meanwhile does not take it: another link may."""
    free = asyncio.Event()

    async def late(incoming):
        await free.wait()

    async with r_node() as (_, url), linked(url) as source, linked(url) as first, linked(url) as second:
        await in_thread(source.fill, 0, LONG)
        key = await keep(source, 0)
        with monkeypatch.context() as patch:
            patch.setattr(IncomingSequence, "_fault_in", late)
            waiting = asyncio.create_task(first.link.adopt((0, 1), LONG, key))
            await asyncio.sleep(0.2)
            with pytest.raises(CallRefused):
                await second.link.adopt((0, 1), LONG, key)
            await first.link.free([(0, 1)])
            with pytest.raises(CallRefused, match="does not wait"):
                await asyncio.wait_for(waiting, HANG_S)
        await adopt(second, source, 0, 0, LONG, key)
        await in_thread(second.step, 0, [(0, 3, True)])


async def test_pages_that_nobody_adopts_are_freed():
    async with r_node(0.5) as (node, url):
        free = node.kv_free
        async with linked(url) as source:
            for seq in range(2):
                await in_thread(source.fill, seq, LONG)
                await keep(source, seq)

        async def all_free() -> bool:
            return node.kv_free == free

        assert not await all_free()
        await until(all_free, HANG_S)


async def test_a_link_without_keys_takes_its_pages_along():
    for seconds in (0.0, 60.0):
        async with r_node(seconds) as (node, url):
            free = node.kv_free
            async with linked(url) as source:
                await in_thread(source.fill, 0, LONG)
                if not seconds:
                    await keep(source, 0)
            assert node.kv_free == free


async def test_an_orphan_holds_no_more_memory_than_its_sequences_need(monkeypatch):
    """Its sequences have keys, and nobody has adopted them yet. Without huge pages, memory is counted in pages of the
    OS."""
    wanted = hello(Geometry(1, 32, 2, 8, 8, 128, "fp32"), kv_bytes=32 << 20)
    block = 2 * 2 * 8 * 128 * 4 * PAGE_TOKENS
    node = RNode(threads=1, kv_bytes=KV_BYTES, spin_us=20, orphan_seconds=60, huge_pages="off")
    try:
        [url] = await node.serve(["tcp://127.0.0.1:0"], None)
        free = node.kv_free
        source = Driver(await connect(url, wanted, None), wanted)
        for seq, n_blocks in enumerate((2, 3, 4)):
            await in_thread(source.fill, seq, n_blocks * PAGE_TOKENS)
        keys = [await keep(source, seq) for seq in range(2)]
        await source.link.close()
        assert node.kv_free == free - 5 * block
        target = Driver(await connect(url, wanted, None), wanted)
        before = node.kv_free
        await adopt(target, source, 0, 0, 2 * PAGE_TOKENS, keys[0])

        async def freed() -> bool:
            return node.kv_free == before + 2 * block

        await until(freed, HANG_S)
        await adopt(target, source, 1, 1, 3 * PAGE_TOKENS, keys[1])
        await in_thread(target.step, 0, [(0, 1, True), (1, 1, True)])
        await target.link.close()

        async def all_free() -> bool:
            return node.kv_free == free

        await until(all_free, HANG_S)
    finally:
        await node.close()


async def test_orphans_give_way_to_living_links():
    """To one that grows, and to a new one; leases that still have room stay."""
    wanted = hello(Geometry(1, 32, 2, 8, 8, 128, "fp32"), kv_bytes=8 << 20)
    async with r_node() as (node, url), linked(url, wanted) as living:
        async with linked(url, replace(wanted, kv_bytes=40 << 20)) as source:
            for seq in range(4):
                await in_thread(source.fill, seq, 3 * PAGE_TOKENS)
            keys = [await keep(source, seq) for seq in range(4)]
        assert [await living.link.find(key, 3 * PAGE_TOKENS) for key in keys] == [True] * 4
        free_pages = node.kv_free // living.link.lease.page_bytes
        stats = await living.link.resize(living.link.lease.n_pages + free_pages - 8)
        assert stats["pages_total"] > living.link.lease.n_pages and await living.link.find(keys[3], 1)
        while (more := await living.link.resize(stats["pages_total"] + 4))["pages_total"] > stats["pages_total"]:
            stats = more
        assert [await living.link.find(key, 1) for key in keys] == [False] * 4
    async with r_node() as (node, url):
        async with linked(url, replace(wanted, kv_bytes=40 << 20)) as source:
            await in_thread(source.fill, 0, 3 * PAGE_TOKENS)
            key = await keep(source, 0)
        async with linked(url, replace(wanted, kv_bytes=None)) as whole:
            assert whole.link.lease.n_pages * whole.link.lease.page_bytes > 0.9 * KV_BYTES
            assert not await whole.link.find(key, 1)


async def test_at_most_sixteen_orphans_stay():
    async with r_node() as (_, url), linked(url) as living:
        keys = []
        for _ in range(17):
            async with linked(url, hello(kv_bytes=1 << 20)) as source:
                await in_thread(source.fill, 0, 20)
                keys.append(await keep(source, 0))
        assert [await living.link.find(key, 20) for key in keys] == [False] + [True] * 16
