"""perftest's ib_write_lat and ib_write_bw as peers of an rdma:// link: two processes on the ports and GIDs of the
link."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from fastdecode.transports import rdma
from fastdecode.transports.rdma_devices import PortGid, choose, list_ports

TOOLS = ("ib_write_lat", "ib_write_bw")
_START_S, _RUN_S = 60, 600


def installed() -> bool:
    """True if both tools are on the PATH."""
    return all(map(shutil.which, TOOLS))


class Perftest:
    """perftest on the path that a link to `url` takes. Raises TransportError, RuntimeError, OSError."""

    def __init__(self, url: str):
        address = rdma.parse(url)
        self._host = address.host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, 9))
            here = probe.getsockname()[0]
        there = socket.gethostbyname(address.host)
        self._ends = [
            self._options(choose(list_ports(), local, address.device, address.number, address.gid))
            for local in (there, here)
        ]

    @staticmethod
    def _options(port_gid: PortGid) -> list[str]:
        gid = ["-x", str(port_gid.gid.index)] if port_gid.gid else []
        return ["-d", port_gid.port.device, "-i", str(port_gid.port.number), *gid, "-F"]

    def round_trips(self, out: int, back: int, n: int) -> list[int]:
        """Nanoseconds of each of `n` round trips of `out` bytes each way. The tool itself prints half of a round
        trip."""
        assert out == back
        printed = self._run("ib_write_lat", "-s", str(max(1, out)), "-n", str(n), "-H", "-U")
        halves = re.findall(r"^\s*\d+,\s*([\d.]+)\s*$", printed, re.MULTILINE)
        if not halves:
            raise RuntimeError(f"ib_write_lat printed no times:\n{printed}")
        return [round(float(x) * 2e3) for x in halves]

    def stream(self, n_bytes: int, n: int) -> float:
        """Nanoseconds for one write of `n_bytes`, averaged over `n` writes of which several are always in progress."""
        printed = self._run("ib_write_bw", "-s", str(n_bytes), "-n", str(n))
        found = re.findall(rf"^\s*{n_bytes}\s+\d+\s+[\d.]+\s+([\d.]+)", printed, re.MULTILINE)
        if not found:
            raise RuntimeError(f"ib_write_bw printed no bandwidth:\n{printed}")
        return n_bytes / (float(found[-1]) * (1 << 20)) * 1e9  # what the tool calls MB is MiB

    def _run(self, tool: str, *options: str) -> str:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        common = [*options, "-p", str(port)]
        server = subprocess.Popen(
            [tool, *self._ends[0], *common], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + _START_S
            while not _listening(port):  # a trial connection would count as the client's
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    raise RuntimeError(f"{tool} did not start: {server.communicate()[1].strip()[-300:]}")
                time.sleep(0.05)
            client = [tool, *self._ends[1], *common, self._host]
            done = subprocess.run(client, capture_output=True, text=True, timeout=_RUN_S)
            if done.returncode:
                raise RuntimeError(f"{tool} failed: {(done.stderr or done.stdout).strip()[-300:]}")
            return done.stdout
        finally:
            server.kill()
            server.communicate()


def _listening(port: int) -> bool:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port for line in lines)
