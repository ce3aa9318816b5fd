"""The ways in which several R-nodes share every sequence (`--partition`), and how a team of them is connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import registry
from .base import Hello, Link
from .team import Team, part_of
from .token_team import TokenTeam, token_part_of


class Partition(NamedTuple):
    """How a team shares sequences: the link that it asks a member for (of a Hello, the member's index and the number of
    members), and the team's own link."""

    part_of: Callable[[Hello, int, int], Hello]
    team: type[Team]


PARTITIONS = {"heads": Partition(part_of, Team), "tokens": Partition(token_part_of, TokenTeam)}


def member_of(hello: Hello, i: int, n: int, partition: str) -> Hello:
    """The link that a team of `n` R-nodes asks its member `i` for; `hello` itself if it is alone.

    Raises TransportError if the R-nodes cannot share the model's sequences.
    """
    return PARTITIONS[partition].part_of(hello, i, n) if n > 1 else hello


async def connect_team(
    urls: Sequence[str], hello: Hello, secret: bytes | None, *, partition: str = "heads", spin_us: int | None = None
) -> Link:
    """Open a link to the R-node at the only one of `urls`, or to a team of the R-nodes at all of them.

    Raises what registry.connect raises, and TransportError if the R-nodes cannot share the model's sequences.
    """
    links: list[Link] = []
    try:
        for i, url in enumerate(urls):
            part = member_of(hello, i, len(urls), partition)
            links.append(await registry.connect(url, part, secret, spin_us=spin_us))
        return PARTITIONS[partition].team(links, hello) if len(links) > 1 else links[0]
    except BaseException:
        for link in links:
            await link.close()
        raise
