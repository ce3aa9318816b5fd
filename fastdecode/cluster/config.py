"""cluster.yaml: one frozen dataclass whose fields are the keys of the file."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_sources import from_mapping
from fastdecode.daemon.option_values import parse_bytes

#: Options of a node that the cluster sets itself.
_OWN_OPTIONS = frozenset(
    ["role", "config", "check", "listen", "r-node", "r-nodes-file", "r-nodes-dns", "partition", "host", "port",
     "secret-file", "insecure", "kv-memory", "threads", "numa-node", "s-threads", "drain-seconds", "ssl-certfile",
     "ssl-keyfile", "router-only", "prefill-listen", "prefill-at", "prefill-file"]
)  # fmt: skip
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_PLACEMENTS = ("near", "spread")
_TRANSPORTS = ("auto", "tcp")
_RAY_AUTHS = ("token", "disabled")
_LOOPBACK = "127.0.0.0/8"
_T = TypeVar("_T")


class ClusterError(Exception):
    """An error that the user can mend; the message is a sentence."""


class RayLost(ClusterError):
    """Ray does not answer, so nothing is known of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RNodesConfig:
    """All R-nodes: how many, and the share of its machine that each has."""

    count: int = 1
    cpus: int = 1  # attention threads
    kv_memory: str = "1GiB"
    numa: bool = True  # bind each to a NUMA node of its own, on machines that have several
    drain_seconds: float = 300.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        return parse_bytes(self.kv_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SNodesConfig:
    """All S-nodes: how many, and the share of its machine that each has."""

    count: int = 1
    cpus: int = 1
    gpus: float = 0
    memory: str = "4GiB"
    drain_seconds: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return parse_bytes(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNodesConfig(SNodesConfig):
    """The S-nodes that compute long prompts for the others. They have the options of the others, changed by `options`,
    because they must serve the same model with the same KV-cache."""

    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The routers. They are spread over all machines, or over the machines that offer Ray the resource `router`. The
    first router listens on the machine where `up` was run, if that machine is one of them and as long as it lives.
    Several routers of one machine take the ports from `port` on; 0: any free ports. `file`: where each router's machine
    has a list of the URLs of all routers."""

    count: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files (PEM) on every machine: the certificate of the machine and its key, with which S-nodes and the router
    serve, and the certificates that may have signed those of S-nodes. None: no TLS; the key is in `certfile`; those
    that the machine trusts."""

    certfile: str | None = None
    keyfile: str | None = None
    ca: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster. `ray_address` is that of Ray's head, "auto": of the cluster that this machine belongs to.

    `ray_auth` is the value of RAY_AUTH_MODE that commands use and demand of every machine. `network` is the one in
    which each node listens, at its machine's address; None: at the address by which Ray knows the machine.
    `secret_file` is read on every machine; without one the nodes share `made_secret`, which reaches them through Ray.
    `placement`: near keeps nodes on few machines, where shared memory joins them; spread puts them on many.
    `transport`: auto takes shared memory on one machine, RDMA where both ends have it, else TCP.
    """

    name: str = "fastdecode"
    ray_address: str = "auto"
    ray_auth: str = "token"
    network: str | None = None
    secret_file: str | None = None
    placement: str = "near"
    transport: str = "auto"
    start_seconds: float = 300.0  # for nodes to come up
    r_nodes: RNodesConfig = RNodesConfig()
    s_nodes: SNodesConfig = SNodesConfig()
    prefill_nodes: PrefillNodesConfig = PrefillNodesConfig()
    router: RouterConfig = RouterConfig()
    tls: TlsConfig = TlsConfig()
    made_secret: str = field(default_factory=secrets.token_urlsafe, repr=False, metadata={"in_file": False})

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(f"name: {self.name!r} is not a word of lower-case letters, digits and '-'")
        for key, value, known in (
            ("placement", self.placement, _PLACEMENTS),
            ("transport", self.transport, _TRANSPORTS),
            ("ray-auth", self.ray_auth, _RAY_AUTHS),
        ):
            if value not in known:
                raise ClusterError(f"{key}: {value!r} is not one of {', '.join(known)}")
        for key, group in (("r-nodes", self.r_nodes), ("s-nodes", self.s_nodes)):
            if group.count < 1 or group.cpus < 1:
                raise ClusterError(f"{key}: count and cpus must be at least 1")
        if self.prefill_nodes.count < 0 or self.prefill_nodes.cpus < 1:
            raise ClusterError("prefill-nodes: count must be at least 0, and cpus at least 1")
        for key, text in (
            ("r-nodes: kv-memory", self.r_nodes.kv_memory),
            ("s-nodes: memory", self.s_nodes.memory),
            ("prefill-nodes: memory", self.prefill_nodes.memory),
        ):
            try:
                parse_bytes(text)
            except ValueError as error:
                raise ClusterError(f"{key}: {error}") from None
        for key, seconds in (
            ("start-seconds", self.start_seconds),
            ("r-nodes: drain-seconds", self.r_nodes.drain_seconds),
            ("s-nodes: drain-seconds", self.s_nodes.drain_seconds),
            ("prefill-nodes: drain-seconds", self.prefill_nodes.drain_seconds),
        ):
            if not 0 <= seconds < math.inf:
                raise ClusterError(f"{key}: {seconds} is not a time in seconds")
        if not all(0 <= group.gpus < math.inf for group in (self.s_nodes, self.prefill_nodes)):
            raise ClusterError("gpus must be a number that is not negative")
        if self.tls.certfile is None and self.tls != TlsConfig():
            raise ClusterError("tls: keyfile and ca are nothing without certfile")
        if self.router.count < 1:
            raise ClusterError("router: count must be at least 1")
        if not 0 <= self.router.port <= 65536 - self.router.count:
            raise ClusterError(f"router: {self.router.port} is not a TCP port with room for count")
        try:
            ipaddress.ip_network(self.network or _LOOPBACK)
        except ValueError:
            raise ClusterError(f"network: {self.network!r} is not a network such as 10.0.0.0/24") from None
        try:
            _ = self.ray_head
        except ValueError:
            raise ClusterError(f"ray-address: {self.ray_address!r} does not end with a TCP port") from None
        self.r_options()
        self.s_options()
        self.prefill_options()

    @property
    def http(self) -> str:
        """The scheme of the URLs of S-nodes and the router."""
        return "http" if self.tls.certfile is None else "https"

    def tls_options(self) -> list[str]:
        """The options of an S-node or a router that serves over TLS, as a command line."""
        files = {"--ssl-certfile": self.tls.certfile, "--ssl-keyfile": self.tls.keyfile}
        return [word for option, file in files.items() if file is not None for word in (option, file)]

    @property
    def ray_head(self) -> tuple[str, int] | None:
        """Host and port of `ray_address`; None if it names none. Raises ValueError for a port that is none."""
        parts = urlsplit(f"//{self.ray_address.rpartition('//')[2]}")
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None

    @property
    def node_network(self) -> str | None:
        """`network`; without one that of this machine alone, if that is where Ray's head is."""
        host = self.ray_head[0] if self.ray_head is not None else ""
        is_here = host == "localhost" or host.startswith("127.")
        return _LOOPBACK if self.network is None and is_here else self.network

    def r_options(self) -> list[str]:
        """The further options of an R-node, as a command line."""
        return _options("r-nodes", "r", self.r_nodes.options, ["--listen=tcp://127.0.0.1:0"])

    def s_options(self) -> list[str]:
        """The further options of an S-node, as a command line."""
        return _options("s-nodes", "s", self.s_nodes.options, [])

    def prefill_options(self) -> list[str]:
        """The further options of a prefill S-node, as a command line."""
        options = [
            {str(k).replace("_", "-"): v for k, v in o.options.items()} for o in (self.s_nodes, self.prefill_nodes)
        ]
        return _options("prefill-nodes", "s", options[0] | options[1], [])

    @classmethod
    def from_file(cls, path: Path) -> ClusterConfig:
        """Read a cluster.yaml. Raises ClusterError."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"{path}: {error.strerror}") from None
        except RecursionError:
            raise ClusterError(f"{path} is nested too deeply") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, a date that is none
            raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        try:
            return _made(cls, content or {}, "")
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None


_SECTIONS = {
    "r_nodes": RNodesConfig,
    "s_nodes": SNodesConfig,
    "prefill_nodes": PrefillNodesConfig,
    "router": RouterConfig,
    "tls": TlsConfig,
}


def _made(cls: type[_T], content: Any, where: str) -> _T:
    """A dataclass from a mapping of its fields, with - or _ in their names. Raises ClusterError."""
    if not isinstance(content, dict):
        raise ClusterError(f"{where or 'the file'} must be a mapping")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = {f.name: f for f in fields if f.metadata.get("in_file", True)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name, prefix = str(key).replace("-", "_"), f"{where}: " if where else ""
        if name not in known:
            raise ClusterError(f"{prefix}there is no key {key!r}; there are {', '.join(sorted(known))}")
        if name in _SECTIONS and cls is ClusterConfig:
            values[name] = _made(_SECTIONS[name], value, str(key))
            continue
        values[name] = _checked(value, str(known[name].type), f"{prefix}{key}")
    return cls(**values)


def _checked(value: Any, kind: str, key: str) -> Any:
    """`value` if it is of the kind that the dataclass wants. Raises ClusterError."""
    wanted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    base = kind.removesuffix(" | None")
    if kind.endswith("| None") and value is None:
        return value
    good = isinstance(value, wanted.get(base, (dict,)))
    if isinstance(value, bool) and base != "bool":
        good = False
    if not good:
        raise ClusterError(f"{key}: {value!r} is not of type {'mapping' if base not in wanted else base}")
    return value


def _options(key: str, role: str, options: Mapping[str, Any], needed: list[str]) -> list[str]:
    """Options of fastdecode-node as a command line. Raises ClusterError."""
    for name in options:
        if str(name).replace("_", "-") in _OWN_OPTIONS:
            raise ClusterError(f"{key}: options: {name} is set by the cluster itself")
    try:
        words = from_mapping(dataclasses.fields(NodeConfig), dict(options))
    except ValueError as error:
        raise ClusterError(f"{key}: options: {error}") from None
    try:
        NodeConfig.from_args(["--role", role, *needed, *words])
    except SystemExit:
        raise ClusterError(f"{key}: options: fastdecode-node refuses them, as it has said above") from None
    return words
