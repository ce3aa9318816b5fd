"""The WireGuard tunnel of docs/security.md, followed to the letter between three network namespaces on one wire."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sources.folders import ROOT
from wire.cut_wire import enter

pytestmark = pytest.mark.tools

PAGE = (ROOT / "docs/security.md").read_text().partition("## WireGuard")[2].partition("\n## ")[0]
TOOLS = ("ip", "nft", "nsenter", "unshare", "wg", "wg-quick")
START_S = 90.0
ROLES = {"S-node": ("192.0.2.10", "10.80.0.1"), "first R-node": ("192.0.2.11", "10.80.0.2")}
ROLES |= {"second R-node": ("192.0.2.12", "10.80.0.3")}
COMPLETE = """
import json, urllib.request
body = json.dumps({"prompt": ["The river", "A story"], "max_tokens": 40, "temperature": 0}).encode()
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).read().decode())
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7300), 3); print('reached')"


class Machine:
    """A network namespace, and a mount namespace whose /run is empty."""

    def __init__(self, ended: ExitStack):
        self._holder = subprocess.Popen(["unshare", "-n", "-m", "sh", "-c", "echo; exec sleep 600"], stdout=-1)
        ended.callback(self._end)
        assert self._holder.stdout and self._holder.stdout.readline()
        self.pid = self._holder.pid
        self.run("mount -t tmpfs tmpfs /run")

    def _end(self) -> None:
        subprocess.run(self.inside("ip", "link", "delete", "wg0"), capture_output=True)  # ends a userspace WireGuard
        assert self._holder.stdout
        self._holder.stdout.close()
        self._holder.kill()
        self._holder.wait()

    def inside(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", *argv]

    def run(self, command: str) -> str:
        done = subprocess.run(self.inside(*shlex.split(command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def sniffer(self) -> socket.socket:
        """A socket that receives all packets of this namespace."""
        home, there = (os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in ("self", self.pid))
        enter(there)
        try:
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        finally:
            enter(home)
            os.close(there)
            os.close(home)
        sniffer.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
        sniffer.setblocking(False)
        return sniffer


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    """The three machines, and the hub that joins them."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"{', '.join(missing)} not installed")
    if subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    with ExitStack() as ended:
        hub = Machine(ended)
        machines = {"hub": hub}
        hub.run("ip link add name hub type bridge")
        hub.run("ip link set hub up")
        for number, (role, (address, _)) in enumerate(ROLES.items()):
            machine = machines[role] = Machine(ended)
            hub.run(f"ip link add name port{number} type veth peer name eth0 netns {machine.pid}")
            hub.run(f"ip link set port{number} master hub up")
            for command in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
                machine.run(f"ip {command}")
        yield machines


def configurations() -> dict[str, str]:
    """wg0.conf of each machine, from the page."""
    private = {role: subprocess.check_output(["wg", "genkey"], text=True).strip() for role in ROLES}
    public = {
        role: subprocess.check_output(["wg", "pubkey"], input=key, text=True).strip() for role, key in private.items()
    }
    s_node, first = re.findall(r'```ini title="/etc/wireguard/wg0.conf"\n(.*?)```', PAGE, re.S)
    second = first.replace("first R-node", "second R-node").replace("10.80.0.2/24", "10.80.0.3/24")
    found = dict(zip(ROLES, (s_node, first, second), strict=True))
    for kind, keys in (("private", private), ("public", public)):
        for role, key in keys.items():
            found = {r: text.replace(f"<{kind} key of the {role}>", key) for r, text in found.items()}
    assert not any("<" in text for text in found.values())
    return found


def node_commands(secret: Path) -> Iterator[list[str]]:
    """The arguments of fastdecode-node on the first R-node and on the S-node, with less memory and the demo model."""
    for line in PAGE.replace("\\\n", " ").splitlines():
        if line.startswith("fastdecode-node"):
            line = line.replace("64GiB", "64MiB").replace("--secret-file secret", f"--secret-file {secret}")
            yield shlex.split(re.sub(r"--model \S+", "", line))[1:]


def wait_for(log: Path, text: str, node: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_S
    while text not in log.read_text():
        assert time.monotonic() < deadline and node.poll() is None, log.read_text()
        time.sleep(0.1)


def test_the_tunnel_of_the_page(machines, tmp_path):
    hub = machines.pop("hub")
    for role, text in configurations().items():
        file = tmp_path / role / "wg0.conf"
        file.parent.mkdir()
        file.touch(0o600)
        file.write_text(text)
        up = subprocess.run(machines[role].inside("wg-quick", "up", str(file)), capture_output=True, text=True)
        if "Unknown device type" in up.stderr and up.returncode:
            pytest.skip("this kernel has no WireGuard; WG_QUICK_USERSPACE_IMPLEMENTATION may name a program")
        assert up.returncode == 0, up.stderr
    sniffer = hub.sniffer()

    secret = tmp_path / "secret"
    secret.write_text("a secret of the three nodes")
    r_arguments, s_arguments = node_commands(secret)
    starts = {
        "first R-node": (r_arguments, "R-node on tcp://10.80.0.2:7300"),
        "second R-node": ([a.replace("10.80.0.2", "10.80.0.3") for a in r_arguments], "R-node on tcp://10.80.0.3:7300"),
        "S-node": (s_arguments, "http://127.0.0.1:8000/v1"),
    }
    with ExitStack() as ended:
        for role, (arguments, started) in starts.items():
            log = tmp_path / f"{role}.log"
            with log.open("wb") as out:
                command = machines[role].inside(sys.executable, "-m", "fastdecode.daemon.node", *arguments)
                node = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            ended.callback(node.wait, 60)
            ended.callback(node.terminate)
            wait_for(log, started, node)
        answer = json.loads(subprocess.check_output(machines["S-node"].inside(sys.executable, "-c", COMPLETE)))
        assert answer["usage"]["completion_tokens"] == 80

        packets = captured(sniffer)
        assert len(packets) > 100
        for packet in packets:  # IPv4 (RFC 791): the protocol is byte 9; UDP (RFC 768): the ports come first
            header = 4 * (packet[0] & 15)
            assert packet[9] == socket.IPPROTO_UDP
            assert b"\xca\x6c" in (packet[header : header + 2], packet[header + 2 : header + 4])  # port 51820
        handshakes = machines["S-node"].run("wg show wg0 latest-handshakes").splitlines()
        assert len(handshakes) == 2 and all(int(line.split()[1]) for line in handshakes)  # none: 0

        # A neighbour that sends packets for the tunnel's address over the wire.
        neighbour = machines["second R-node"]
        neighbour.run("ip route add 10.80.0.2/32 via 192.0.2.11")
        call = neighbour.inside(sys.executable, "-c", CALL, "10.80.0.2")
        assert subprocess.run(call, capture_output=True, text=True).stdout == "reached\n"
        for line in PAGE.splitlines():
            if line.startswith("nft "):
                machines["first R-node"].run(line)
        assert "timed out" in subprocess.run(call, capture_output=True, text=True).stderr
        subprocess.check_output(machines["S-node"].inside(sys.executable, "-c", COMPLETE))


def captured(sniffer: socket.socket) -> list[bytes]:
    """The IPv4 packets so far from one machine to another, not to a group."""
    packets = []
    while True:
        try:
            packet, (_, protocol, *_) = sniffer.recvfrom(2048)
        except BlockingIOError:
            sniffer.close()
            return packets
        if protocol == 0x0800 and packet[16] < 224:
            packets.append(packet)
