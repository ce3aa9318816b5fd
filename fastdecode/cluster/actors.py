"""The actors of a cluster, which Ray starts again where they are lost: the directory, and a host for each node."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray

from fastdecode.cluster.config import ClusterConfig, ClusterError
from fastdecode.cluster.directory import Directory, Entry, View
from fastdecode.cluster.hosts import HOSTS, Host
from fastdecode.cluster.reach import address_in

DIRECTORY = "directory"
_CALL_SECONDS = 5.0
#: Of what a command shows of a log.
_LOG_LINES = 200
_LOG_BYTES = 1 << 16


class DirectoryActor(Directory):
    """The directory as an actor. It also has the configuration, for commands that come later."""

    def __init__(self, config: ClusterConfig):
        super().__init__()
        _check_auth(config)
        self._config = config

    def config(self) -> ClusterConfig:
        return self._config


class HostActor:
    """A host as an actor."""

    def __init__(self, role: str, name: str, config: ClusterConfig):
        self._log_file = _log_file(config.name, name)
        form = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
        logging.basicConfig(level="INFO", format=form, filename=self._log_file)
        self._directory: Any = None
        _check_auth(config)
        context = ray.get_runtime_context()
        network = config.node_network
        machine = address_in(network) if network is not None else ray.util.get_node_ip_address()
        self._host: Host = HOSTS[role](name, config, self._report, machine, context.get_node_id(), self._log_file)
        self._host.start()

    def _report(self, entry: Entry) -> View:
        if self._directory is None:
            self._directory = ray.get_actor(DIRECTORY)
        try:
            view: View = answer(self._directory.report.remote(entry))
            return view
        except Exception:
            self._directory = None
            raise

    def entry(self) -> Entry:
        return self._host.entry

    def log_end(self) -> str:
        """The last lines of the host and its process."""
        if self._log_file is None:
            return ""
        with self._log_file.open("rb") as file:
            file.seek(max(0, self._log_file.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def drain(self, seconds: float | None = None) -> int | None:
        return self._host.drain(seconds)


def answer(call: Any, seconds: float = _CALL_SECONDS) -> Any:
    """Wait for an actor's answer. Raises ClusterError."""
    try:
        return ray.get(call, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise ClusterError(f"an actor of the cluster did not answer within {seconds:.0f} s") from None
    except ray.exceptions.RayActorError as error:
        # Ray gives an error of an actor's constructor as text, whose last line has the error's message.
        _, found, reason = str(error).strip().splitlines()[-1].partition(f"{ClusterError.__name__}: ")
        raise ClusterError(reason if found else "an actor of the cluster is lost") from None


def log_name(cluster: str, node: str) -> str:
    return f"fastdecode-{cluster}-{node}.log"


def _log_file(cluster: str, node: str) -> Path | None:
    """The log of a node, beside those of Ray's workers such as this process; None if this process has none."""
    own = Path("/proc/self/fd/2").resolve()
    return own.with_name(log_name(cluster, node)) if own.is_file() else None


def _check_auth(config: ClusterConfig) -> None:
    """Raises ClusterError if Ray on this machine would answer those who have no token, and cluster.yaml forbids it."""
    if config.ray_auth == "token" and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        machine = ray.util.get_node_ip_address()
        raise ClusterError(
            f"Ray on the machine {machine} asks for no token: start Ray with RAY_AUTH_MODE=token on every machine, or "
            "write ray-auth: disabled into cluster.yaml"
        )
