"""The options that several commands share: profiles of hardware, the transport of the links, and a whole system."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from fastdecode.bench.shapes import SHAPES
from fastdecode.daemon.option_values import size_option
from fastdecode.plan.equations import System
from fastdecode.plan.model import find_planned_model
from fastdecode.plan.profile import Profile, ProfileError, merged, read_profile
from fastdecode.region.contract import KV_DTYPES


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that `find_planned_model` reads."""
    shapes = f"the shape of a well-known model: {', '.join(SHAPES)}"
    help_text = f"as for fastdecode-node, or {shapes}; default: the demo model"
    parser.add_argument("--model", type=Path, metavar="PATH", help=help_text)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `profile_and_transport` reads."""
    add = parser.add_argument
    add("--profile", action="append", default=[], metavar="FILE", help="profile, or the name of one that ships; "
        "of several (repeatable) the last one that has a section gives it")  # fmt: skip
    add("--transport", help="transport of the links; default: the profile's only one, else the one of most GB/s")


def profile_and_transport(args: argparse.Namespace) -> tuple[Profile, str]:
    """The merged profile, with all sections, and the name of one of its links. Raises ProfileError."""
    profile = merged([read_profile(name) for name in args.profile])
    transport = args.transport or max(profile.links, key=lambda name: profile.links[name].gbps)
    if transport not in profile.links:
        raise ProfileError(f"the profile has no link over {transport}; it has {', '.join(profile.links)}")
    return profile, transport


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `PlannedSystem.from_args` reads."""
    add = parser.add_argument
    add_model_argument(parser)
    add_profile_arguments(parser)
    add("--r-nodes", type=int, default=1, metavar="N", help="number of R-nodes")
    add("--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks of the S-Part on the NUMA nodes of the profile")  # fmt: skip
    add("--kv-memory", type=size_option, metavar="SIZE", help="of each R-node; default: the profile's")
    add("--kv-dtype", choices=KV_DTYPES, default="fp16")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the scheduler's steps and of their time."""
    add = parser.add_argument
    add("--max-batch-tokens", type=int, default=512, metavar="N")
    add("--target-tbt-ms", type=float, default=200.0, metavar="MS", help="as for fastdecode-node; 0: none")


@dataclass(frozen=True, slots=True)
class PlannedSystem:
    """The system that a command's options name."""

    profile: Profile
    system: System
    memory: float  # for the KV-cache of each R-node, bytes

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PlannedSystem:
        """Raises ProfileError, CheckpointError, OSError."""
        profile, transport = profile_and_transport(args)
        assert profile.r_node is not None
        model = find_planned_model(args.model)
        system = System.from_profile(profile, transport, model, args.kv_dtype, args.r_nodes, args.tensor_parallel)
        return cls(profile, system, args.kv_memory or profile.r_node.memory)
