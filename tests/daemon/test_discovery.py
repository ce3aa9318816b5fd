"""R-nodes that join and leave: the sets that name them, and a running S-node that follows a file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from nodes import found_by_name
from nodes.node_process import complete, fetch, health, until

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.discovery import DiscoveryError, DnsSet, FileSet, parse_list, r_node_set


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("tcp://a:1\n\ntcp://b:2\n", ("tcp://a:1", "tcp://b:2")),
        ("# the rack\n- tcp://a:1  # first\n- 'rdma://b:2'\n", ("tcp://a:1", "rdma://b:2")),
        ("- shm:///tmp/r.sock\n", ("shm:///tmp/r.sock",)),
        ("tcp://[::1]:1\ntcp://a:1\ntcp://a:1\n", ("tcp://[::1]:1", "tcp://a:1")),
    ],
)
def test_a_file_has_a_url_a_line_or_item(text, urls):
    assert parse_list(text) == urls


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no node"),
        ("tcp://a:1\nb:2\n", "'b:2' is not a URL"),
        ("http://a:1", "does not begin with one of shm, tcp, rdma"),
        ("- [tcp://a:1]", "not a list of URLs"),
        ("r-node: {", "neither lines nor YAML"),
        ("r-node:\n  - tcp://a:1\n", "not a list of URLs"),
    ],
)
def test_a_bad_file_is_refused_with_a_reason(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_list(text)


@pytest.mark.quick
async def test_a_file_counts_once_it_has_settled_and_a_bad_one_never(tmp_path):
    path = tmp_path / "r-nodes"
    found = FileSet(path)
    with pytest.raises(DiscoveryError, match="No such file"):
        await found.read()
    path.write_text("tcp://a:1\n")
    assert await found.read() == ("tcp://a:1",)
    path.write_text("tcp://a:1\ntcp://b:27")  # cut short
    assert await found.read() == ("tcp://a:1",)
    path.write_text("tcp://a:1\ntcp://b:2700\n")
    assert await found.read() == ("tcp://a:1",)
    assert await found.read() == ("tcp://a:1", "tcp://b:2700")
    path.write_text("nonsense\n")
    assert await found.read() == ("tcp://a:1", "tcp://b:2700")
    for _ in range(2):
        with pytest.raises(DiscoveryError, match="nonsense"):
            await found.read()
    other = tmp_path / "other"
    other.write_text("tcp://c:3\n")
    os.replace(other, path)
    with pytest.raises(DiscoveryError):
        await found.read()
    assert await found.read() == ("tcp://c:3",)


def test_the_addresses_of_a_name_are_followed_by_a_set_and_by_the_client_of_a_router_that_was_killed(tmp_path):
    namespace = ["unshare", "--map-root-user", "--net", "--mount"]
    if not shutil.which("ip") or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("there is no ip command, or no namespace may be made here")
    words = [*namespace, sys.executable, found_by_name.__file__, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
async def test_the_resolver_is_asked_and_an_unknown_name_is_an_error():
    assert "tcp://127.0.0.1:7300" in await DnsSet("tcp://localhost:7300").read()
    with pytest.raises(DiscoveryError, match=r"nobody\.invalid"):
        await DnsSet("tcp://nobody.invalid:7300").read()


@pytest.mark.quick
def test_one_option_names_the_r_nodes(tmp_path):
    assert isinstance(r_node_set(NodeConfig(r_nodes_file=tmp_path / "f")), FileSet)
    assert isinstance(r_node_set(NodeConfig(r_nodes_dns="tcp://h:1")), DnsSet)
    with pytest.raises(ValueError, match="--r-node and --r-nodes-file each say"):
        NodeConfig(r_node=("tcp://a:1",), r_nodes_file=tmp_path / "f")
    with pytest.raises(ValueError, match="--threads is for the embedded R-node; with --r-nodes-dns"):
        NodeConfig(r_nodes_dns="tcp://h:1", threads=1)


def test_an_s_node_follows_its_file_under_load(start, tmp_path):
    """Two R-nodes join under load and get load; the first leaves and is emptied. Every answer stays what it was."""
    urls = [f"shm://{tmp_path}/r{i}.sock" for i in range(3)]
    r_nodes = [start("--role", "r", "--listen", url, "--kv-memory", "64MiB", "--threads", "1") for url in urls]
    for r_node in r_nodes:
        r_node.wait_for("R-node on shm")
    listed = tmp_path / "r-nodes"
    listed.write_text(f"{urls[0]}\n")
    s_node = start("--port", "0", "--r-nodes-file", str(listed), "--no-prefix-cache")
    api = s_node.api()
    expected, wrong, ended = complete(api, 40), [], threading.Event()

    def client():
        while not ended.is_set():
            if (text := complete(api, 40)) != expected:
                wrong.append(text)

    clients = [threading.Thread(target=client) for _ in range(6)]
    with contextlib.ExitStack() as stack:
        for thread in clients:
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        listed.write_text("".join(f"{url}\n" for url in urls))
        until(lambda: sum(node["sequences"] > 0 for node in health(api)["nodes"]) == 3)
        listed.write_text("not a list\n")
        s_node.wait_for("the set of R-nodes stays as it is: .*'not' is not a URL")
        replacement = tmp_path / "new"
        replacement.write_text(f"- {urls[1]}\n- {urls[2]}\n")
        os.replace(replacement, listed)
        s_node.wait_for(f"{re.escape(urls[0])} is no longer used")
        found = health(api)
        assert {node["url"] for node in found["nodes"]} == set(urls[1:]) and found["status"] == "ok"
        assert urls[0] not in fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
    assert not wrong
    r_nodes[0].wait_for("lease of .* ended after")
    assert "was lost" not in s_node.log.read_text()
    assert s_node.end() == 0
