"""The URLs that links are served at: bad URLs, addresses in use, addresses that need a secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest
from wire.link_driver import hello
from wire.wire_peers import Caller

from fastdecode.transports.base import LinkRefused, TransportError
from fastdecode.transports.registry import connect, serve

pytestmark = pytest.mark.quick


class NoService:
    """A LinkService that refuses every link."""

    name = "none"

    async def prepare(self, hello):
        pass

    def open_link(self, wanted, region, notify):
        raise LinkRefused("not today")


async def test_a_refusal_reaches_the_s_node(tmp_path):
    for url in (f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0", "tcp://localhost:0"):
        server = await serve(url, NoService(), None)
        with pytest.raises(LinkRefused, match="not today"):
            await connect(server.url, hello(), None)
        await server.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "error_text"),
    [
        ("quic://host:1", "known transport, which are shm://, tcp://, rdma://"),
        ("127.0.0.1:80", "known transport"),
        ("tcp://127.0.0.1", "not of the form tcp://host:port"),
        ("tcp://:80", "not of the form tcp://host:port"),
        ("tcp://host:99999", "not of the form tcp://host:port"),
        ("tcp://host:80/path", "not of the form tcp://host:port"),
        ("rdma://host", "not of the form rdma://host:port"),
        ("rdma://host:1?device=a&device=b", "not of the form rdma://host:port"),
        ("rdma://host:1?gid=first", "not of the form rdma://host:port"),
        ("rdma://host:1?mtu=9000", "not of the form rdma://host:port"),
        ("shm://relative/path", "not of the form shm:///path"),
        ("shm:///", "not of the form shm:///path"),
        ("shm:///" + "x" * 107, "longer than"),
    ],
)
async def test_bad_urls(url, error_text):
    with pytest.raises(TransportError, match=error_text):
        await serve(url, NoService(), None)
    with pytest.raises(TransportError, match=error_text):
        await connect(url, hello(), None)


async def test_an_address_that_others_can_reach_needs_a_secret():
    with pytest.raises(TransportError, match="no shared secret"):
        await serve("tcp://0.0.0.0:0", NoService(), None)
    for secret, insecure in ((b"one of 16 bytes.", False), (None, True)):
        server = await serve("tcp://0.0.0.0:0", NoService(), secret, insecure=insecure)
        await server.close()


async def test_an_empty_secret_is_refused():
    with pytest.raises(TransportError, match="secret is empty"):
        await serve("tcp://127.0.0.1:0", NoService(), b"\n")


async def test_addresses_in_use_are_left_alone(tmp_path):
    for url in (f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0"):
        server = await serve(url, NoService(), None)
        with pytest.raises(TransportError, match="in use"):
            await serve(server.url, NoService(), None)
        with pytest.raises(LinkRefused, match="not today"):
            await connect(server.url, hello(), None)
        await server.close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(TransportError, match="in use"):
        await serve(f"shm://{tmp_path}/file", NoService(), None)
    assert (tmp_path / "file").read_text() == "precious"


async def test_only_the_owner_can_open_the_socket(tmp_path):
    server = await serve(f"shm://{tmp_path}/r.sock", NoService(), None)
    assert (tmp_path / "r.sock").stat().st_mode & 0o777 == 0o600
    await server.close()


NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Act as another user."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_a_socket_of_another_user_is_no_r_node(tmp_path):
    """Somebody has put a socket of his own at the address before the R-node was started."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/r.sock")
        with as_nobody():
            listener.listen()
        with pytest.raises(LinkRefused, match=f"uid {NOBODY} serves it, neither this user, uid 0, nor root"):
            await connect(f"shm://{tmp_path}/r.sock", hello(), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_another_user_is_refused_even_if_the_socket_is_open_to_all():
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        server = await serve(f"shm://{directory}/r.sock", NoService(), None)
        os.chmod(f"{directory}/r.sock", 0o666)
        sock = socket.socket(socket.AF_UNIX)
        with as_nobody():  # not across an await: the server runs in this process, too
            sock.connect(f"{directory}/r.sock")
        caller = Caller(*await asyncio.open_unix_connection(sock=sock))
        answer = await caller.read_message()
        assert answer["type"] == "REFUSED" and f"uid {NOBODY} is neither" in answer["reason"]
        await caller.close()
        await server.close()
