"""A team of R-nodes as one link: every O row equals float64 attention, and requests reach all members."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal

import numpy as np
import pytest
from nodes.rnode_process import LISTEN_URLS, Held, RNodeProcess
from wire.link_driver import SMALL, Driver, Payloads, hello, in_thread

from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, Status
from fastdecode.region.geometry import Geometry
from fastdecode.transports._native import StepGroup
from fastdecode.transports.base import CallRefused, LayerOptions, LinkDown, TransportError
from fastdecode.transports.partition import connect_team
from fastdecode.transports.registry import connect
from fastdecode.transports.team import Team, part_of

#: Heads that two and four R-nodes can share.
FOUR = Geometry(n_slots=2, max_rows=32, n_layers=2, n_q_heads=8, n_kv_heads=4, head_size=16, act_dtype="fp32")
#: V of these heads is a part of their K.
LATENT = dataclasses.replace(FOUR, head_size=24, v_size=16, v_in_k=True)


@pytest.mark.quick
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
async def test_attention_equals_float64(team_of, n, kv_dtype):
    wanted = hello(FOUR, kv_dtype, windows=(0, 70))
    team = await team_of(wanted, n)
    await in_thread(Driver(team, wanted).few_steps)
    stats = await team.stats()
    assert (stats["seqs"], stats["pages_total"]) == (3, team.lease.n_pages)
    assert {(await member.link.stats())["seqs"] for member in team.members} == {3}


async def test_each_layer_has_its_own_heads_sinks_and_softcap(team_of):
    """The second layer has fewer query heads, of another size, and its V is smaller than its K."""
    wanted = hello(
        FOUR,
        windows=(0, 70),
        layers=LayerOptions(
            softcaps=(0, 1.5),
            sinks=np.arange(16).astype("<f4").tobytes(),
            heads=((8, 4, 16, 16), (4, 2, 24, 8)),
        ),
    )
    await in_thread(Driver(await team_of(wanted, 2), wanted).few_steps)


async def test_slopes_and_shared_k_and_v(team_of):
    slopes = np.array([0.5, 0.25, 0.125, 0.0, 0.3, 0.2, 0.1, 0.05], "<f4").tobytes()
    wanted = hello(FOUR, layers=LayerOptions(segments=(90, 0), kv_layers=(0, 0), slopes=slopes))
    await in_thread(Driver(await team_of(wanted, 4), wanted).few_steps)


async def test_v_that_is_a_part_of_k(team_of):
    wanted = hello(LATENT, kv_dtype="int8")
    await in_thread(Driver(await team_of(wanted, 2), wanted).few_steps)


@pytest.mark.parametrize("act_dtype", ["fp16", "bf16"])
async def test_half_precision_rows(team_of, act_dtype):
    wanted = hello(dataclasses.replace(FOUR, act_dtype=act_dtype), kv_dtype="fp16")
    team = await team_of(wanted, 2)
    await in_thread(lambda: Driver(team, wanted).step(0, [(0, 30, True)]))


async def test_no_byte_of_many_calls_is_torn(team_of):
    payloads = Payloads(await team_of(Payloads.HELLO, 4))
    await asyncio.to_thread(payloads.run, 200)


async def test_free_trim_fork_and_resize_reach_every_member(team_of):
    wanted = hello(FOUR)
    team = await team_of(wanted, 2)
    driver = Driver(team, wanted)
    await in_thread(driver.fill, 0, PAGE_TOKENS + 36)
    await driver.trim_seq(0, PAGE_TOKENS + 26)
    await driver.fork_seq(0, 1, PAGE_TOKENS + 6)
    await in_thread(lambda: driver.step(0, [(0, 2, True), (1, 2, True)]))
    assert [(s["pages_used"], s["seqs"]) for s in await member_stats(team)] == [(3, 2), (3, 2)]
    driver.cut(1, PAGE_TOKENS + 1)  # the row table says so
    await in_thread(lambda: driver.step(0, [(1, 2, True)]))
    await driver.free_seq(0)
    await in_thread(lambda: driver.step(0, [(1, 2, True)]))
    await driver.free_seq(1)
    assert [(s["pages_used"], s["seqs"]) for s in await member_stats(team)] == [(0, 0), (0, 0)]
    more = team.lease.n_pages + 5
    assert (await team.resize(more))["pages_total"] == more
    assert [s["pages_total"] for s in await member_stats(team)] == [more, more]


async def member_stats(team: Team) -> list[dict[str, int]]:
    return [await member.link.stats() for member in team.members]


async def test_the_lease_is_what_every_member_has(nodes):
    """The members are asked for different leases here, as R-nodes of different sizes would grant them."""
    wanted = hello(FOUR)
    links = [
        await connect(node.url, dataclasses.replace(part_of(wanted, i, 2), kv_bytes=size, max_seqs=seqs), None)
        for i, (node, size, seqs) in enumerate(zip(nodes[:2], (1 << 20, 1 << 19), (8, 7), strict=True))
    ]
    team, leases = Team(links, wanted), [link.lease for link in links]
    assert leases[0].n_pages == 2 * leases[1].n_pages
    assert (team.lease.n_pages, team.lease.max_seqs) == (leases[1].n_pages, 7)
    assert team.lease.page_bytes == 2 * leases[0].page_bytes
    assert team.region_bytes == sum(link.layout.region_bytes for link in links)
    await team.close()


async def test_a_refused_fork_leaves_the_sequence_empty_at_every_member(team_of):
    wanted = hello(FOUR)
    team = await team_of(wanted, 2)
    driver = Driver(team, wanted)
    await in_thread(driver.fill, 0, 20)
    await team.members[1].link.free([(0, driver.shadows[0].tag)])  # so that only one member can fork it
    with pytest.raises(CallRefused):
        await team.fork((0, driver.shadows[0].tag), (1, 5), 10)
    await driver.free_seq(0)
    assert [s["seqs"] for s in await member_stats(team)] == [0, 0]


async def test_a_step_that_one_member_refuses_is_refused_and_the_team_goes_on(team_of):
    wanted = hello(FOUR)
    team = await team_of(wanted, 2)
    driver = Driver(team, wanted)
    await in_thread(driver.fill, 0, 20)
    await team.members[1].link.free([(0, driver.shadows[0].tag)])
    driver.table(0, [(0, driver.shadows[0].tag, 20, 1, ROW_ATTEND)])

    def refused_step():
        team.arm(0, driver.tables[0])
        team.wait(0, 20.0)

    with pytest.raises(CallRefused) as refused:
        await in_thread(refused_step)
    assert (refused.value.status, refused.value.link) == (Status.BAD_SEQUENCE, team)
    await driver.free_seq(0)
    await in_thread(lambda: driver.step(0, [(1, 3, True)]))


async def test_misuse_raises_value_error(team_of):
    team = await team_of(hello(FOUR), 2)
    table = np.array([(0, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE)
    with pytest.raises(ValueError, match="dtype"):
        team.arm(0, np.zeros(1, "<u4"))
    with pytest.raises(ValueError, match="no step"):
        team.ring(0, 0)
    with pytest.raises(ValueError, match="waited for"):
        team.wait(0, 1.0)
    team.arm(0, table)
    with pytest.raises(ValueError, match="has not been waited for"):
        team.arm(0, table)
    team.wait(0, 20.0)
    assert team.disarm(0) is None


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_the_end_of_a_member_ends_the_team_and_frees_the_other_leases(scheme, tmp_path):
    folders = [tmp_path / str(i) for i in range(2)]
    for folder in folders:
        folder.mkdir()
    processes = [RNodeProcess(LISTEN_URLS[scheme].format(folder=folder), 64 << 20) for folder in folders]
    wanted = hello(FOUR)
    try:
        team = await connect_team([process.url for process in processes], wanted, None)
        driver = Driver(team, wanted)
        await in_thread(Driver(team, wanted).few_steps)
        with_a_link = Held.by(processes[0].pid)
        processes[1].end(signal.SIGKILL)
        error = await asyncio.wait_for(team.closed(), 20)
        assert isinstance(error, LinkDown) and processes[1].url in str(error)
        assert Held.by(processes[0].pid).regions == with_a_link.regions - 1
        with pytest.raises(LinkDown):
            await team.stats()
        with pytest.raises((LinkDown, ValueError)):
            await in_thread(lambda: driver.step(0, [(3, 1, True)]))
        processes[1].start()
        again = await connect_team([process.url for process in processes], wanted, None)
        await in_thread(Driver(again, wanted).few_steps)
        await again.close()
    finally:
        for process in processes:
            process.end()


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(TransportError, match="3 R-nodes cannot share the 4 KV heads of layer 0 evenly"):
        part_of(hello(FOUR), 0, 3)
    mixed = hello(FOUR, layers=LayerOptions(heads=((8, 4, 16, 16), (8, 2, 16, 16))))
    with pytest.raises(TransportError, match="4 R-nodes cannot share the 2 KV heads of layer 1"):
        part_of(mixed, 0, 4)


# ---- columns of a StepGroup ----

WHOLE = {"q": (0, 256), "k": (0, 128), "v": (128, 256), "o": (0, 256)}  # bytes of SMALL's rows


def columns(layers: int = SMALL.n_layers, **ranges: tuple[int, int]) -> np.ndarray:
    return np.array([list((WHOLE | ranges).values())] * layers, np.uint32)


def rows_of(n: int = 1, q: int = 256, kv: int = 256, o: int = 256) -> list[np.ndarray]:
    return [np.zeros((n, size), np.uint8) for size in (q, kv, o)]


async def test_columns_outside_the_rows_are_refused(shared_node):
    """Whatever the numbers are, nothing is copied that is not in the buffers and the slot."""
    link = await connect(shared_node.url, hello(), None)
    table = np.array([(0, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE).view(np.uint8)

    def group(column, *buffers):
        return StepGroup(0, [(link.port, table, 0, 1, 1, 1, column)], *buffers)

    group(columns(), *rows_of())
    group(columns(k=(300, 428), v=(428, 556)), *rows_of(kv=600))
    for wrong in (
        columns(q=(0, 257)),
        columns(q=(9, 8)),
        columns(k=(0, 129)),  # too long beside V
        columns(v=(256, 384)),  # beyond the buffer's rows
        columns(o=(2**32 - 1, 0)),
        columns(o=(1, 257)),
        columns(layers=1),
        columns(layers=3),
        np.zeros(0, np.uint32),
    ):
        with pytest.raises(ValueError, match="columns"):
            group(wrong, *rows_of())
    with pytest.raises(ValueError, match="needs the step's buffers"):
        group(columns())
    with pytest.raises(ValueError, match="beyond the step's buffers"):
        group(columns(), *rows_of(0))
    with pytest.raises(ValueError, match="differ in size"):
        group(None, *rows_of(q=512))
    with pytest.raises(ValueError, match="two dimensions"):
        group(None, *(rows.ravel() for rows in rows_of()))
    await link.close()


async def test_random_columns_copy_what_numpy_slices(shared_node):
    """The last layer's V rows come back as O: each query head attends to one token. Each layer brings K and V rows of
    its own, in place of those in the step's buffer."""
    link = await connect(shared_node.url, hello(), None)
    rng, choose = np.random.default_rng(0), random.Random(0)
    for tag in range(1, 6):
        q, o, *kv = (rng.standard_normal((3, 200), np.float32).view(np.uint8) for _ in range(2 + SMALL.n_layers))
        at = {"q": 4 * choose.randrange(130), "k": 4 * choose.randrange(60), "v": 4 * choose.randrange(160)}
        ranges = {name: (start, start + (256 if name == "q" else 128)) for name, start in at.items()}
        start = 4 * choose.randrange(100)
        table = np.array([(i, tag, 0, 1, ROW_ATTEND, 0) for i in range(3)], ROW_DTYPE).view(np.uint8)
        before = o.copy()
        group = StepGroup(0, [(link.port, table, 0, 3, 3, 3, columns(**ranges, o=(start, start + 256)))], q, kv[0], o)

        def step(group=group, kv=kv):
            assert group.arm() is None and group.wait(20.0, rows=False) is None
            for layer in range(SMALL.n_layers):
                with pytest.raises(ValueError, match="differ in size"):
                    group.ring(layer, kv[layer][:2])
                assert group.ring(layer, kv[layer]) is None and group.wait(20.0) is None
            group.disarm()

        await in_thread(step)
        v = kv[-1][:, at["v"] : at["v"] + 128].copy().view(np.float32).reshape(3, 2, 16)
        expected = before.copy()
        expected[:, start : start + 256] = np.repeat(v, 2, axis=1).reshape(3, -1).view(np.uint8)
        untouched = np.ones(800, bool)
        untouched[start : start + 256] = False
        assert (o[:, untouched] == before[:, untouched]).all()
        got = o[:, start : start + 256].copy().view(np.float32)
        np.testing.assert_allclose(got, np.repeat(v, 2, axis=1).reshape(3, -1), rtol=1e-6)
        await link.free([(i, tag) for i in range(3)])
    await link.close()
