"""R-nodes for teams, once over each transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from nodes.rnode_process import RNodeProcess

from fastdecode.transports.base import Hello, Link
from fastdecode.transports.partition import connect_team


@pytest.fixture(params=["shm", "tcp"], scope="module")
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RNodeProcess]]:
    processes = [RNodeProcess.over(request.param, tmp_path_factory.mktemp("node")) for _ in range(4)]
    yield processes
    for process in processes:
        assert process.end() == 0


@pytest.fixture
async def team_of(nodes: list[RNodeProcess]) -> AsyncIterator[Callable[..., Awaitable[Link]]]:
    """Opens a team of n R-nodes."""
    teams: list[Link] = []

    async def open_team(wanted: Hello, n: int, partition: str = "heads") -> Link:
        teams.append(await connect_team([node.url for node in nodes[:n]], wanted, None, partition=partition))
        return teams[-1]

    yield open_team
    for team in teams:
        await team.close()
        assert await team.closed() is None
