"""The links of an S-node: at its start, and to an R-node that is lost."""

from __future__ import annotations

import socket
from unittest.mock import AsyncMock, Mock

import pytest
from wire.link_driver import hello

from fastdecode.daemon import first_answers
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.discovery import FixedSet
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.rnode_links import RNodeLinks
from fastdecode.transports.base import LinkDown


async def test_connect_seconds_bound_the_wait_for_a_peer_that_is_no_r_node(monkeypatch):
    """A peer that accepts and says nothing, as an HTTP server does."""
    monkeypatch.setattr(first_answers, "_LEAST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        links = RNodeLinks(FixedSet((url,)), hello(), None, NodeConfig(r_node=(url,), connect_seconds=0.2))
        with pytest.raises(LinkDown, match=r"did not finish the hand-shake within 0\.2 s: is it an R-node\?"):
            await links.open()
        await links.close()


async def test_an_embedded_r_node_that_lacks_memory_when_it_starts_again_is_tried_again(caplog):
    """The OS may give the memory of the lost one back a moment later."""
    embedded = Mock(restart=AsyncMock(side_effect=ConfigError("--prefault needs all of --kv-memory now")))
    links = RNodeLinks(FixedSet(()), hello(), None, NodeConfig(), embedded)
    assert await links._connect("shm:///lost", None) is None
    assert "R-node shm:///lost: --prefault needs all of --kv-memory now" in caplog.text
