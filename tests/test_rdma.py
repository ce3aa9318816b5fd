"""What is RDMA's own about its links; what every link does is in test_transports.py.

The tests at the end need a device, and some a wire of their own that may be cut: tests/rdma has a virtual machine with
both, in which test_rdma_vm.py runs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from link_driver import Driver, hello
from rnode_process import RNodeProcess

from fastdecode import check
from fastdecode.transports import _native, rdma_devices, rdma_endpoint
from fastdecode.transports.base import LinkDown, LinkRefused, TransportError
from fastdecode.transports.rdma_devices import Gid, Port, choose, list_ports
from fastdecode.transports.rdma_endpoint import Endpoint
from fastdecode.transports.registry import connect, serve

ROOT = Path(__file__).parent.parent
KV_BYTES = 16 << 20
NAMED_S = 5.0  # an error must have been named by then
HANG_S = 60.0

# ---- devices, as the kernel lists them ----


def add_port(root: Path, device: str, number: int, gids: dict[int, tuple[str, str, str]], **files: str) -> None:
    """A port as sysfs shows it. `gids`: index to (address, type, interface)."""
    port = root / device / "ports" / str(number)
    for name, text in ({"state": "4: ACTIVE", "link_layer": "Ethernet", "lid": "0x0"} | files).items():
        port.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for index in range(30):  # empty; its attributes cannot be read
        (port / "gids" / str(index)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    for index, (address, kind, interface) in gids.items():
        (port / "gids" / str(index)).write_text(IPv6Address(address).exploded + "\n")
        (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")


V1, V2 = "IB/RoCE v1", "RoCE v2"


@pytest.fixture
def two_devices(tmp_path: Path) -> list[Port]:
    a = {0: ("fe80::1", V1, "ea"), 1: ("fe80::1", V2, "ea"), 2: ("::ffff:10.0.0.1", V1, "ea")}
    add_port(tmp_path, "a", 1, a | {3: ("::ffff:10.0.0.1", V2, "ea"), 10: ("2001:db8::1", V2, "ea")})
    add_port(tmp_path, "b", 1, {0: ("fe80::2", V2, "eb"), 1: ("::ffff:10.0.1.1", V2, "eb")})
    add_port(tmp_path, "b", 2, {0: ("::ffff:10.0.2.1", V2, "ec")}, state="1: DOWN")
    return list_ports(tmp_path)


def test_ports_as_sysfs_shows_them(two_devices):
    assert [str(port) for port in two_devices] == ["a port 1", "b port 1", "b port 2"]
    assert [port.active for port in two_devices] == [True, True, False]
    assert two_devices[0].gids[-1] == Gid(10, IPv6Address("2001:db8::1"), V2, "ea")
    assert [gid.index for gid in two_devices[0].gids] == [0, 1, 2, 3, 10]
    assert list_ports(Path("/nowhere")) == []


@pytest.mark.parametrize(
    ("local", "wanted", "device", "index"),
    [
        ("10.0.0.1", {}, "a", 3),
        ("10.0.1.1", {}, "b", 1),
        ("::ffff:10.0.1.1", {}, "b", 1),
        ("2001:db8::1", {}, "a", 10),
        ("127.0.0.1", {"device": "a"}, "a", 3),
        ("127.0.0.1", {"device": "b", "number": 1}, "b", 1),
        ("10.0.0.1", {"device": "b"}, "b", 1),
        ("10.0.0.1", {"device": "a", "gid": 2}, "a", 2),
    ],
)
def test_the_gid_of_the_interface_that_routes_to_the_peer(two_devices, local, wanted, device, index):
    place = choose(two_devices, local, **wanted)
    assert (place.port.device, place.gid.index) == (device, index)


@pytest.mark.parametrize(
    ("local", "wanted", "says"),
    [
        ("127.0.0.1", {}, r"not clear.*10?.*a port 1, b port 1 as \?device"),
        ("10.0.0.1", {"device": "c"}, "no RDMA port c here, there are a port 1, b port 1"),
        ("10.0.0.1", {"device": "a", "number": 2}, "no RDMA port a port 2"),
        ("10.0.2.1", {"device": "b", "number": 2}, "b port 2 is not active"),
        ("10.0.0.1", {"device": "a", "gid": 7}, r"a port 1 has no GID 7, it has 0 \(fe80::1, IB/RoCE v1, ea\), 1"),
    ],
)
def test_a_choice_that_cannot_be_made_says_what_there_is(two_devices, local, wanted, says):
    with pytest.raises(TransportError, match=says):
        choose(two_devices, local, **wanted)


def test_infiniband_is_addressed_by_its_lid(tmp_path):
    add_port(tmp_path, "ib", 1, {0: ("fe80::5", V1, "")}, link_layer="InfiniBand", lid="0x1f")
    place = choose(list_ports(tmp_path), "10.9.9.9")
    assert (place.port.lid, place.gid) == (31, None)


def test_an_interface_without_an_address_is_asked_for_one(tmp_path):
    add_port(tmp_path, "a", 1, {0: ("fe80::1", V2, "ea")})
    with pytest.raises(TransportError, match="give its interface an IP address"):
        choose(list_ports(tmp_path), "10.0.0.1")


def test_no_device_is_an_answer(tmp_path):
    with pytest.raises(TransportError, match="no RDMA device"):
        choose(list_ports(tmp_path), "10.0.0.1")
    assert rdma_devices.report(tmp_path).startswith("no devices")
    assert "RDMA" in check.report()


def test_check_lists_every_port_and_gid(two_devices, tmp_path):
    verdict, *ports = rdma_devices.report(tmp_path).splitlines()
    assert "usable" in verdict
    assert len(ports) == 3
    assert ports[0].startswith("a port 1: active, RoCE, MTU ")
    assert ports[0].endswith("3 (10.0.0.1, RoCE v2, ea), 10 (2001:db8::1, RoCE v2, ea)")
    assert ports[2].startswith("b port 2: down, RoCE, MTU ")


# ---- pyverbs and libibverbs ----


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.startswith("pyverbs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    rdma_endpoint.load.cache_clear()
    yield
    rdma_endpoint.load.cache_clear()


async def test_without_pyverbs_the_url_says_what_to_install(no_pyverbs):
    with pytest.raises(TransportError, match=r"needs pyverbs.*python3-pyverbs.*fastdecode\[rdma\]"):
        await connect("rdma://127.0.0.1:1", hello(), None)
    with pytest.raises(TransportError, match=r"needs pyverbs.*python3-pyverbs.*fastdecode\[rdma\]"):
        await serve("rdma://127.0.0.1:0", None, None)


def test_the_binary_interface_is_that_of_the_installed_header():
    compiler = shutil.which("cc")
    if not compiler or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("no compiler, or no infiniband/verbs.h (Debian: libibverbs-dev)")
    source, include = ROOT / "tests/c/verbs_abi.c", ROOT / "transports"
    subprocess.run([compiler, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{include}", source], check=True)


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_poster_over_a_device_made_of_memcpy(tmp_path):
    """tests/c/poster_loopback.c, under AddressSanitizer and UBSan."""
    program, flags = tmp_path / "poster_loopback", ["-std=gnu11", "-O1", "-fsanitize=address,undefined"]
    sources = [ROOT / "tests/c/poster_loopback.c", ROOT / "transports/rdma_poster.c"]
    include = [f"-I{ROOT / name}" for name in ("kernels", "transports")]
    subprocess.run(
        ["gcc", *flags, "-fno-sanitize-recover=all", *include, *sources, "-pthread", "-o", program], check=True
    )
    run = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("address", [0, 8, (1 << 47) - 4096, (1 << 64) - 8, id(object())])
def test_what_is_no_queue_pair_is_refused_unharmed(address):
    with pytest.raises(ValueError, match="not a queue pair"):
        _native.verbs_fds(address, 17)


# ---- with a device ----

needs_device = pytest.mark.skipif(
    not any(port.active for port in list_ports()), reason="no active RDMA device here; test_rdma_vm.py has one"
)
needs_wire = pytest.mark.skipif(
    "FASTDECODE_RDMA_WIRE" not in os.environ, reason="no RDMA devices on a wire to cut; test_rdma_vm.py has them"
)


SECRET = b"for addresses that others may reach"


def an_r_node(host: str) -> Iterator[RNodeProcess]:
    node = RNodeProcess(f"rdma://{host}:0", KV_BYTES, SECRET.decode())
    yield node
    if node.process.poll() is None:
        assert node.end() == 0


@pytest.fixture(scope="module")
def node() -> Iterator[RNodeProcess]:
    yield from an_r_node("127.0.0.1")


@pytest.fixture(scope="module")
def far_node() -> Iterator[RNodeProcess]:
    """At the other end of the wire."""
    yield from an_r_node("10.8.0.2")


async def step_of(driver: Driver) -> None:
    await asyncio.wait_for(asyncio.to_thread(driver.step, 0, [(0, 3, True)]), HANG_S)


def pinned_kib(pid: int | str) -> int:
    """Memory that a process has registered with devices."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmPin"))
    return int(line.split()[1])


def meddle(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Have the next connections of this process write elsewhere: `change` takes the peer's card and returns another."""
    join = Endpoint.join
    monkeypatch.setattr(Endpoint, "join", lambda self, card: join(self, change(card)))


@needs_device
@pytest.mark.parametrize("elsewhere", ["wrong key", "beyond the region", "another link's region"])
async def test_only_the_links_own_region_can_be_written(node, monkeypatch, elsewhere):
    said = hello()
    cards = []
    with monkeypatch.context() as patch:
        meddle(patch, lambda card: cards.append(card) or card)
        bystander = await connect(node.url, said, SECRET)
    other = Driver(bystander, said)
    await step_of(other)
    changes = {
        "wrong key": lambda card: dataclasses.replace(card, rkey=card.rkey ^ 0x5500),
        "beyond the region": lambda card: dataclasses.replace(
            card, address=(int(card.address, 16) + bystander.layout.region_bytes).to_bytes(8).hex()
        ),
        "another link's region": lambda card: dataclasses.replace(card, rkey=cards[0].rkey, address=cards[0].address),
    }
    with monkeypatch.context() as patch:
        meddle(patch, changes[elsewhere])
        link = await connect(node.url, said, SECRET)
    with pytest.raises(LinkDown, match="remote access error"):
        await asyncio.wait_for(step_of(Driver(link, said)), NAMED_S)
    assert "remote access error" in str(await asyncio.wait_for(link.closed(), NAMED_S))
    await step_of(other)  # untouched
    await bystander.close()
    assert pinned_kib("self") == 0


@needs_device
async def test_regions_are_registered_while_their_link_lives(node):
    assert pinned_kib("self") == 0
    links = [await connect(node.url, hello(), SECRET) for _ in range(2)]
    kib = links[0].layout.region_bytes >> 10
    assert pinned_kib("self") >= 2 * kib
    assert pinned_kib(node.pid) >= 2 * kib
    for link in links:
        await link.close()
    assert (pinned_kib("self"), pinned_kib(node.pid)) == (0, 0)


@needs_device
async def test_an_s_node_that_stops_reading_leaves_other_links_alone(node):
    """Replies are written to memory: a peer that is stopped takes them all the same."""
    said = hello(kv_bytes=1 << 19)
    links = [await connect(node.url, said, SECRET) for _ in range(2)]
    drivers = [Driver(link, said, seed) for seed, link in enumerate(links)]
    under_way = drivers[0].begin(0, [(0, 1, True)])
    bell = under_way.post(0)
    for _ in range(20):
        await step_of(drivers[1])
    under_way.finish(0, bell)
    for link in links:
        await link.close()


@needs_device
async def test_a_gid_that_is_not_there_is_refused(node):
    with pytest.raises(TransportError, match="has no GID 99"):
        await connect(f"{node.url}?device={list_ports()[0].device}&gid=99", hello(), SECRET)
    with pytest.raises(TransportError, match="no RDMA port none0"):
        await connect(f"{node.url}?device=none0", hello(), SECRET)


@needs_device
async def test_an_r_node_that_cannot_do_rdma_says_so():
    failing = RNodeProcess("rdma://127.0.0.1:0?device=none0", KV_BYTES)
    try:
        with pytest.raises(LinkRefused, match="the R-node cannot do RDMA: there is no RDMA port none0"):
            await connect(failing.url, hello(), None)
    finally:
        assert failing.end() == 0


@needs_device
@pytest.mark.timeout(600)
async def test_a_completion_is_the_same_as_over_shared_memory(tmp_path):
    from real_engine import real_engine  # brings torch along, which nothing else here needs

    from fastdecode.demo import model_dir
    from fastdecode.engine.request import SamplingParams

    async def complete(url: str | None) -> list[list[int]]:
        async with real_engine(model_dir(), tmp_path, url=url) as engine:
            greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            streams = [engine.submit(list(range(5 + i, 95 + 7 * i)), greedy) for i in range(3)]
            return [[event.token async for event in stream] for stream in streams]

    over_shm = await complete(None)
    assert [len(tokens) for tokens in over_shm] == [12] * 3
    assert await complete("rdma://127.0.0.1:0") == over_shm


# ---- with a wire ----


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.fixture
def wire() -> Iterator[None]:
    """Whatever a test does to it is undone."""
    yield
    for device in ("va", "vb"):
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
        sh(f"ip link set {device} up")
    sh("ip route replace 10.8.0.2 dev va src 10.8.0.1 table 77")
    sh("ip route replace 10.8.0.1 dev vb src 10.8.0.2 table 77")


@needs_wire
async def test_devices_at_both_ends_of_a_wire_are_found_by_the_route(far_node, wire, monkeypatch):
    cards = []
    meddle(monkeypatch, lambda card: cards.append(card) or card)
    link = await connect(far_node.url, hello(), SECRET)
    assert IPv6Address(bytes.fromhex(cards[0].gid)).ipv4_mapped.exploded == "10.8.0.2"
    await step_of(Driver(link, hello()))
    await link.close()


@needs_wire
async def test_loss_and_reordering_tear_nothing(far_node, wire):
    """Every row is checked: what arrives late or twice must not show."""
    for device in ("va", "vb"):
        sh(f"tc qdisc add dev {device} root netem delay 200us reorder 90% loss 0.3%")
    said = hello()
    link = await connect(far_node.url, said, SECRET)
    driver = Driver(link, said)

    def steps() -> None:
        for i in range(40):
            driver.step(i % 2, [(i % 4, 1 + i % 7, True), (4 + i % 4, 2, False)])

    await asyncio.wait_for(asyncio.to_thread(steps), HANG_S)
    await link.close()


@needs_wire
@pytest.mark.parametrize("which", ["va", "vb"])
async def test_link_set_down_is_named(node, far_node, wire, which):
    said = hello()
    link, bystander = await connect(far_node.url, said, SECRET), await connect(node.url, said, SECRET)
    driver, other = Driver(link, said), Driver(bystander, said)
    await step_of(driver)
    sh(f"ip link set {which} down")
    with pytest.raises(LinkDown, match=r"link of rx. port 1 is down|retry exceeded|its link is down"):
        await asyncio.wait_for(step_of(driver), NAMED_S)
    await asyncio.wait_for(link.closed(), NAMED_S)
    await step_of(other)
    await bystander.close()


@needs_wire
async def test_a_host_that_falls_silent_is_named(far_node, wire):
    said = hello()
    link = await connect(far_node.url, said, SECRET)
    driver = Driver(link, said)
    await step_of(driver)
    sh("tc qdisc add dev va root netem loss 100%")
    with pytest.raises(LinkDown, match="retry exceeded: the peer's device does not answer"):
        await asyncio.wait_for(step_of(driver), NAMED_S)
    await asyncio.wait_for(link.closed(), NAMED_S)


@needs_wire
async def test_an_r_node_killed_under_load_is_named(far_node, wire):
    said = hello()
    link = await connect(far_node.url, said, SECRET)
    driver = Driver(link, said)

    def steps() -> None:
        while True:
            driver.step(0, [(0, 1, True)])

    loaded = asyncio.create_task(asyncio.to_thread(steps))
    await asyncio.sleep(0.5)
    far_node.end(signal.SIGKILL)
    with pytest.raises(LinkDown, match=r"closed the connection|retry exceeded|connection broke|remote access error"):
        await asyncio.wait_for(loaded, NAMED_S)
    await asyncio.wait_for(link.closed(), NAMED_S)
    assert pinned_kib("self") == 0
