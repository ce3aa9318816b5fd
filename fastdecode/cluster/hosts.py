"""Hosts: each supervises the process of one node of a cluster, on the node's machine, and reports its state.

A host reports to the directory twice a second, and learns from the answer which other nodes there are. It writes their
URLs to the files that its process watches (--r-nodes-file, --prefill-file, --s-nodes-file).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from fastdecode.cluster.config import ClusterConfig, ClusterError, SNodesConfig
from fastdecode.cluster.directory import Entry, View
from fastdecode.cluster.reach import Reach, boot_id, has_rdma
from fastdecode.cluster.supervised import Supervised
from fastdecode.daemon.discovery import bracketed
from fastdecode.daemon.machine import numa_nodes
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.tls import client_tls, server_tls

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_HEALTH_TIMEOUT = 2.0
#: What a host reports of the /health of its S-node.
_HEALTH = ("status", "running", "waiting", "kv_cache_usage", "nodes")
_LISTEN = "0A"  # the state TCP_LISTEN in /proc/net/tcp
#: Beyond the time for draining, before a process is killed.
_END_SECONDS = 10.0
#: Sends a report to the directory, and returns what the directory knows.
Report = Callable[[Entry], View]


class Host(ABC):
    """One node of a cluster on its machine. `name` ends with its number, machine is the address that others use."""

    role: str
    drain_seconds: float

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        report: Report,
        machine: str,
        ray_node: str = "",
        log_file: Path | None = None,
    ):
        """Starts nothing yet. `report` sends an entry to the directory, and may raise any Exception if it cannot.
        `log_file` gets the output of the process.

        Raises ClusterError if the machine lacks a file of the configuration's `tls` that the role needs."""
        self._tls = None if self.role == "r" else _asking_tls(config, machine)
        self.name, self.config, self.machine = name, config, machine
        self._report, self._ray_node = report, ray_node
        self._folder = tempfile.TemporaryDirectory(prefix=f"fastdecode-{config.name}-{name}-")
        self.folder = Path(self._folder.name)
        self._lifeline = _remove_at_death(self.folder)
        self._take_ports()
        self._secret_file = config.secret_file or self._keep(config.made_secret)
        self._process = Supervised(f"{config.name}/{name}", self._next_command, log_file)
        self._leaving = threading.Event()
        self._ended = threading.Event()
        self._was_ready = False
        self._ticker = threading.Thread(target=self._tick, name=f"report {name}", daemon=True)

    def _keep(self, secret: str) -> str:
        """Write the cluster's own secret to a file that only this user can read. Returns its path."""
        path = self.folder / "secret"
        path.touch(mode=0o600)
        path.write_text(secret)
        return str(path)

    def start(self) -> None:
        if os.nice(0) > 0 and os.geteuid() != 0:
            log.warning("nodes run at niceness %d; start Ray with RAY_worker_niceness=0 in its environment", os.nice(0))
        self._ticker.start()

    def _next_command(self) -> Sequence[str]:
        if self._process.starts and not self._was_ready:
            self._take_ports()  # somebody may have taken the port before the process could
        return self._command()

    def _take_ports(self) -> None:
        self.port = free_port(self.machine)

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """The module and arguments of the process."""

    @abstractmethod
    def _ready(self) -> bool:
        """Whether the process serves."""

    @abstractmethod
    def _entry(self, entry: Entry) -> Entry:
        """The report, completed with what this role adds."""

    def _learn(self, view: View) -> bool:
        """Take what the directory knows. True once the process may start."""
        return True

    @property
    def entry(self) -> Entry:
        """The report of this moment."""
        ready = self._process.running and self._ready()
        self._was_ready |= ready
        leaving = self._leaving.is_set()
        state = "leaving" if leaving else "running" if ready else "restarting" if self._was_ready else "starting"
        return self._entry(
            Entry(
                name=self.name,
                role=self.role,
                state=state,
                machine=self.machine,
                ray_node=self._ray_node,
                starts=self._process.starts,
                pid=self._process.pid,
                # A node whose process is started again stays listed: others connect to it again by themselves.
                listed=self._was_ready and not leaving,
            )
        )

    def _tick(self) -> None:
        started, told = False, False
        while not self._ended.is_set():
            try:
                may_start = self._learn(self._report(self.entry))
                told = False
            except Exception as error:  # the directory is being started again, the network is gone, or a disk is full
                if not told:
                    log.warning("%s cannot report to the directory or write down its answer: %s", self.name, error)
                told = True
            else:
                if may_start and not started and not self._leaving.is_set():
                    self._process.start()
                    started = True
            self._ended.wait(_TICK_SECONDS)

    def drain(self, seconds: float | None = None) -> int | None:
        """Leave the cluster: tell the others, let the work move or end for `seconds` (None: as configured), and end the
        process. Returns its exit status."""
        self._leaving.set()
        seconds = self.drain_seconds if seconds is None else seconds
        status = self._process.stop(seconds + _END_SECONDS)
        self._ended.set()
        self._folder.cleanup()
        self._lifeline.close()
        return status


class RNodeHost(Host):
    """An R-node."""

    role = "r"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.drain_seconds = self.config.r_nodes.drain_seconds
        self._numa = _claim_numa_node() if self.config.r_nodes.numa else None

    def _take_ports(self) -> None:
        super()._take_ports()
        host = bracketed(self.machine)
        rdma = has_rdma() and self.config.transport == "auto"
        self._reach = Reach(
            tcp=f"tcp://{host}:{self.port}",
            rdma=f"rdma://{host}:{free_port(self.machine)}" if rdma else None,
            socket=str(self.folder / "r.sock"),
            boot=boot_id(),
            user=os.getuid(),
        )

    def _command(self) -> Sequence[str]:
        r = self.config.r_nodes
        listen = [word for url in self._reach.urls for word in ("--listen", url)]
        numa = [] if self._numa is None else ["--numa-node", str(self._numa)]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._reach.socket)
        return ["fastdecode.daemon.node", "--role", "r", *listen, *numa, "--secret-file", self._secret_file,
                "--threads", str(r.cpus), "--kv-memory", str(r.kv_bytes), "--drain-seconds", str(r.drain_seconds),
                *self.config.r_options()]  # fmt: skip

    def _ready(self) -> bool:
        # The socket is made last but one; the process has bound all of them or has ended.
        return listens(self.machine, self.port)

    def _entry(self, entry: Entry) -> Entry:
        return replace(entry, reach=self._reach)


class SNodeHost(Host):
    """An S-node."""

    role = "s"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.drain_seconds = self._share.drain_seconds
        self._r_nodes = NodeFile(self.folder / "r-nodes")
        self._prefill_nodes = NodeFile(self.folder / "prefill-nodes", may_be_empty=True)
        self._load: dict[str, Any] = {}

    @property
    def _share(self) -> SNodesConfig:
        return self.config.s_nodes

    @property
    def _url(self) -> str:
        return f"{self.config.http}://{bracketed(self.machine)}:{self.port}"

    def _command(self) -> Sequence[str]:
        s = self._share
        threads = [] if s.gpus else ["--s-threads", str(s.cpus)]
        return ["fastdecode.daemon.node", "--role", "s", "--host", self.machine, "--port", str(self.port),
                "--r-nodes-file", str(self._r_nodes.path), "--connect-seconds", str(self.config.start_seconds),
                *threads, "--secret-file", self._secret_file, "--router-only", "--drain-seconds", str(s.drain_seconds),
                *self.config.tls_options(), *self._own_options()]  # fmt: skip

    def _own_options(self) -> list[str]:
        return ["--prefill-file", str(self._prefill_nodes.path), *self.config.s_options()]

    def _learn(self, view: View) -> bool:
        self._prefill_nodes.write(
            [e.prefill_url for e in view.entries if e.role == "p" and e.listed], settled=view.settled
        )
        rdma = has_rdma()
        urls = [
            entry.reach.url(self.config.transport, rdma=rdma)
            for entry in view.entries
            if entry.role == "r" and entry.listed and entry.reach is not None
        ]
        return self._r_nodes.write(urls, settled=view.settled)

    def _ready(self) -> bool:
        try:
            asking = urllib.request.urlopen(f"{self._url}/health", timeout=_HEALTH_TIMEOUT, context=self._tls)
            with asking as answer:
                health = json.load(answer)
            self._load = {name: health[name] for name in _HEALTH}
        except urllib.error.HTTPError as error:
            with contextlib.suppress(ValueError, AttributeError):  # of another server at this port
                self._load = {"status": json.load(error).get("status", "")}
            return False
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                self._load = {"status": f"its certificate is refused: {error.reason.verify_message}"}
            return False
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return False
        return True

    def _entry(self, entry: Entry) -> Entry:
        return replace(entry, url=self._url, load=self._load)


class PrefillHost(SNodeHost):
    """A prefill S-node: it computes long prompts for the S-nodes that decode, and the router does not know it."""

    role = "p"

    def _take_ports(self) -> None:
        super()._take_ports()
        self._prefill_port = free_port(self.machine)

    @property
    def _share(self) -> SNodesConfig:
        return self.config.prefill_nodes

    @property
    def _prefill_url(self) -> str:
        return f"tcp://{bracketed(self.machine)}:{self._prefill_port}"

    def _own_options(self) -> list[str]:
        return ["--prefill-listen", self._prefill_url, *self.config.prefill_options()]

    def _entry(self, entry: Entry) -> Entry:
        return replace(super()._entry(entry), prefill_url=self._prefill_url)


class RouterHost(Host):
    """The front door, or one of several."""

    role = "router"
    _tries = 0  # to take a port

    def __init__(self, name: str, config: ClusterConfig, report: Report, machine: str, *rest: Any):
        file = config.router.file
        if file is not None and not os.access(Path(file).parent, os.W_OK | os.X_OK):
            raise ClusterError(f"router: file: this user cannot write to {Path(file).parent} on the machine {machine}")
        super().__init__(name, config, report, machine, *rest)
        self.drain_seconds = self.config.s_nodes.drain_seconds
        self._s_nodes = NodeFile(self.folder / "s-nodes")
        self._routers = None if file is None else NodeFile(Path(file), plain=True)

    def _take_ports(self) -> None:
        door = self.config.router
        self.port = door.port + self._tries % door.count if door.port else free_port(self.machine)
        self._tries += 1

    def _command(self) -> Sequence[str]:
        door = self.config.router
        ca = ["--s-node-ca", self.config.tls.ca] if self.config.tls.ca else []
        return ["fastdecode.router.main", "--host", door.host, "--port", str(self.port),
                "--secret-file", self._secret_file, "--s-nodes-file", str(self._s_nodes.path),
                "--drain-seconds", str(self.drain_seconds), *ca, *self.config.tls_options()]  # fmt: skip

    def _learn(self, view: View) -> bool:
        urls = [entry.url for entry in view.entries if entry.role == "s" and entry.listed]
        knows_s_node = self._s_nodes.write(urls, settled=view.settled)
        if self._routers is not None:  # last, because its folder may be one that cannot be written now
            routers = [entry.url for entry in view.entries if entry.role == "router" and entry.listed]
            self._routers.write(routers, settled=view.settled)
        return knows_s_node

    def _ready(self) -> bool:
        pid = self._process.pid  # another router of this machine may have the port
        return pid is not None and self.port in listening_ports(pid)

    @property
    def _address(self) -> str:
        return self.machine if self.config.router.host in ("0.0.0.0", "::") else self.config.router.host

    def _entry(self, entry: Entry) -> Entry:
        return replace(entry, url=f"{self.config.http}://{bracketed(self._address)}:{self.port}/v1")


HOSTS: dict[str, Callable[..., Host]] = {"r": RNodeHost, "s": SNodeHost, "p": PrefillHost, "router": RouterHost}


class NodeFile:
    """A file of URLs that a process watches. Unless it `may_be_empty`, it is never left empty, because an empty list
    would be refused. A `plain` file has a URL a line, another one is YAML."""

    def __init__(self, path: Path, *, may_be_empty: bool = False, plain: bool = False):
        self.path, self._may_be_empty, self._plain = path, may_be_empty, plain
        self._urls: dict[str, None] = {}
        if may_be_empty:
            path.touch()

    def write(self, urls: Sequence[str], *, settled: bool) -> bool:
        """Write the URLs if they have changed; if not `settled`, add to what the file has. True: it has a URL. Raises
        OSError."""
        wanted = dict.fromkeys(urls) if settled else self._urls | dict.fromkeys(urls)
        if (wanted or self._may_be_empty) and wanted.keys() != self._urls.keys():
            temporary = self.path.with_suffix(f".{uuid4().hex}.new")  # hosts of other machines may write the list, too
            try:
                temporary.write_text("".join(f"{url}\n" if self._plain else f"- {json.dumps(url)}\n" for url in wanted))
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
            self._urls = wanted
        return bool(self._urls)


def _asking_tls(config: ClusterConfig, machine: str) -> ssl.SSLContext:
    """The context with which a host asks its S-node. Raises ClusterError if one of the files of `tls` will not do."""
    certfile, keyfile, ca = (Path(f) if f else None for f in (config.tls.certfile, config.tls.keyfile, config.tls.ca))
    try:
        server_tls(certfile, keyfile)
        return client_tls(ca)
    except ConfigError as error:
        raise ClusterError(f"tls: on the machine {machine}, {error}") from None


def _remove_at_death(folder: Path) -> IO[bytes]:
    """Start a shell that removes a folder once this process has ended, however it ends, or has closed the returned end
    of a pipe. The shell is a grandchild, because Ray kills the children of an actor that it kills."""
    script = 'exec 3<&0 >/dev/null 2>&1; { cat <&3; rm -rf -- "$0"; } &'
    with subprocess.Popen(["sh", "-c", script, folder], stdin=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdin is not None, "it is a pipe"
        lifeline, shell.stdin = shell.stdin, None
    return lifeline


def free_port(address: str) -> int:
    """A free TCP port."""
    with socket.create_server((address, 0), family=_family(address)) as server:
        return int(server.getsockname()[1])


def listens(address: str, port: int) -> bool:
    """Whether a process listens at a TCP port."""
    try:
        with socket.create_connection((address, port), timeout=_HEALTH_TIMEOUT):
            return True
    except OSError:
        return False


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process of this user listens."""
    sockets = set()
    with contextlib.suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file))
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    lines = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return {
        int(local.rpartition(":")[2], 16)
        for _, local, _, state, *rest in lines
        if state == _LISTEN and f"socket:[{rest[5]}]" in sockets
    }


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


_claimed: list[int] = []  # descriptors of the locks that this process holds


def _claim_numa_node(folder: Path | None = None) -> int | None:
    """The NUMA node of this machine that fewest other R-nodes have claimed; None on a machine with one.

    A claim is a lock on a file, which the kernel ends with this process.
    """
    numbers = [node.number for node in numa_nodes() if node.cpus]
    if len(numbers) < 2:
        return None
    folder = folder or Path(tempfile.gettempdir(), f"fastdecode-numa-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    for number, path in _claims(folder, numbers):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        _claimed.append(lock)
        return number
    return None


def _claims(folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Path]]:
    for turn in range(64):
        for number in numbers:
            yield number, folder / f"{number}-{turn}"
