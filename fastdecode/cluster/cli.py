"""`fastdecode-cluster`: S-nodes, R-nodes and a router on a Ray cluster, as cluster.yaml describes them."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode import __version__
from fastdecode.cluster.config import ClusterConfig, ClusterError, RayLost
from fastdecode.cluster.directory import table
from fastdecode.daemon.config_files import cache_file

if TYPE_CHECKING:
    from fastdecode.cluster.rays import RayCluster

_ROLES = {"r-nodes": "r", "s-nodes": "s", "prefill-nodes": "p", "routers": "router"}


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0, 2 for a bad command line, 1 for any other error."""
    args = _parser().parse_args(argv)
    try:
        config = ClusterConfig.from_file(args.file)
        rays = _rays(config)
        with rays.connect(config) as cluster:
            _run(args, config, cluster)
    except ClusterError as error:
        if args.command == "status" and isinstance(error, RayLost) and (last := _last_table(config.name)):
            print(last)
        sys.exit(f"fastdecode-cluster {args.command}: error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdecode-cluster", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("up", "start all nodes and routers, and wait until they serve"),
        ("status", "print a table of all nodes"),
        ("scale", "start or drain nodes until a role has N of them"),
        ("drain", "let a node, or all nodes of a machine, hand over their work, and end them"),
        ("logs", "print the last lines of a node's log"),
        ("down", "let requests end, and end all nodes"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        if name == "scale":
            command.add_argument("to", type=_count, metavar="r-nodes=N|s-nodes=N|prefill-nodes=N|routers=N")
        if name == "drain":
            command.add_argument("target", metavar="NODE", help="r0, s1, router1, or a machine's address or Ray id")
        if name == "logs":
            command.add_argument("target", metavar="NODE", help="r0, s1, or router0")
        command.add_argument("file", type=Path, nargs="?", default=Path("cluster.yaml"), metavar="cluster.yaml")
    return parser


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(rf"({'|'.join(_ROLES)})=([0-9]{{1,4}})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form r-nodes=8 or s-nodes=2")
    return _ROLES[match[1]], int(match[2])


def _rays(config: ClusterConfig) -> type[RayCluster]:
    """The class, of a Ray that has read its environment as it was imported."""
    os.environ["RAY_AUTH_MODE"] = config.ray_auth
    try:
        from fastdecode.cluster.rays import RayCluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ClusterError("Ray is not installed: pip install 'fastdecode[ray]'") from None
    return RayCluster


def _run(args: argparse.Namespace, config: ClusterConfig, cluster: RayCluster) -> None:
    view, why = None, ""
    match args.command:
        case "up":
            cluster.up(config)
        case "status":
            view, why = cluster.status()
        case "scale":
            cluster.scale(*args.to)
        case "drain":
            print(f"drained: {', '.join(cluster.drain(args.target))}")
            return
        case "logs":
            print(cluster.log_end(args.target))
            return
        case "down":
            cluster.down()
            with contextlib.suppress(OSError, RuntimeError):
                _table_file(config.name).unlink(missing_ok=True)
            return
    shown = table(view if view is not None else cluster.view())
    print("\n".join(filter(None, (why, shown))), flush=True)
    with contextlib.suppress(OSError, RuntimeError):  # without the file, a status without Ray has no table
        path = _table_file(config.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown)


def _table_file(cluster: str) -> Path:
    """The file with the last table that a command of this user has printed. Raises RuntimeError without a home
    directory."""
    return cache_file(f"cluster-{cluster}.txt")


def _last_table(cluster: str) -> str | None:
    """The last table with its age; None: there is none."""
    try:
        path = _table_file(cluster)
        age, shown = time.time() - path.stat().st_mtime, path.read_text()
    except (OSError, RuntimeError):
        return None
    return f"The nodes were as follows {max(age, 0):.0f} s ago; their processes may still serve.\n{shown}"


if __name__ == "__main__":
    main()
