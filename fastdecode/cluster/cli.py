"""`fastdecode-cluster`: S-nodes, R-nodes and a router on a Ray cluster, as cluster.yaml describes them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode import __version__
from fastdecode.cluster.config import ClusterConfig, ClusterError
from fastdecode.cluster.directory import View
from fastdecode.cluster.table import table

if TYPE_CHECKING:
    from fastdecode.cluster.rays import RayCluster

_ROLES = {"r-nodes": "r", "s-nodes": "s", "prefill-nodes": "p"}


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0, 2 for a bad command line, 1 for any other error."""
    args = _parser().parse_args(argv)
    try:
        config = ClusterConfig.from_file(args.file)
        rays = _rays(config)
        with rays.connect(config) as cluster:
            _run(args, config, cluster)
    except ClusterError as error:
        sys.exit(f"fastdecode-cluster {args.command}: error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdecode-cluster", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("up", "start all nodes and the router, and wait until they serve"),
        ("status", "print a table of all nodes"),
        ("scale", "start or drain nodes until a role has N of them"),
        ("drain", "let a node, or all nodes of a machine, hand over their work, and end them"),
        ("down", "let requests end, and end all nodes"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        if name == "scale":
            command.add_argument("to", type=_count, metavar="r-nodes=N|s-nodes=N|prefill-nodes=N")
        if name == "drain":
            command.add_argument("target", metavar="NODE", help="r0, s1, or a machine's address or Ray id")
        command.add_argument("file", type=Path, nargs="?", default=Path("cluster.yaml"), metavar="cluster.yaml")
    return parser


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(r-nodes|s-nodes|prefill-nodes)=([0-9]{1,4})", text)
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
    match args.command:
        case "up":
            cluster.up(config)
            _print(cluster.view())
        case "status":
            _print(cluster.view())
        case "scale":
            cluster.scale(*args.to)
            _print(cluster.view())
        case "drain":
            print(f"drained: {', '.join(cluster.drain(args.target))}")
        case "down":
            cluster.down()


def _print(view: View) -> None:
    print(table(view), flush=True)


if __name__ == "__main__":
    main()
