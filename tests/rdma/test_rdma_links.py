"""The behaviour that only RDMA links have; tests/transports/test_transports.py tests that of every link.

These tests need an RDMA device, and some need a wire that they may cut. The virtual machine of tests/rdma has both, and
test_rdma_vm.py runs them there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address

import numpy as np
import pytest
from engines.token_stream import submit
from msgspec.structs import replace
from nodes.rnode_process import Held, RNodeProcess, start_executor_threads
from wire.link_driver import CYCLES, HANG_S, NOTICED_S, Driver, Payloads, hello, until

from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
from fastdecode.transports.base import LinkDown, LinkRefused, TransportError
from fastdecode.transports.rdma_devices import list_ports
from fastdecode.transports.rdma_endpoint import Endpoint, load
from fastdecode.transports.registry import connect

KV_BYTES = 16 << 20

pytestmark = pytest.mark.skipif(
    not any(port.active for port in list_ports()), reason="no active RDMA device here; test_rdma_vm.py has one"
)
needs_wire = pytest.mark.skipif(
    os.environ.get("FASTDECODE_RDMA_WIRE") != "veth",
    reason="no RDMA devices on a wire to cut; test_rdma_vm.py has them",
)

SECRET = b"for addresses that others may reach"


def start_r_node(host: str) -> Iterator[RNodeProcess]:
    node = RNodeProcess(f"rdma://{host}:0", KV_BYTES, SECRET.decode())
    yield node
    if node.process.poll() is None:
        assert node.end() == 0


@pytest.fixture(scope="module")
def node() -> Iterator[RNodeProcess]:
    yield from start_r_node("127.0.0.1")


@pytest.fixture(scope="module")
def far_node() -> Iterator[RNodeProcess]:
    """An R-node at the other end of the wire."""
    yield from start_r_node("10.8.0.2")


async def step_of(driver: Driver) -> None:
    await asyncio.wait_for(asyncio.to_thread(driver.step, 0, [(0, 3, True)]), HANG_S)


def registered(pid: int | None = None) -> int:
    """Bytes of memory that a process, by default this one, has registered with devices."""
    return Held.by(pid or os.getpid()).registered


def change_peer(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let `change` replace the peer's description (messages.Endpoint) in all further connections of this process."""
    original = Endpoint.connect
    monkeypatch.setattr(Endpoint, "connect", lambda self, peer: original(self, change(peer)))


@pytest.mark.parametrize("elsewhere", ["wrong key", "beyond the region", "another link's region"])
async def test_only_the_links_own_region_can_be_written(node, monkeypatch, elsewhere):
    wanted = hello()
    peers = []
    with monkeypatch.context() as patch:
        change_peer(patch, lambda peer: peers.append(peer) or peer)
        bystander = await connect(node.url, wanted, SECRET)
    other = Driver(bystander, wanted)
    await step_of(other)
    changes = {
        "wrong key": lambda peer: replace(peer, rkey=peer.rkey ^ 0x5500),
        "beyond the region": lambda peer: replace(
            peer, address=(int(peer.address, 16) + bystander.layout.region_bytes).to_bytes(8).hex()
        ),
        "another link's region": lambda peer: replace(peer, rkey=peers[0].rkey, address=peers[0].address),
    }
    with monkeypatch.context() as patch:
        change_peer(patch, changes[elsewhere])
        link = await connect(node.url, wanted, SECRET)
    with pytest.raises(LinkDown, match="remote access error"):
        await asyncio.wait_for(step_of(Driver(link, wanted)), NOTICED_S)
    assert "remote access error" in str(await asyncio.wait_for(link.closed(), NOTICED_S))
    await step_of(other)  # the other link is unharmed
    await link.close()
    await bystander.close()
    assert registered() == 0


async def test_regions_are_registered_while_their_link_lives(node):
    assert registered() == 0
    links = [await connect(node.url, hello(), SECRET) for _ in range(2)]
    assert registered() >= 2 * links[0].layout.region_bytes
    assert registered(node.pid) >= 2 * links[0].layout.region_bytes
    for link in links:
        await link.close()
    assert (registered(), registered(node.pid)) == (0, 0)


async def test_a_dead_peer_is_retried_for_less_than_a_second(node, monkeypatch):
    """The queue pair's attributes, read from the kernel. On some devices seven retries mean retries without end."""
    pairs = []
    with monkeypatch.context() as patch:
        original = Endpoint.connect
        patch.setattr(Endpoint, "connect", lambda self, peer: pairs.append(self._pair) or original(self, peer))
        link = await connect(node.url, hello(), SECRET)
    enums = load().enums
    attributes, _ = pairs[0].query(enums.IBV_QP_TIMEOUT | enums.IBV_QP_RETRY_CNT)
    assert 1 <= attributes.retry_cnt <= 6
    assert 0 < 4.096e-6 * 2**attributes.timeout * (1 + attributes.retry_cnt) < 1
    await link.close()


async def test_an_s_node_that_stops_reading_leaves_other_links_alone(node):
    """A device writes replies to memory, so even an S-node that has stopped takes them."""
    wanted = hello(kv_bytes=1 << 19)
    links = [await connect(node.url, wanted, SECRET) for _ in range(2)]
    drivers = [Driver(link, wanted, seed) for seed, link in enumerate(links)]
    under_way = drivers[0].begin(0, [(0, 1, True)])
    bell = under_way.post(0)
    for _ in range(20):
        await step_of(drivers[1])
    under_way.finish(0, bell)
    for link in links:
        await link.close()


async def test_a_gid_that_is_not_there_is_refused(node):
    with pytest.raises(TransportError, match="has no GID 99"):
        await connect(f"{node.url}?device={list_ports()[0].device}&gid=99", hello(), SECRET)
    with pytest.raises(TransportError, match="no RDMA port none0"):
        await connect(f"{node.url}?device=none0", hello(), SECRET)


async def test_an_r_node_that_cannot_do_rdma_says_so():
    failing = RNodeProcess("rdma://127.0.0.1:0?device=none0", KV_BYTES)
    try:
        with pytest.raises(LinkRefused, match="the R-node cannot do RDMA: there is no RDMA port none0"):
            await connect(failing.url, hello(), None)
    finally:
        assert failing.end() == 0


@pytest.mark.timeout(600)
async def test_a_completion_is_the_same_as_over_shared_memory(tmp_path):
    from engines.real_engine import real_engine  # imports torch, which no other test of this module needs

    from fastdecode.demo import model_dir
    from fastdecode.engine.state.request import SamplingParams

    async def complete(url: str | None) -> list[list[int]]:
        async with real_engine(model_dir(), tmp_path, url=url) as engine:
            greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            streams = [submit(engine, list(range(5 + i, 15 + 7 * i)), greedy) for i in range(2)]
            return [[event.token async for event in stream] for stream in streams]

    over_shm = await complete(None)
    assert [len(tokens) for tokens in over_shm] == [6] * 2
    assert await complete("rdma://127.0.0.1:0") == over_shm


# ---- with a wire ----

WIRE_DOWN = r"link of rx. port 1 is down|retry exceeded|its link is down"


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.fixture
def wire() -> Iterator[None]:
    """Undoes all changes of a test to the wire."""
    yield
    for device in ("va", "vb"):
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
        wire_up(device)


def wire_up(device: str) -> None:
    """Set a device up and add its route, which it lost when it was set down."""
    here, there = ("10.8.0.1", "10.8.0.2") if device == "va" else ("10.8.0.2", "10.8.0.1")
    sh(f"ip link set {device} up")
    sh(f"ip route replace {there} dev {device} src {here} table 77")


@needs_wire
async def test_devices_at_both_ends_of_a_wire_are_found_by_the_route(far_node, wire, monkeypatch):
    peers = []
    change_peer(monkeypatch, lambda peer: peers.append(peer) or peer)
    link = await connect(far_node.url, hello(), SECRET)
    assert IPv6Address(bytes.fromhex(peers[0].gid)).ipv4_mapped.exploded == "10.8.0.2"
    await step_of(Driver(link, hello()))
    await link.close()


@needs_wire
async def test_loss_and_reordering_tear_nothing(far_node, wire):
    """Every row is checked: packets that arrive late or twice must not change any."""
    for device in ("va", "vb"):
        sh(f"tc qdisc add dev {device} root netem delay 200us reorder 90% loss 0.3%")
    wanted = hello()
    link = await connect(far_node.url, wanted, SECRET)
    driver = Driver(link, wanted)

    def steps() -> None:
        for i in range(40):
            driver.step(i % 2, [(i % 4, 1 + i % 7, True), (4 + i % 4, 2, False)])

    await asyncio.wait_for(asyncio.to_thread(steps), HANG_S)
    await link.close()


@needs_wire
@pytest.mark.parametrize("which", ["va", "vb"])
async def test_a_wire_that_goes_down_is_the_reason_given(node, far_node, wire, which):
    wanted = hello()
    link, bystander = await connect(far_node.url, wanted, SECRET), await connect(node.url, wanted, SECRET)
    driver, other = Driver(link, wanted), Driver(bystander, wanted)
    await step_of(driver)
    sh(f"ip link set {which} down")
    with pytest.raises(LinkDown, match=WIRE_DOWN):
        await asyncio.wait_for(step_of(driver), NOTICED_S)
    await asyncio.wait_for(link.closed(), NOTICED_S)
    await step_of(other)
    await bystander.close()


@needs_wire
@pytest.mark.timeout(280 + 20 * CYCLES)
@pytest.mark.parametrize("which", ["va", "vb"])
async def test_a_wire_that_goes_down_under_load_leaves_nothing_behind(node, far_node, wire, which):
    """Neither side keeps memory, descriptors, threads or verbs objects, and a link on another device goes on."""
    start_executor_threads()
    wanted, other_wanted = Payloads.HELLO, hello()
    bystander = await connect(node.url, other_wanted, SECRET)
    other = Driver(bystander, other_wanted)
    await step_of(other)

    def held() -> tuple[Held, Held]:
        return Held.by(os.getpid()), Held.by(far_node.pid)

    async def nothing_is_left() -> bool:
        return held() == before

    async def cycle() -> None:
        link = await connect(far_node.url, wanted, SECRET)
        load = asyncio.create_task(asyncio.to_thread(Payloads(link).run, sys.maxsize))
        while (await link.stats())["calls"] < 50:
            assert not load.done(), load.exception()
        sh(f"ip link set {which} down")
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(LinkDown, match=WIRE_DOWN):
                await load
            await link.closed()
        await step_of(other)
        wire_up(which)

    before = held()
    for _ in range(CYCLES):
        await cycle()
        await until(nothing_is_left, NOTICED_S)
    await bystander.close()


@needs_wire
async def test_a_host_that_falls_silent_is_the_reason_given(far_node, wire):
    wanted = hello()
    link = await connect(far_node.url, wanted, SECRET)
    driver = Driver(link, wanted)
    await step_of(driver)
    sh("tc qdisc add dev va root netem loss 100%")
    with pytest.raises(LinkDown, match="retry exceeded: the peer's device does not answer"):
        await asyncio.wait_for(step_of(driver), NOTICED_S)
    await asyncio.wait_for(link.closed(), NOTICED_S)


@needs_wire
async def test_a_host_that_falls_silent_before_its_reply_is_the_reason_given(far_node, wire):
    """The host's device has acknowledged the whole call, so no retry can fail until the bell is rung again."""
    wanted = hello()
    link = await connect(far_node.url, wanted, SECRET)
    driver = Driver(link, wanted)
    await step_of(driver)
    far_node.stop()
    try:
        link.arm(0, np.array([(1, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE))
        await asyncio.sleep(0.1)
        sh("tc qdisc add dev va root netem loss 100%")
        with pytest.raises(LinkDown, match="retry exceeded: the peer's device does not answer"):
            await asyncio.wait_for(asyncio.to_thread(link.wait, 0, HANG_S), NOTICED_S)
    finally:
        far_node.go_on()
    await asyncio.wait_for(link.closed(), NOTICED_S)


@needs_wire
async def test_an_r_node_killed_under_load_is_the_reason_given(far_node, wire):
    wanted = hello()
    link = await connect(far_node.url, wanted, SECRET)
    driver = Driver(link, wanted)

    def steps() -> None:
        while True:
            driver.step(0, [(0, 1, True)])

    loaded = asyncio.create_task(asyncio.to_thread(steps))
    await asyncio.sleep(0.5)
    far_node.end(signal.SIGKILL)
    with pytest.raises(LinkDown, match=r"closed the connection|retry exceeded|connection broke|remote access error"):
        await asyncio.wait_for(loaded, NOTICED_S)
    await asyncio.wait_for(link.closed(), NOTICED_S)
    await link.close()
    assert registered() == 0
