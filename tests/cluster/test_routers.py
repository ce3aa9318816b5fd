"""Several routers of a cluster: real processes, and a directory in this process in place of Ray's actors."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nodes.node_process import until
from nodes.ports import ports_in_a_row

from fastdecode.cluster.config import ClusterConfig, ClusterError, RouterConfig, SNodesConfig
from fastdecode.cluster.directory import Directory, Entry, View
from fastdecode.cluster.hosts import HOSTS, NodeFile
from fastdecode.daemon.discovery import parse_list


@pytest.fixture
def port():
    """The first of two in a row."""
    with ports_in_a_row(2) as first:
        yield first


@pytest.fixture
def routers(tmp_path, port):
    """Two routers of one machine, the directory, and the file with their URLs. No S-node answers."""
    door = RouterConfig(port=port, count=2, file=str(tmp_path / "routers"))
    config, directory = ClusterConfig(router=door, s_nodes=SNodesConfig(drain_seconds=0.0)), Directory()

    def report(entry):
        directory.report(Entry("s0", "s", "running", "127.0.0.1", "n", url="http://127.0.0.1:1", listed=True))
        return directory.report(entry)

    hosts = [HOSTS["router"](f"router{i}", config, report, "127.0.0.1") for i in range(2)]
    for host in hosts:
        host.start()
    yield hosts, door
    for host in hosts:
        host.drain(0.0)


@pytest.mark.quick
def test_a_list_of_routers_that_cannot_be_written_is_an_error(tmp_path):
    config = ClusterConfig(router=RouterConfig(file=str(tmp_path / "none" / "routers")))
    with pytest.raises(ClusterError, match=r"router: file: this user cannot write to .*none on the machine 127"):
        HOSTS["router"]("router0", config, lambda entry: None, "127.0.0.1")


def answers(url):
    try:
        urllib.request.urlopen(url.replace("/v1", "/health"), timeout=60).close()
    except urllib.error.HTTPError as error:
        return error.code == 503  # it knows no S-node that answers
    except OSError:
        return False
    return True


def test_routers_of_one_machine_have_ports_of_their_own_and_a_dead_one_is_started_again(routers):
    hosts, door = routers
    until(lambda: [host.entry.state for host in hosts] == ["running"] * 2, 60)
    assert {host.port for host in hosts} == {door.port, door.port + 1}
    urls = {host.entry.url for host in hosts}
    until(lambda: {*parse_list(Path(door.file).read_text(), ("http",))} == urls)
    first, second = hosts
    port, pid = first.port, first.entry.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: first.entry.state == "restarting")
    assert answers(second.entry.url)
    until(lambda: first.entry.state == "running" and first.entry.pid != pid, 60)
    assert first.port == port and answers(first.entry.url)


def test_a_list_that_cannot_be_written_for_a_while_is_written_later(routers):
    hosts, door = routers
    path = Path(door.file)
    path.mkdir()  # nothing can replace it
    until(lambda: [host.entry.state for host in hosts] == ["running"] * 2, 60)
    time.sleep(1.5)
    assert not [other for other in path.parent.iterdir() if other.suffix == ".new"]
    path.rmdir()
    until(lambda: path.exists() and {*parse_list(path.read_text(), ("http",))} == {host.entry.url for host in hosts})


@pytest.mark.quick
def test_a_router_learns_of_s_nodes_while_its_list_cannot_be_written(tmp_path):
    config = ClusterConfig(router=RouterConfig(file=str(tmp_path / "routers")))
    host = HOSTS["router"]("router0", config, lambda entry: None, "127.0.0.1")
    (tmp_path / "routers").mkdir()  # nothing can replace it
    entries = [
        Entry(name, role, "running", "127.0.0.1", "n", url=f"http://{name}:1", listed=True)
        for name, role in (("s0", "s"), ("router0", "router"))
    ]
    with pytest.raises(OSError):
        host._learn(View(tuple(entries), settled=True))
    assert parse_list((host.folder / "s-nodes").read_text(), ("http",)) == ("http://s0:1",)
    host.drain(0.0)


@pytest.mark.quick
def test_routers_write_their_list_at_the_same_time(tmp_path):
    files = [NodeFile(tmp_path / "routers", plain=True) for _ in range(4)]
    urls = [f"http://a:{port}/v1" for port in range(300)]

    def write(file):
        for i in range(len(urls)):
            file.write(urls[: i + 1], settled=True)

    with ThreadPoolExecutor(len(files)) as threads:
        list(threads.map(write, files))
    assert [*tmp_path.iterdir()] == [tmp_path / "routers"]
    assert (tmp_path / "routers").read_text().split() == urls
