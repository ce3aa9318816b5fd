"""The options that several commands share: profiles of hardware, and the transport of the links."""

from __future__ import annotations

import argparse

from fastdecode.plan.profile import Profile, ProfileError, merged, read_profile


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
