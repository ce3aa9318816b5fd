"""TCP links over wires (veth pairs between network namespaces) that are set down and up again, time after time.

    python cut_wire.py CYCLES       1 or more

Two wires join an R-node and an S-node. Each cycle opens two links over each wire, one idle and one under load; then it
sets one wire down at the S-node's end and the other at the R-node's end. Meanwhile two more links, one at each end and
on no wire, make calls without a pause. The script prints, as JSON, the seconds from the cut until the S-node had given
up its last link (given_up) and the R-node had freed the last lease (freed), for the slowest cycle; the resources that
both processes held before and after (held); and the bytes by which they grew (grown). Exit status 77, with a reason: no
wires can be made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

NOT_HERE = 77
HANG_S = 30.0
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
SECRET = "for an R-node that others may reach"
KV_BYTES = 64 << 20


def not_here(reason: str) -> None:
    print(reason)
    sys.exit(NOT_HERE)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        not_here(f"ip {' '.join(words)}: {done.stderr.strip()}")


def new_namespace() -> int:
    """Enter a new network namespace. Returns its descriptor."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        not_here("no network namespace may be made here")
    ip("link", "set", "lo", "up")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter(namespace: int) -> None:
    """Enter a network namespace, with this thread and the processes that it starts."""
    if ctypes.CDLL(None).setns(namespace, _CLONE_NEWNET):
        not_here("a network namespace cannot be entered here")


@contextlib.contextmanager
def within(namespace: int, home: int) -> Iterator[None]:
    enter(namespace)
    try:
        yield
    finally:
        enter(home)


async def main(cycles: int, ended: contextlib.ExitStack) -> None:
    from nodes.rnode_process import Held, RNodeProcess, resident_bytes, start_executor_threads
    from nodes.snode_process import SNodeProcess

    from fastdecode.transports.base import Hello, Link, LinkDown
    from fastdecode.transports.registry import connect
    from wire.link_driver import Payloads, hello, until

    there = new_namespace()
    node = RNodeProcess("tcp://0.0.0.0:0", KV_BYTES, SECRET)
    ended.callback(node.end)
    port = node.url.rpartition(":")[2]
    local_there = SNodeProcess(f"tcp://127.0.0.1:{port}", "load", SECRET)
    ended.callback(local_there.end)
    here = new_namespace()
    local_node = RNodeProcess("tcp://127.0.0.1:0", KV_BYTES)
    ended.callback(local_node.end)
    local = Payloads(await connect(local_node.url, Payloads.HELLO, None))
    local_calls = asyncio.create_task(asyncio.to_thread(local.run, sys.maxsize))

    for wire in "12":
        ip("link", "add", f"s{wire}", "type", "veth", "peer", "name", f"r{wire}", "netns", str(node.pid))
        ip("addr", "add", f"10.9.{wire}.1/24", "dev", f"s{wire}")
        ip("link", "set", f"s{wire}", "up")
        with within(there, here):
            ip("addr", "add", f"10.9.{wire}.2/24", "dev", f"r{wire}")
            ip("link", "set", f"r{wire}", "up")

    def set_wires(state: str) -> None:
        ip("link", "set", "s1", state)
        with within(there, here):
            ip("link", "set", "r2", state)

    async def leases_freed() -> bool:
        return Held.by(node.pid) == r_before

    async def cleaned_up() -> bool:
        return Held.by(os.getpid()) == s_before

    async def reach(url: str, wanted: Hello) -> Link:
        """Connect as soon as there is a route: a wire that has just been set up may have none yet."""
        while True:
            try:
                return await connect(url, wanted, SECRET.encode())
            except LinkDown:
                await asyncio.sleep(0.05)

    async def cycle() -> tuple[float, float]:
        urls = [f"tcp://10.9.{wire}.2:{port}" for wire in "12"]
        async with asyncio.timeout(HANG_S):
            idle = [await reach(url, hello()) for url in urls]
            busy = [await reach(url, Payloads.HELLO) for url in urls]
        loads = [asyncio.create_task(asyncio.to_thread(Payloads(link).run, sys.maxsize)) for link in busy]
        await asyncio.sleep(0.2)
        assert not any(load.done() for load in loads)
        set_wires("down")
        cut = time.monotonic()
        async with asyncio.timeout(HANG_S):
            ends = await asyncio.gather(*(link.closed() for link in (*idle, *busy)))
            given_up = time.monotonic() - cut
            assert all(ends)
            for load in loads:
                with contextlib.suppress(LinkDown):
                    await load
        del idle, busy, loads, load
        await until(leases_freed, HANG_S)
        freed = time.monotonic() - cut
        set_wires("up")
        await until(cleaned_up, HANG_S)
        return given_up, freed

    start_executor_threads()
    assert await asyncio.to_thread(local_there.read_line) == "open"
    pids = node.pid, os.getpid()
    r_before, s_before = map(Held.by, pids)
    times = [await cycle()]
    resident = [resident_bytes(pid) for pid in pids]
    for _ in range(cycles - 1):
        times.append(await cycle())
    grown = [resident_bytes(pid) - before for pid, before in zip(pids, resident, strict=True)]
    calls = local.calls
    async with asyncio.timeout(HANG_S):
        while local.calls == calls:
            await asyncio.sleep(0.1)
    assert not local_calls.done()
    assert local_there.process.poll() is None
    held = [dataclasses.astuple(x) for x in (r_before, Held.by(node.pid), s_before, Held.by(os.getpid()))]
    given_up, freed = map(max, zip(*times, strict=True))
    print(json.dumps({"given_up": given_up, "freed": freed, "held": held, "grown": grown}))
    await local.link.close()
    with contextlib.suppress(LinkDown):
        await local_calls


if __name__ == "__main__":
    if not shutil.which("ip"):
        not_here("there is no ip command (iproute2) here")
    if os.getuid() and ctypes.CDLL(None).unshare(_CLONE_NEWUSER):
        not_here("no user namespace may be made here")
    with contextlib.ExitStack() as ended:
        asyncio.run(main(int(sys.argv[1]), ended))
