"""Fixtures that several rooms share, and the path by which tests and their children import tests/helpers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nodes.node_process import Node
    from nodes.rnode_process import FarRNode, RNodeProcess

    from fastdecode.daemon.rnode import RNode

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

# One torch thread here and in every process a test starts: with more, OpenMP's spinning waiters and the R-engine's
# threads take the cores from each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A node that measures the splits of the cpus starts seconds later, and writes into the user's home.
os.environ.setdefault("FASTDECODE_TUNE", "off")
# Children import the installed package, not the source folder `fastdecode/` of their working directory.
os.environ["PYTHONSAFEPATH"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Begin a session, whose worker processes share its folder."""
    from session_folder import begin_session

    if not hasattr(config, "workerinput"):
        begin_session()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """A run of single files or tests has no workers: it begins sooner, and -s shows what the tests print."""
    return 0 if any(".py" in argument for argument in config.args) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that have the highest time limits, so that no worker is left alone with one at the end."""

    def limit(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark else 0

    items.sort(key=lambda item: -limit(item) if limit(item) > 300 else 0)


def transports() -> list[str]:
    """The URL schemes to test: all of LISTEN_URLS, but RDMA only where there is a device, for example in the virtual
    machine of tests/rdma. If FASTDECODE_R_NODE is the URL of an R-node on another host, only its scheme."""
    if far := os.environ.get("FASTDECODE_R_NODE"):
        return [far.partition(":")[0]]
    from nodes.rnode_process import LISTEN_URLS

    from fastdecode.transports.rdma_devices import list_ports

    has_rdma = any(port.active for port in list_ports())
    return [scheme for scheme in LISTEN_URLS if scheme != "rdma" or has_rdma]


@pytest.fixture(params=transports(), scope="module")
def shared_node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RNodeProcess | FarRNode]:
    """An R-node process for tests that do not change it; once over each transport."""
    from nodes.rnode_process import FarRNode, RNodeProcess

    if far := os.environ.get("FASTDECODE_R_NODE"):
        yield FarRNode(far)
        return
    node = RNodeProcess.over(request.param, tmp_path_factory.mktemp("node"))
    yield node
    assert node.end() == 0


@pytest.fixture(params=transports())
def transport(request: pytest.FixtureRequest) -> str:
    """The URL scheme of a transport; once for each."""
    scheme: str = request.param
    return scheme


@pytest.fixture
def node(transport: str, tmp_path: Path) -> Iterator[RNodeProcess]:
    """An R-node process for tests that kill it, stop it or use it up; once over each transport."""
    from nodes.rnode_process import RNodeProcess

    if "FASTDECODE_R_NODE" in os.environ:
        pytest.skip("the only R-node is on another host")
    node = RNodeProcess.over(transport, tmp_path)
    yield node
    if node.process.poll() is None:
        node.end()


@pytest.fixture
async def r_node(tmp_path: Path) -> AsyncIterator[RNode]:
    """An R-node within this process; its addresses are `shm` and `tcp`."""
    from nodes.rnode_process import KV_BYTES

    from fastdecode.daemon.rnode import RNode

    node = RNode(threads=1, kv_bytes=KV_BYTES, name="test", spin_us=20)
    node.shm, node.tcp = await node.serve([f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0"], None)
    yield node
    await node.close()


@pytest.fixture
async def bystander(r_node: RNode) -> AsyncIterator[None]:
    """Another S-node that decodes over TCP during the test, checked against float64."""
    from nodes.rnode_process import KV_BYTES
    from wire.link_driver import Driver, hello

    from fastdecode.transports.registry import connect

    asks = hello()
    link = await connect(r_node.tcp, asks, None)
    driver = Driver(link, asks)
    stop, steps = threading.Event(), [0]

    def decode() -> None:
        while not stop.is_set():
            driver.step(0, [(0, 1, True)])
            steps[0] += 1
            if driver.shadows[0].length == 60:
                future = asyncio.run_coroutine_threadsafe(driver.free_seq(0), loop)
                future.result(20.0)
            time.sleep(0.001)

    loop = asyncio.get_running_loop()
    work = asyncio.create_task(asyncio.to_thread(decode))
    yield
    before = steps[0]
    async with asyncio.timeout(60):
        while steps[0] < before + 10:
            assert not work.done() or work.result()
            await asyncio.sleep(0.01)
        stop.set()
        await work
    await link.close()
    assert r_node.kv_free == KV_BYTES  # no lease is left


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """A function that starts a Node with its arguments, as users do. All nodes are killed at the end of the test."""
    from nodes.node_process import Node

    with contextlib.ExitStack() as stack:

        def start(*argv: str, own_group: bool = False, program: str = "node") -> Node:
            node = Node(tmp_path, *argv, own_group=own_group, program=program)
            stack.callback(lambda: node.process.poll() is None and node.end(signal.SIGKILL))
            stack.callback(node.close_clients)
            return node

        yield start
