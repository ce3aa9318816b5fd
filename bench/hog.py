"""A tenant that takes all it can get, in a process of its own, for `fastdecode-bench transport --bystander`.

`python -m fastdecode.bench.hog KIND URL` prepares itself and prints a line. It begins at the first line of its standard
input, prints a line for each round of its work, and ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import numpy as np

from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, MAX_SLOTS, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.transports import registry
from fastdecode.transports.base import Hello, Link, LinkDown

_TIMEOUT = 600.0
_FORKS = 65535
_FORKS_AT_ONCE = 256
#: One KV head that eight query heads of 128 share: 2048 new rows of a sequence with this many tokens are just within
#: FD_MAX_CALL_WORK, 2^39 multiply-adds.
_LONG_ROWS, _LONG_CACHED = 2048, 258048
_DRIPPED = 8  # rows of a dripped call, of 2 KiB each


class Hog:
    """The process, from the benchmark's side: `rounds` counts the finished rounds of its work.

    Raises RuntimeError if the process does not get ready.
    """

    def __init__(self, kind: str, url: str):
        argv = [sys.executable, "-m", __name__, kind, url]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.stop()
            raise RuntimeError(f"the tenant that {HOGS[kind][1]} could not begin")
        self.rounds = 0
        self._counting = threading.Thread(target=self._count, daemon=True)
        self._counting.start()

    def _count(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            self.rounds += 1

    def begin(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def stop(self) -> None:
        """Raises RuntimeError if it has failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            raise RuntimeError("a tenant that takes all it can get has failed; its error stands above")


def kv_bytes_of(kind: str) -> int:
    """The KV-cache that a hog leases, bytes."""
    geometry, pages, _ = _SHAPES[kind]
    return pages * page_bytes(geometry_tuple(geometry), KV_DTYPES.index("fp16"))


#: The link of each hog: geometry, pages, sequences.
_SHAPES = {
    "forks": (Geometry(1, _FORKS + 1, 1, 1, 1, 8, "fp16"), _FORKS + 2, _FORKS + 1),
    "long": (
        Geometry(MAX_SLOTS, _LONG_ROWS, 1, 8, 1, 128, "fp16"),
        _LONG_CACHED // PAGE_TOKENS + MAX_SLOTS * (_LONG_ROWS // PAGE_TOKENS + 1),
        MAX_SLOTS,
    ),
    "drip": (Geometry(1, _DRIPPED, 1, 8, 1, 128, "fp16"), 2, 1),
}


async def _connect(kind: str, url: str) -> Link:
    geometry, _, sequences = _SHAPES[kind]
    return await registry.connect(url, Hello(geometry, "fp16", (0,), 1.0, kv_bytes_of(kind), sequences), None)


def _table(seq_index: np.ndarray, pos: int, n_rows: int, flags: int) -> np.ndarray:
    table = np.zeros(len(seq_index), ROW_DTYPE)
    table["seq_index"], table["tag"], table["pos"] = seq_index, 1, pos
    table["n_rows"], table["flags"] = n_rows, flags
    return table


def _begin_step(link: Link, slot: int, table: np.ndarray) -> None:
    link.arm(slot, table)
    link.wait(slot, _TIMEOUT)
    link.ring(slot, 0)


async def _step(link: Link, slot: int, table: np.ndarray) -> None:
    """A step of one layer."""
    await asyncio.to_thread(_begin_step, link, slot, table)
    await asyncio.to_thread(link.wait, slot, _TIMEOUT)


async def _forks(link: Link) -> Callable[[], Awaitable[None]]:
    """A round forks one sequence to all others of the lease, appends a token to each, so that each gets a copy of the
    page that they share, and frees them."""
    await _step(link, 0, _table(np.zeros(1), 0, 1, 0))
    others = np.arange(1, _FORKS + 1)

    async def round_of_work() -> None:
        for first in range(1, _FORKS + 1, _FORKS_AT_ONCE):
            some = range(first, min(first + _FORKS_AT_ONCE, _FORKS + 1))
            await asyncio.gather(*(link.fork((0, 1), (i, 1), 1) for i in some))
        await _step(link, 0, _table(others, 1, 1, ROW_ATTEND))
        await link.free([(i, 1) for i in others.tolist()])

    return round_of_work


async def _long(link: Link) -> Callable[[], Awaitable[None]]:
    """A round is a call of nearly the most work that is allowed, in every slot."""
    for pos in range(0, _LONG_CACHED, _LONG_ROWS):
        await _step(link, 0, _table(np.zeros(1), pos, _LONG_ROWS, 0))
    slots = range(MAX_SLOTS)
    for slot in slots[1:]:
        await link.fork((0, 1), (slot, 1), _LONG_CACHED)

    async def round_of_work() -> None:
        for slot in slots:
            _begin_step(link, slot, _table(np.full(1, slot), _LONG_CACHED, _LONG_ROWS, ROW_ATTEND))
        for slot in slots:
            await asyncio.to_thread(link.wait, slot, _TIMEOUT)
            await link.trim(slot, 1, _LONG_CACHED)

    return round_of_work


async def _drip(link: Link) -> Callable[[], Awaitable[None]]:
    """A round is a call whose bytes arrive one by one, because the link goes through a `_Dripper`."""

    async def round_of_work() -> None:
        _Dripper.drips = True
        await _step(link, 0, _table(np.zeros(1), 0, _DRIPPED, ROW_ATTEND))
        await link.trim(0, 1, 0)

    return round_of_work


class _Dripper:
    """A TCP proxy. Once `drips` is set, it sends each byte by itself on connections that have carried `ATTACH`."""

    drips = False

    def __init__(self, url: str):
        address = urlsplit(url)
        self._to = (address.hostname, address.port)

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._relay_both, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_r, to_r = await asyncio.open_connection(*self._to)
        for to in (writer, to_r):
            to.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(self._relay(reader, to_r), self._relay(from_r, writer), return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_data = False
        while data := await reader.read(1 << 16):
            is_data |= b'"ATTACH' in data
            one = 1 if is_data and self.drips else len(data)
            for i in range(0, len(data), one):
                writer.write(data[i : i + one])
                await writer.drain()
                if one == 1:
                    await asyncio.sleep(0)
        writer.close()


#: The function that gets each hog ready, and its work in words.
HOGS: dict[str, tuple[Callable[[Link], Awaitable[Callable[[], Awaitable[None]]]], str]] = {
    "forks": (_forks, f"forks {_FORKS} sequences and appends to all"),
    "long": (_long, f"sends the longest legal calls on {MAX_SLOTS} slots"),
    "drip": (_drip, "sends its calls byte by byte"),
}


async def _main(kind: str, url: str) -> None:
    link = await _connect(kind, await _Dripper(url).start() if kind == "drip" else url)
    round_of_work = await HOGS[kind][0](link)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ending.done():
        working = asyncio.ensure_future(round_of_work())
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            print("round", flush=True)
    closing = asyncio.create_task(link.close())
    await asyncio.gather(working, return_exceptions=True)
    await closing


if __name__ == "__main__":
    try:
        asyncio.run(_main(*sys.argv[1:]))
    except LinkDown as error:
        sys.exit(f"hog: {error}")
