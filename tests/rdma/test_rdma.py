"""RDMA without a device: the choice of a port, the errors without a device, and the poster over a memcpy device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address
from pathlib import Path

import guest
import pytest
from sources.folders import ROOT
from wire.link_driver import hello

from fastdecode.daemon import check
from fastdecode.daemon.config import NodeConfig
from fastdecode.transports import _native, rdma_endpoint
from fastdecode.transports.base import TransportError
from fastdecode.transports.rdma_devices import Gid, RdmaPort, choose, list_ports
from fastdecode.transports.registry import connect, serve

# ---- devices, as the kernel lists them ----


def add_port(root: Path, device: str, number: int, gids: dict[int, tuple[str, str, str]], **files: str) -> None:
    """Make a port as sysfs shows it. `gids`: index -> (address, type, interface)."""
    port = root / device / "ports" / str(number)
    for name, text in ({"state": "4: ACTIVE", "link_layer": "Ethernet", "lid": "0x0"} | files).items():
        port.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for index in range(30):  # an empty entry, whose attributes cannot be read
        (port / "gids" / str(index)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    for index, (address, kind, interface) in gids.items():
        (port / "gids" / str(index)).write_text(IPv6Address(address).exploded + "\n")
        (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text(interface + "\n")


V1, V2 = "IB/RoCE v1", "RoCE v2"


@pytest.fixture
def two_devices(tmp_path: Path) -> list[RdmaPort]:
    a = {0: ("fe80::1", V1, "ea"), 1: ("fe80::1", V2, "ea"), 2: ("::ffff:10.0.0.1", V1, "ea")}
    add_port(tmp_path, "a", 1, a | {3: ("::ffff:10.0.0.1", V2, "ea"), 10: ("2001:db8::1", V2, "ea")})
    add_port(tmp_path, "b", 1, {0: ("fe80::2", V2, "eb"), 1: ("::ffff:10.0.1.1", V2, "eb")})
    add_port(tmp_path, "b", 2, {0: ("::ffff:10.0.2.1", V2, "ec")}, state="1: DOWN")
    return list_ports(tmp_path)


@pytest.mark.quick
def test_ports_as_sysfs_shows_them(two_devices):
    assert [str(port) for port in two_devices] == ["a port 1", "b port 1", "b port 2"]
    assert [port.active for port in two_devices] == [True, True, False]
    assert two_devices[0].gids[-1] == Gid(10, IPv6Address("2001:db8::1"), V2, "ea")
    assert [gid.index for gid in two_devices[0].gids] == [0, 1, 2, 3, 10]
    assert list_ports(Path("/nowhere")) == []


@pytest.mark.quick
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
def test_the_gid_is_that_of_the_interface_that_routes_to_the_peer(two_devices, local, wanted, device, index):
    chosen = choose(two_devices, local, **wanted)
    assert (chosen.port.device, chosen.gid.index) == (device, index)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("local", "wanted", "error_text"),
    [
        ("127.0.0.1", {}, r"no RDMA port has the address 127\.0\.0\.1.* name one of a port 1, b port 1 as \?device"),
        ("10.0.0.1", {"device": "c"}, "no RDMA port c here, there are a port 1, b port 1"),
        ("10.0.0.1", {"device": "a", "number": 2}, "no RDMA port a port 2"),
        ("10.0.2.1", {"device": "b", "number": 2}, "b port 2 is not active"),
        ("10.0.0.1", {"device": "a", "gid": 7}, r"a port 1 has no GID 7, it has 0 \(fe80::1, IB/RoCE v1, ea\), 1"),
    ],
)
def test_without_a_clear_choice_the_error_lists_the_ports(two_devices, local, wanted, error_text):
    with pytest.raises(TransportError, match=error_text):
        choose(two_devices, local, **wanted)


def test_infiniband_is_addressed_by_its_lid(tmp_path):
    add_port(tmp_path, "ib", 1, {0: ("fe80::5", V1, "")}, link_layer="InfiniBand", lid="0x1f")
    chosen = choose(list_ports(tmp_path), "10.9.9.9")
    assert (chosen.port.lid, chosen.gid) == (31, None)


def test_an_interface_without_an_address_is_asked_for_one(tmp_path):
    add_port(tmp_path, "a", 1, {0: ("fe80::1", V2, "ea")})
    with pytest.raises(TransportError, match="give its interface an IP address"):
        choose(list_ports(tmp_path), "10.0.0.1")


@pytest.mark.quick
def test_no_device_is_reported(tmp_path):
    with pytest.raises(TransportError, match="no RDMA device"):
        choose(list_ports(tmp_path), "10.0.0.1")
    assert rdma_endpoint.report(tmp_path).startswith("no devices")
    assert "RDMA" in check.report(NodeConfig())


@pytest.mark.quick
def test_check_lists_every_port_and_gid(two_devices, tmp_path):
    verdict, *ports = rdma_endpoint.report(tmp_path).splitlines()
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


@pytest.mark.quick
async def test_without_pyverbs_the_url_says_what_to_install(no_pyverbs):
    with pytest.raises(TransportError, match=r"needs pyverbs.*python3-pyverbs.*fastdecode\[rdma\]"):
        await connect("rdma://127.0.0.1:1", hello(), None)
    with pytest.raises(TransportError, match=r"needs pyverbs.*python3-pyverbs.*fastdecode\[rdma\]"):
        await serve("rdma://127.0.0.1:0", None, None)


@pytest.mark.tools
def test_verbs_abi_h_agrees_with_the_system_header():
    compiler = shutil.which("cc")
    folders = [Path("/usr/include"), guest.cache() / "extra/usr/include"]
    headers = [folder for folder in folders if (folder / "infiniband/verbs.h").exists()]
    if not compiler or not headers:
        pytest.skip("no compiler, or no infiniband/verbs.h (Debian: libibverbs-dev)")
    source, flags = ROOT / "tests/c/verbs_abi.c", ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    for folder in headers:
        subprocess.run([compiler, *flags, f"-I{ROOT}", "-idirafter", folder, source], check=True)


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_poster_over_a_device_made_of_memcpy(tmp_path):
    """Run tests/c/poster_loopback.c under AddressSanitizer and UBSan."""
    program, flags = tmp_path / "poster_loopback", ["-std=gnu11", "-O1", "-fsanitize=address,undefined"]
    sources = [ROOT / "tests/c/poster_loopback.c", ROOT / "transports/rdma_poster.c"]
    include = [f"-I{ROOT}"]
    subprocess.run(
        ["gcc", *flags, "-fno-sanitize-recover=all", *include, *sources, "-pthread", "-o", program], check=True
    )
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "address",
    [0, 8, (1 << 47) - 4096, (1 << 64) - 8, id(object())],
    ids=["null", "low", "high", "highest", "an object's"],  # an address as id would differ from process to process
)
def test_addresses_of_no_queue_pair_are_refused_safely(address):
    with pytest.raises(ValueError, match="not a queue pair"):
        _native.verbs_fds(address, 17)
