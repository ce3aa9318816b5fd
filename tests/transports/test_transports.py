"""The conformance suite of the transports: the behaviour of a link to an R-node in another process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from attention.rengine_peer import SELECT_OWN, SELECT_SHARED
from nodes.rnode_process import KV_BYTES, Held, start_executor_threads
from wire import vanished_host
from wire.link_driver import CALLS, FEWER, HANG_S, LARGE, NOTICED_S, SMALL, Driver, Payloads, hello, in_thread, until

from fastdecode.region.contract import PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, Status
from fastdecode.region.geometry import Geometry, region_layout
from fastdecode.transports import link as link_module
from fastdecode.transports.base import CallRefused, LayerOptions, Link, LinkDown, LinkRefused
from fastdecode.transports.registry import connect

#: Pages of the R-node's memory beside the link's activation region.
PAGES = (KV_BYTES - region_layout(SMALL).region_bytes) // (
    SMALL.n_layers * SMALL.n_kv_heads * 2 * SMALL.head_size * 4 * PAGE_TOKENS
)


# ---- calls and control requests ----


@pytest.mark.quick
async def test_attention_equals_float64(shared_node):
    wanted = hello(windows=(0, 70))
    link = await connect(shared_node.url, wanted, None)
    await in_thread(Driver(link, wanted).few_steps)
    assert link.lease.page_bytes == SMALL.n_kv_heads * 2 * SMALL.head_size * 4 * PAGE_TOKENS  # of one layer
    assert (link.lease.full_sections, link.lease.limited_sections, link.lease.reach) == (1, 1, 70)
    assert (link.lease.max_seqs, link.lease.n_pages) == (8, (1 << 20) // link.lease.page_bytes)
    await link.close()


async def test_what_layers_do_besides_is_agreed_at_hello(shared_node):
    layers = LayerOptions(
        segments=(90, 0),
        kv_layers=(0, 0),
        softcaps=(0, 1.5),
        sinks=np.arange(8).astype("<f4").tobytes(),
        slopes=np.array([0.5, 0.25, 0.125, 0.0], "<f4").tobytes(),
    )
    wanted = hello(windows=(0, 70), layers=layers)
    link = await connect(shared_node.url, wanted, None)
    await in_thread(Driver(link, wanted).few_steps)
    assert link.lease.page_bytes == SMALL.n_kv_heads * 2 * SMALL.head_size * 4 * PAGE_TOKENS  # of one layer
    await link.close()


@pytest.mark.parametrize("act_dtype", ["fp32", "bf16"])
async def test_layers_that_select_tokens(shared_node, act_dtype):
    geometry = Geometry(
        2, 64, 3, 20, 1, 40, act_dtype, v_size=32, v_in_k=True, index_heads=4, index_size=16, index_topk=60
    )
    wanted = hello(geometry, layers=LayerOptions(selections=(SELECT_OWN, SELECT_SHARED, SELECT_OWN)))
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)

    def steps():
        driver.fill(0, 300)
        driver.step(0, [(0, 1, True), (1, 20, False)])
        driver.step(1, [(1, 50, True), (0, 1, True), (2, 7, False)])

    await in_thread(steps)
    assert driver.n_certain > 20 * driver.n_doubtful
    await link.close()


@pytest.mark.parametrize("act_dtype", ["fp16", "bf16"])
async def test_half_precision_rows(shared_node, act_dtype):
    wanted = hello(dataclasses.replace(SMALL, act_dtype=act_dtype), kv_dtype="fp16")
    link = await connect(shared_node.url, wanted, None)
    await in_thread(lambda: Driver(link, wanted).step(0, [(0, 30, True)]))
    await link.close()


async def test_hundreds_of_calls_in_order_and_slots_reused(shared_node):
    """Two slots in flight, steps of changing size: every reply belongs to its call, every row to its reply."""
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    rng = np.random.default_rng(1)

    def steps():
        for _ in range(60 // FEWER):
            sizes = rng.integers(1, 9, 4).tolist()
            under_way = [driver.begin(s, [(s, sizes[s], True), (s + 2, sizes[s + 2], False)]) for s in (0, 1)]
            for layer in range(wanted.geometry.n_layers):
                bells = [step.post(layer) for step in under_way]
                for step, bell in zip(reversed(under_way), reversed(bells), strict=True):
                    step.finish(layer, bell)

    await in_thread(steps)
    assert (await link.stats())["calls"] == 60 // FEWER * 2 * 2
    await link.close()


@pytest.mark.timeout(280 + CALLS / 1000)
async def test_no_byte_of_any_call_is_torn(shared_node):
    """A bell appears only after all bytes of its call or reply. FASTDECODE_CALLS=1000000 makes a million calls."""
    link = await connect(shared_node.url, Payloads.HELLO, None)
    payloads = Payloads(link)
    await asyncio.to_thread(payloads.run, CALLS)
    assert (await link.stats())["calls"] == payloads.calls >= CALLS
    del payloads
    await link.close()


async def test_rows_of_megabytes_arrive_whole(shared_node):
    wanted = hello(LARGE, kv_bytes=KV_BYTES // 2)
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)

    def steps():
        for i in range(3):
            under_way = [driver.begin(slot, [(2 * i + slot, LARGE.max_rows, True)]) for slot in (0, 1)]
            for step, bell in [(step, step.post(0)) for step in under_way]:
                step.finish(0, bell)
            driver.step(0, [(2 * i, 1, True)])

    await in_thread(steps)
    await link.close()


async def test_two_threads_that_wait_on_two_slots_get_their_replies(shared_node):
    """Over TCP either thread may receive for both, and may leave while the other still waits."""
    wanted = hello(LARGE, kv_bytes=32 << 20)
    link = await connect(shared_node.url, wanted, None)
    y, q_shape, kv_shape = link.layout, (LARGE.n_q_heads, LARGE.head_size), (2, LARGE.n_kv_heads, LARGE.head_size)

    loop = asyncio.get_running_loop()

    def calls(slot: int) -> None:
        n = (3, LARGE.max_rows)[slot]  # small frames in one slot, large frames in the other
        at = y.slot(slot)
        rows = np.full((n, *kv_shape), slot + 1, np.float32)
        link.region[at + y.kv : at + y.kv + rows.nbytes] = rows.tobytes()
        o = np.frombuffer(link.region[at + y.o : at + y.o + n * y.q_row_bytes], np.float32).reshape(n, *q_shape)
        for i in range((200, 20)[slot] // FEWER):
            o[:] = 0
            link.arm(slot, np.array([(slot, i, 0, n, ROW_ATTEND, 0)], ROW_DTYPE))
            link.wait(slot, HANG_S)
            link.ring(slot, 0)
            link.wait(slot, HANG_S)
            asyncio.run_coroutine_threadsafe(link.free([(slot, i)]), loop).result(HANG_S)
            np.testing.assert_allclose(o, slot + 1, rtol=1e-6)  # all V rows are equal

    await asyncio.gather(in_thread(calls, 0), in_thread(calls, 1))
    await link.close()


async def test_several_links_of_one_r_node_at_once(shared_node):
    wanted = hello()
    links = [await connect(shared_node.url, wanted, None) for _ in range(3)]

    def steps(driver: Driver):
        for _ in range(30 // FEWER):
            driver.step(0, [(0, 3, True), (1, 2, False)])

    await asyncio.gather(*(in_thread(steps, Driver(link, wanted, seed)) for seed, link in enumerate(links)))
    for link in links:
        assert (await link.stats())["calls"] == 30 // FEWER * 2
        await link.close()


@pytest.mark.quick
async def test_free_trim_and_fork(shared_node):
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    await in_thread(driver.fill, 0, PAGE_TOKENS + 36)
    await driver.trim_seq(0, PAGE_TOKENS + 26)
    await driver.fork_seq(0, 1, PAGE_TOKENS + 6)
    await in_thread(lambda: driver.step(0, [(0, 2, True), (1, 2, True)]))
    stats = await link.stats()
    assert (stats["pages_used"], stats["seqs"]) == (
        3,
        2,
    )  # sequence 0 has two pages and shares one with sequence 1, which has another
    await driver.free_seq(0)
    await in_thread(lambda: driver.step(0, [(1, 2, True)]))
    await driver.free_seq(1)
    stats = await link.stats()
    assert (stats["pages_used"], stats["seqs"], stats["pages_total"]) == (0, 0, link.lease.n_pages)
    await link.close()


async def test_refused_control_requests_leave_the_link_alive(shared_node):
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    await in_thread(driver.fill, 0, 10)
    for request in (link.free([(0, 99)]), link.free([(8, 1)]), link.trim(0, 1, 11), link.fork((0, 1), (0, 2), 5)):
        with pytest.raises(CallRefused) as refused:
            await request
        assert refused.value.status == Status.BAD_SEQUENCE
    await in_thread(lambda: driver.step(0, [(0, 1, True)]))
    await link.close()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "status"),
    [
        ((8, 1, 0, 1, 1), Status.BAD_TABLE),  # a sequence outside the lease
        ((0, 1, 5, 1, 1), Status.BAD_SEQUENCE),  # a position that is not cached
        ((0, 7, 10, 1, 1), Status.BAD_SEQUENCE),  # another generation's tag
    ],
)
async def test_refused_steps_leave_the_link_alive(shared_node, row, status):
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    await in_thread(driver.fill, 0, 10)
    link.arm(0, np.array([(*row, 0)], ROW_DTYPE))
    with pytest.raises(CallRefused, match=r"entr|row|sequence") as refused:
        await in_thread(link.wait, 0, HANG_S)
    with pytest.raises(ValueError, match="no step is armed"):
        link.ring(0, 0)
    assert refused.value.status == status
    await in_thread(lambda: driver.step(0, [(0, 1, True)]))
    await link.close()


async def test_out_of_pages_leaves_the_link_alive(shared_node):
    wanted = hello(kv_bytes=4 * 65536)
    link = await connect(shared_node.url, wanted, None)
    assert link.lease.n_pages == 4
    driver = Driver(link, wanted)
    await in_thread(driver.fill, 0, 4 * PAGE_TOKENS - 1)
    link.arm(0, np.array([(0, 1, 4 * PAGE_TOKENS - 1, 1, 1, 0), (1, 2, 0, 1, 1, 0)], ROW_DTYPE))
    with pytest.raises(CallRefused) as refused:
        await in_thread(link.wait, 0, HANG_S)
    assert refused.value.status == Status.OUT_OF_PAGES
    await in_thread(lambda: driver.step(0, [(0, 1, True)]))
    await link.close()


async def test_misuse_is_an_error_and_sends_nothing(shared_node):
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    one = np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE)
    with pytest.raises(ValueError, match="nothing in the slot is to be waited for"):
        link.wait(0, 1.0)
    for slot, table, says in [
        (2, one, "slot is beyond"),
        (2**32 - 1, one, "slot is beyond"),
        (0, np.zeros(33, ROW_DTYPE), "longer"),
        (0, np.array([(0, 1, 0, 33, 1, 0)], ROW_DTYPE), "more rows"),
        (0, np.array([(0, 1, 0, 2**32 - 1, 1, 0)] * 2, ROW_DTYPE), "more rows"),
        (0, one[:0], "rows"),
        (0, np.zeros(24, np.uint8), "ROW_DTYPE"),
    ]:
        with pytest.raises(ValueError, match=says):
            link.arm(slot, table)
    with pytest.raises(ValueError, match="no step is armed"):
        link.ring(0, 0)
    step = driver.begin(0, [(0, 1, True)])
    bell = step.post(0)
    for call in (lambda: link.ring(0, 1), lambda: link.arm(0, one)):
        with pytest.raises(ValueError, match="has not been waited for"):
            call()
    step.finish(0, bell)
    for layer in (0, 2, 2**32 - 1):
        with pytest.raises(ValueError, match="layer"):
            link.ring(0, layer)
    step.call(1)
    assert (await link.stats())["calls"] == 2
    await link.close()


async def test_a_step_may_be_abandoned_after_any_layer(shared_node):
    wanted = hello()
    link = await connect(shared_node.url, wanted, None)
    driver = Driver(link, wanted)
    await in_thread(driver.fill, 0, 10)
    for done in (0, 1, 0, 1):
        driver.table(0, [(0, 1, 10, 3, ROW_ATTEND)])
        link.arm(0, driver.tables[0])
        await in_thread(link.wait, 0, HANG_S)
        for layer in range(done):
            link.ring(0, layer)
            await in_thread(link.wait, 0, HANG_S)
        await link.trim(0, 1, 10)
        if done:
            assert link.disarm(0) is None
    await in_thread(lambda: driver.step(0, [(0, 1, True)]))
    await link.close()


async def test_r_node_whose_python_is_stuck_goes_on_serving(node, monkeypatch):
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", HANG_S)  # the link must not be given up meanwhile
    wanted = hello()
    link = await connect(node.url, wanted, None)
    driver = Driver(link, wanted)
    await in_thread(lambda: driver.step(0, [(0, 1, True)]))
    request = asyncio.create_task(link.stats())
    await request  # the R-node's Python answers
    node.stick()
    request = asyncio.create_task(link.stats())

    def steps():
        for i in range(12):
            driver.step(0, [(i % 8, 1, True)])

    await in_thread(steps)
    assert not request.done()  # the R-node's Python is still stuck
    node.unstick()
    assert (await request)["calls"] >= 2 * 12
    await link.close()


# ---- nodes and hosts that die ----


async def waiting_thread(link: Link) -> asyncio.Task[None]:
    """Start a thread that sleeps in `wait` for a reply that does not come."""
    link.arm(0, np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE))
    waiter = asyncio.create_task(asyncio.to_thread(link.wait, 0, 60.0))
    await asyncio.sleep(0.2)
    assert not waiter.done()
    return waiter


async def is_dead(link: Link) -> None:
    for data in (lambda: link.ring(1, 0), lambda: link.arm(1, np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE))):
        with pytest.raises(LinkDown):
            data()
    for request in (link.free([(0, 1)]), link.stats()):
        with pytest.raises(LinkDown):
            await request
    await link.close()


@pytest.mark.quick
async def test_r_node_killed_while_a_thread_waits(node):
    link = await connect(node.url, hello(), None)
    node.stop()
    waiter = await waiting_thread(link)
    request = asyncio.create_task(link.stats())
    await asyncio.sleep(0)
    assert node.end(signal.SIGKILL) == -signal.SIGKILL
    async with asyncio.timeout(NOTICED_S):
        with pytest.raises(LinkDown):
            await waiter
        with pytest.raises(LinkDown):
            await request
        assert isinstance(await link.closed(), LinkDown)
    await is_dead(link)


async def test_r_node_killed_and_started_again_at_the_same_address(node):
    link = await connect(node.url, hello(), None)
    before = node.url
    node.end(signal.SIGKILL)
    async with asyncio.timeout(NOTICED_S):
        assert isinstance(await link.closed(), LinkDown)
    with pytest.raises(LinkDown, match="no R-node can be reached"):
        await connect(node.url, hello(), None)
    node.start()
    assert node.url == before
    second = await connect(node.url, hello(), None)
    await in_thread(lambda: Driver(second, hello()).step(0, [(0, 1, True)]))
    await second.close()
    await link.close()


async def test_r_node_that_hangs_is_given_up(node, monkeypatch):
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", 0.1)
    link = await connect(node.url, hello(), None)
    node.stop()
    waiter = await waiting_thread(link)
    async with asyncio.timeout(NOTICED_S):
        with pytest.raises(LinkDown, match="has not answered"):
            await waiter
    assert "has not answered" in str(await link.closed())


async def test_no_reply_within_the_timeout(node):
    link = await connect(node.url, hello(), None)
    node.stop()
    link.arm(0, np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE))
    with pytest.raises(LinkDown, match=r"the verdict of step 1 in slot 0 has not come within 0\.1 s"):
        await in_thread(link.wait, 0, 0.1)
    with pytest.raises(LinkDown):  # although the slot's step was never answered
        link.arm(0, np.array([(0, 1, 0, 1, 1, 0)], ROW_DTYPE))
    assert "has not come" in str(await asyncio.wait_for(link.closed(), NOTICED_S))
    await is_dead(link)


async def test_r_node_that_ends_on_sigterm_says_so(node):
    link = await connect(node.url, hello(), None)
    assert await asyncio.to_thread(node.end) == 0
    async with asyncio.timeout(NOTICED_S):
        assert "shutting down" in str(await link.closed())
    await is_dead(link)


async def test_closing_wakes_a_waiting_thread(node):
    link = await connect(node.url, hello(), None)
    node.stop()
    waiter = await waiting_thread(link)
    closing = asyncio.create_task(link.close())
    async with asyncio.timeout(NOTICED_S):
        with pytest.raises(LinkDown, match="closed"):
            await waiter
    node.go_on()
    async with asyncio.timeout(NOTICED_S):
        await closing
        assert await link.closed() is None
    await is_dead(link)


async def test_closed_link_has_freed_its_lease(shared_node):
    for _ in range(3):
        link = await connect(shared_node.url, hello(kv_bytes=None), None)
        assert link.lease.n_pages == PAGES
        with pytest.raises(LinkRefused, match="no memory for a KV-cache"):
            await connect(shared_node.url, hello(), None)
        await link.close()
        await link.close()


S_NODE = """
import asyncio, sys
from wire.link_driver import Driver, hello
from fastdecode.transports.registry import connect

async def main():
    wanted = hello(kv_bytes=None)
    link = await connect(sys.argv[1], wanted, None)
    driver = Driver(link, wanted)
    step = driver.begin(0, [(0, 5, True)])
    step.post(0)
    print(link.lease.n_pages, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_s_node_killed_frees_its_lease_and_leaves_nothing_behind(shared_node):
    before = Held.by(shared_node.pid)
    s_node = subprocess.Popen([sys.executable, "-c", S_NODE, shared_node.url], stdout=subprocess.PIPE, text=True)
    try:
        assert s_node.stdout
        assert int(await in_thread(s_node.stdout.readline)) == PAGES
        with pytest.raises(LinkRefused, match="no memory"):
            await connect(shared_node.url, hello(), None)
    finally:
        s_node.kill()
        s_node.wait()
        s_node.stdout.close()

    async def freed() -> bool:
        try:
            link = await connect(shared_node.url, hello(kv_bytes=None), None)
        except LinkRefused:
            return False
        # An R-node frees a link's pages a little before its activation region, so a lease may have a page less.
        all_pages = link.lease.n_pages == PAGES
        await link.close()
        return all_pages

    await until(freed, NOTICED_S)
    assert Held.by(shared_node.pid) == before


def test_vanished_host_is_noticed_by_both_sides():
    """A vanished host sends no FIN and no RST. Both sides notice, on an idle link and on one with a call in flight."""
    done = subprocess.run([sys.executable, vanished_host.__file__], stdout=subprocess.PIPE)
    if done.returncode == vanished_host.NOT_ALLOWED:
        pytest.skip("no network namespace may be made here")
    assert done.returncode == 0
    idle, busy, freed = json.loads(done.stdout)
    assert max(idle, busy, freed) < NOTICED_S


async def test_neither_side_leaks_over_many_links(shared_node):
    wanted = hello()

    async def cycle() -> None:
        link = await connect(shared_node.url, wanted, None)
        await in_thread(lambda: Driver(link, wanted).step(0, [(0, 3, True)]))
        await link.close()

    start_executor_threads()
    await cycle()
    before = Held.by(os.getpid()), Held.by(shared_node.pid)
    for _ in range(20 // FEWER):
        await cycle()
    assert (Held.by(os.getpid()), Held.by(shared_node.pid)) == before
