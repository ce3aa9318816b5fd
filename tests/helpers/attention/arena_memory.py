"""The memory of the R-engine's arenas, as the OS counts it, for tests that share a process with the engine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attention.rengine_peer import FP32, KV_FP32, Geometry, Link
from fastdecode.kernels import _native
from fastdecode.region.contract import Status

#: 512 KiB a page and layer, 1 MiB a page.
BIG = Geometry(n_slots=2, max_rows=512, n_layers=1, n_q_heads=8, n_kv_heads=8, head_size=128, act_dtype=FP32)
MIB = 1 << 20
OS_PAGE = os.sysconf("SC_PAGE_SIZE")
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def link_of(
    n_pages: int, threads: int = 2, g: Geometry = BIG, kv_dtype: int = KV_FP32, max_pages: int = 0, **kwargs: Any
) -> Iterator[Link]:
    """A link to an engine of its own with 1 GiB."""
    engine = _native.REngine(threads, 1 << 30, spin_us=20, **kwargs)
    link = Link(engine, g, kv_dtype, n_pages, max_pages=max_pages)
    link.engine = engine
    try:
        yield link
    finally:
        link.close()
        engine.close()


def append(link: Link, seq_index: int, tokens: int, at: int = 0) -> None:
    """Appends zeros, unchecked, with tag 1."""
    while tokens:
        n = min(tokens, link.g.max_rows)
        link.table(0, [(seq_index, 1, at, n, 0)])
        for layer in range(link.g.n_layers):
            reply = link.call(0, layer, 1, n, 0, layer == 0)
            assert (reply.status, reply.message) == (Status.OK, "")
        at, tokens = at + n, tokens - n


def arena_bytes(flag: str) -> int:
    """Resident bytes of this process's arenas: mappings with a flag in /proc/pid/smaps (hg: MADV_HUGEPAGE, nh, ht)."""
    flags = flag if flag == "ht" else f"nr.* {flag}"  # not reserved: thread stacks are, and are nh as well
    total = 0
    for mapping in re.split(r"(?<=\n)(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if re.search(rf"^VmFlags:.* {flags}\b", mapping, re.M):
            total += sum(int(n) for n in re.findall(r"^(?:Rss|Private_Hugetlb): +(\d+) kB", mapping, re.M))
    return total * 1024


def faults(engine: bool) -> int:
    """Page faults so far, of this process's R-engine threads or of its other threads."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith("fd-r") == engine:
                total += int((thread / "stat").read_text().rpartition(")")[2].split()[7])
    return total


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def faulted_in(link: Link) -> bool:
    done, total, error = link.lease.prefault
    assert error == 0
    return done == total


def hugetlb_bytes() -> int:
    """Bytes of a hugetlb page."""
    return int(re.search(r"^Hugepagesize: +(\d+)", Path("/proc/meminfo").read_text(), re.M)[1]) * 1024


@contextlib.contextmanager
def hugetlb_pages(n: int) -> Iterator[None]:
    """Add `n` pages to the OS's pool for one test at a time, and take them away. Skips where the OS has none. With `n`
    negative, the test that has added pages takes some away."""
    with NR_HUGEPAGES.open() as lock:
        if n > 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
        before = int(NR_HUGEPAGES.read_text())
        try:
            NR_HUGEPAGES.write_text(str(before + n))
        except OSError as error:
            pytest.skip(f"vm.nr_hugepages cannot be set: {error.strerror}")
        try:
            if (got := int(NR_HUGEPAGES.read_text()) - before) < n:
                pytest.skip(f"the OS found {got} of {n} huge pages")
            yield
        finally:
            NR_HUGEPAGES.write_text(str(before))
