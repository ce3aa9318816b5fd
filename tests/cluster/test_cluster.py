"""The parts of fastdecode-cluster that need no Ray: cluster.yaml, the directory, addresses, supervision."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from nodes.node_process import gone, until

from fastdecode.cluster import cli, hosts
from fastdecode.cluster.cli import main
from fastdecode.cluster.config import ClusterConfig, ClusterError, PrefillNodesConfig, RayLost
from fastdecode.cluster.directory import Directory, Entry, View, table
from fastdecode.cluster.hosts import NodeFile
from fastdecode.cluster.reach import Reach, address_in, boot_id
from fastdecode.cluster.supervised import Supervised
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.discovery import FileSet, parse_list

FILE = """
name: chat
secret-file: /etc/fastdecode/secret
placement: spread
r-nodes: {count: 4, cpus: 8, kv-memory: 64GiB, options: {huge-pages: hugetlb}}
s-nodes: {count: 2, gpus: 1, memory: 32GiB, options: {max_queued: 9, speculate: "suffix:4"}}
prefill-nodes: {count: 1, gpus: 1, memory: 32GiB, options: {max-queued: 90}}
router: {host: 0.0.0.0, port: 9000}
"""


# ---- cluster.yaml ----


@pytest.mark.quick
def test_a_file_is_a_configuration(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    config = ClusterConfig.from_file(path)
    assert (config.name, config.r_nodes.count, config.r_nodes.kv_bytes) == ("chat", 4, 64 << 30)
    assert config.r_options() == ["--huge-pages", "hugetlb"]
    assert config.s_options() == ["--max-queued", "9", "--speculate", "suffix:4"]
    assert config.prefill_options() == ["--max-queued", "90", "--speculate", "suffix:4"]
    assert config.router.port == 9000 and config.transport == "auto"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("r-node: {}", "there is no key 'r-node'; there are .*r_nodes"),
        ("r-nodes: {counts: 1}", "r-nodes: there is no key 'counts'"),
        ("r-nodes: {count: many}", "r-nodes: count: 'many' is not of type int"),
        ("r-nodes: {count: 0}", "r-nodes: count and cpus must be at least 1"),
        ("r-nodes: {kv-memory: 3 elephants}", "r-nodes: kv-memory: '3 elephants' is not a size"),
        ("r-nodes: {options: {listen: 'tcp://a:1'}}", "options: listen is set by the cluster itself"),
        ("s-nodes: {options: {nonsense: 1}}", "s-nodes: options: there is no option 'nonsense'"),
        ("s-nodes: {options: {max-queued: -1}}", "s-nodes: options: fastdecode-node refuses them"),
        ("made-secret: 1234567890123456", "there is no key 'made-secret'"),
        ("prefill-nodes: {count: -1}", "prefill-nodes: count must be at least 0"),
        ("prefill-nodes: {options: {prefill-listen: 'tcp://a:1'}}", "options: prefill-listen is set by the cluster"),
        ("r-nodes: 4", "r-nodes must be a mapping"),
        ("name: Ünsinn", "is not a word of lower-case letters"),
        ("placement: far", "'far' is not one of near, spread"),
        ("ray-auth: none", "'none' is not one of token, disabled"),
        ("network: 10.0.0.1/24", "'10.0.0.1/24' is not a network such as"),
        ("s-nodes: {options: {router-only: true}}", "options: router-only is set by the cluster"),
        ("tls: {ca: /ca.pem}", "tls: keyfile and ca are nothing without certfile"),
        ("router: {port: 123456}", "123456 is not a TCP port"),
        ("router: {port: 65535, count: 2}", "65535 is not a TCP port with room for count"),
        ("router: {count: 0}", "router: count must be at least 1"),
        ("r-nodes: {drain-seconds: -5}", "r-nodes: drain-seconds: -5 is not a time in seconds"),
        ("start-seconds: .inf", "start-seconds: inf is not a time in seconds"),
        ("s-nodes: {gpus: -1}", "gpus must be a number that is not negative"),
        ("prefill-nodes: {gpus: .nan}", "gpus must be a number that is not negative"),
        ("ray-address: '10.0.0.1:65536'", "ray-address: '10.0.0.1:65536' does not end with a TCP port"),
        ("a: [", "is not YAML"),
        ("start-seconds: 2026-13-01", "is not YAML: month must be in 1..12"),
        pytest.param("[" * 5000, "is nested too deeply", id="deep"),
    ],
)
def test_a_bad_file_is_refused_with_a_reason(text, why, tmp_path, capsys):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=why):
        ClusterConfig.from_file(path)
    with pytest.raises(SystemExit, match=f"fastdecode-cluster up: error: .*{why}"):
        main(["up", str(path)])


@pytest.mark.quick
def test_without_ray_the_core_works_and_the_command_says_what_is_missing(tmp_path):
    """In a process of its own, where importing Ray fails."""
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x")
    script = f"""
import sys
sys.modules["ray"] = None
class NoRay:
    def find_spec(self, name, *rest):
        if name == "ray":
            raise ModuleNotFoundError(name="ray")
del sys.modules["ray"]
sys.meta_path.insert(0, NoRay())
from fastdecode.cluster.cli import main
main(["status", {str(path)!r}])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "pip install 'fastdecode[ray]'" in ended.stderr


class UpCluster:
    """A cluster of one router, for commands that need no Ray."""

    @classmethod
    @contextlib.contextmanager
    def connect(cls, config):
        yield cls()

    def status(self):
        return View((Entry("router0", "router", "running", "10.0.0.1", ""),), settled=True), ""

    def down(self):
        pass


@pytest.mark.quick
def test_a_user_without_a_home_directory_has_all_commands(tmp_path, monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(cli, "_rays", lambda config: UpCluster)
    path = tmp_path / "cluster.yaml"
    path.write_text("name: x")
    main(["status", str(path)])
    assert "router0" in capsys.readouterr().out
    main(["down", str(path)])
    with monkeypatch.context() as without_ray:
        without_ray.setattr(UpCluster, "status", Mock(side_effect=RayLost("Ray does not answer")))
        with pytest.raises(SystemExit, match="Ray does not answer"):
            main(["status", str(path)])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("address", "network", "wanted"),
    [
        ("auto", None, None),
        ("10.0.0.1:6379", None, None),
        ("127.0.0.1:6379", None, "127.0.0.0/8"),
        ("localhost:6379", None, "127.0.0.0/8"),
        ("ray://127.0.0.1:10001", None, "127.0.0.0/8"),
        ("127.0.0.1:6379", "10.0.0.0/24", "10.0.0.0/24"),
    ],
)
def test_nodes_listen_in_the_network_of_the_file(address, network, wanted):
    assert ClusterConfig(ray_address=address, network=network).node_network == wanted


@pytest.mark.quick
def test_a_machine_has_an_address_in_its_networks_only():
    assert address_in("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(ClusterError, match=r"has no address in 198\.51\.100\.0/24"):  # a network of examples, RFC 5737
        address_in("198.51.100.0/24")


class Other(BaseHTTPRequestHandler):
    """A server that is no S-node, at the port that an S-node was to have."""

    answer = b""

    def do_GET(self):
        self.wfile.write(self.answer)

    def log_message(self, *args):
        pass


@pytest.mark.quick
@pytest.mark.parametrize("begins", [b"HTTP/1.0 200 OK", b"HTTP/1.0 503 Service Unavailable", b"SSH-2.0-x"])
def test_another_server_at_the_port_of_an_s_node_is_not_taken_for_it(begins, monkeypatch):
    monkeypatch.setattr(Other, "answer", begins + b'\r\n\r\n["ready"]')
    host = hosts.SNodeHost("s0", ClusterConfig(), lambda entry: None, "127.0.0.1")
    with HTTPServer(("127.0.0.1", host.port), Other) as other:
        threading.Thread(target=other.handle_request).start()
        assert not host._ready()
    host.drain(0.0)


# ---- the directory, and what is made of it ----


@pytest.mark.quick
def test_a_directory_forgets_silent_nodes_and_settles():
    now = [100.0]
    directory = Directory(lambda: now[0])
    one, two = (Entry(f"r{i}", "r", "running", "10.0.0.1", "n", listed=True) for i in range(2))
    assert directory.report(one).entries == (one,)
    assert not directory.report(two).settled
    now[0] += 4
    assert directory.report(one).entries == (one, two)
    now[0] += 4
    view = directory.report(one)
    assert view.entries == (one,) and view.settled
    directory.forget("r0")
    assert directory.view().entries == ()


@pytest.mark.quick
def test_a_file_of_nodes_shrinks_only_when_the_directory_has_settled(tmp_path):
    file = NodeFile(tmp_path / "r-nodes")
    assert not file.write([], settled=True)
    assert file.write(["tcp://a:1", "shm:///x#tcp://b:2"], settled=False)
    assert parse_list(file.path.read_text()) == ("tcp://a:1", "shm:///x#tcp://b:2")
    assert file.write(["tcp://c:3"], settled=False)
    assert len(parse_list(file.path.read_text())) == 3
    assert file.write(["tcp://c:3"], settled=True)
    assert parse_list(file.path.read_text()) == ("tcp://c:3",)
    assert file.write([], settled=True)  # the last set stays: an S-node would refuse an empty one
    assert parse_list(file.path.read_text()) == ("tcp://c:3",)


@pytest.mark.quick
def test_an_s_node_watches_a_file_of_prefill_s_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "has_rdma", lambda: False)
    config = ClusterConfig(secret_file="/s", prefill_nodes=PrefillNodesConfig(count=1, options={"max-queued": 7}))
    prefill, decode = (hosts.HOSTS[role](f"{role}0", config, lambda entry: None, "127.0.0.1") for role in "ps")
    command = [*prefill._command()]
    at = command[command.index("--prefill-listen") + 1]
    assert command[-2:] == ["--max-queued", "7"] and "--prefill-file" not in command
    command = [*decode._command()]
    path = Path(command[command.index("--prefill-file") + 1])
    nodes = FileSet(path, ("tcp",), may_be_empty=True)
    assert asyncio.run(nodes.read()) == ()
    entry = replace(prefill.entry, state="running", listed=True)
    decode._learn(View((entry,), settled=True))
    assert parse_list(path.read_text(), ("tcp",)) == (at,)
    decode._learn(View((replace(entry, listed=False),), settled=True))
    assert path.read_text() == ""
    for host in (prefill, decode):
        host.drain(0)


@pytest.mark.quick
def test_without_a_secret_file_the_nodes_share_a_secret_that_only_their_user_can_read(monkeypatch):
    monkeypatch.setattr(hosts, "has_rdma", lambda: False)
    secrets = []
    for config in (ClusterConfig(), ClusterConfig(secret_file="/s")):
        nodes = [hosts.HOSTS[role](role, config, lambda entry: None, "127.0.0.1") for role in ("r", "s", "p", "router")]
        commands = [[*node._command()] for node in nodes]
        assert not any("--insecure" in command for command in commands)
        files = [command[command.index("--secret-file") + 1] for command in commands]
        if config.secret_file:
            assert set(files) == {"/s"}
        else:
            assert {Path(file).stat().st_mode & 0o777 for file in files} == {0o600}
            secrets = [NodeConfig(secret_file=Path(file)).read_secret() for file in files]
        for node in nodes:
            node.drain(0)
    assert len({*secrets}) == 1 and None not in secrets
    assert ClusterConfig().made_secret != ClusterConfig().made_secret


@pytest.mark.quick
def test_the_transport_is_what_joins_the_ends(tmp_path):
    path = str(tmp_path / "r.sock")
    reach = Reach("tcp://a:1", "rdma://a:2", path, boot_id(), os.getuid())
    assert reach.url("auto", rdma=True) == "rdma://a:2"  # no such socket here: another machine, or another container
    assert reach.url("auto", rdma=False) == reach.url("tcp", rdma=True) == "tcp://a:1"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert reach.url("auto", rdma=True) == f"shm://{path}#tcp://a:1"
        assert reach.url("tcp", rdma=False) == "tcp://a:1"
        assert Reach("tcp://a:1", None, path, "another boot", os.getuid()).url("auto", rdma=True) == "tcp://a:1"
        assert Reach("tcp://a:1", None, path, boot_id(), os.getuid() + 1).url("auto", rdma=True) == "tcp://a:1"


@pytest.mark.quick
def test_r_nodes_of_a_machine_claim_numa_nodes_in_turn(tmp_path, monkeypatch):
    class Node:
        def __init__(self, number):
            self.number, self.cpus = number, (number,)

    monkeypatch.setattr(hosts, "numa_nodes", lambda: [Node(0), Node(1)])
    assert [hosts._claim_numa_node(tmp_path) for _ in range(3)] == [0, 1, 0]
    os.close(hosts._claimed.pop(1))  # the R-node of node 1 has ended
    assert hosts._claim_numa_node(tmp_path) == 1
    while hosts._claimed:
        os.close(hosts._claimed.pop())
    monkeypatch.setattr(hosts, "numa_nodes", lambda: [Node(0)])
    assert hosts._claim_numa_node(tmp_path) is None


@pytest.mark.quick
def test_the_table_adds_up_what_s_nodes_say_of_an_r_node():
    reach = Reach("tcp://a:1", None, "/x", "", 0)
    lease = {"url": "shm:///x", "alive": True, "sequences": 3, "pages_used": 5, "pages_total": 10}
    load = {"running": 3, "waiting": 1, "kv_cache_usage": 0.5, "nodes": [lease]}
    directory = Directory()
    directory.report(Entry("r0", "r", "running", "a", "n", reach=reach, starts=2))
    for i in range(2):
        directory.report(Entry(f"s{i}", "s", "running", "b", "n", url="http://b:1", load=load))
    head, r0, s0, _ = table(directory.view()).splitlines()
    assert head.split()[:4] == ["node", "state", "machine", "starts"]
    assert r0.split() == ["r0", "running", "a", "2", "6", "50%", "2", "tcp://a:1"]
    assert s0.split() == ["s0", "running", "b", "0", "3+1", "50%", "1", "shm", "http://b:1"]


# ---- supervision ----


def test_a_host_that_is_killed_leaves_no_folder(tmp_path):
    script = """
from fastdecode.cluster import cli, hosts
from fastdecode.cluster.config import ClusterConfig
host = hosts.HOSTS["s"]("s0", ClusterConfig(), lambda entry: None, "127.0.0.1")
print(host.folder, flush=True)
input()
"""
    host = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    folder = Path(host.stdout.readline().strip())
    assert folder.parent == tmp_path and (folder / "secret").exists()
    host.kill()
    host.communicate()
    until(lambda: not folder.exists())


def test_a_process_is_started_again_and_ends_with_its_parent(tmp_path):
    (tmp_path / "worker.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    script = f"""
import os, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from fastdecode.cluster.supervised import Supervised
os.environ["PYTHONPATH"] = {str(tmp_path)!r}
child = Supervised("worker", lambda: ["worker"])
child.start()
while True:
    if child.running:
        print(child.starts, child.pid, flush=True)
    time.sleep(0.02)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        seen = {}
        while len(seen) < 3:
            line = parent.stdout.readline().split()
            if len(line) == 2 and line[0] not in seen:
                seen[line[0]] = int(line[1])
                if len(seen) < 3:
                    os.kill(seen[line[0]], signal.SIGKILL)
        assert [*seen] == ["1", "2", "3"]
    finally:
        parent.kill()
        parent.communicate()
    assert gone(seen["3"])


def test_a_process_that_is_stopped_stays_so(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        f"open({str(tmp_path / 'up')!r}, 'w')\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Supervised("worker", lambda: ["worker"])
    assert child.stop(1) is None
    child = Supervised("worker", lambda: ["worker"])
    child.start()
    until((tmp_path / "up").exists)
    assert child.stop(20) == 3 and not child.running and child.starts == 1


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Supervised("worker", Mock(side_effect=[OSError("the address is gone"), ["worker"]]))
    child.start()
    until(lambda: child.running)
    child.stop(20)


def test_a_process_that_starts_while_it_is_stopped_ends(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begun, stopped = threading.Event(), threading.Event()

    def command():
        begun.set()
        stopped.wait()
        return ["worker"]

    child = Supervised("worker", command)
    child.start()
    begun.wait()
    assert child.stop(20) is None
    stopped.set()
    until(lambda: child.starts and not child.running)
