"""The KV-cache's memory: page faults, return to the OS, huge pages; and calls that allocate nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from attention.arena_memory import (
    BIG,
    MIB,
    NR_HUGEPAGES,
    OS_PAGE,
    append,
    arena_bytes,
    faulted_in,
    faults,
    hugetlb_bytes,
    hugetlb_pages,
    link_of,
    until,
)
from attention.rengine_peer import KV_FP32, Geometry, Link
from nodes.rnode_process import r_threads
from sources.folders import ROOT

from fastdecode.kernels import _native
from fastdecode.region.contract import PAGE_TOKENS, Status

#: On a busy machine, an engine may have faulted in a whole lease before this thread gets to make a call.
TRIES = 20


def test_a_retired_link_keeps_the_memory_of_the_sequences_that_stay():
    with link_of(65, huge_pages="madvise") as link:
        link.fill(0, PAGE_TOKENS + 6)
        append(link, 1, 40 * PAGE_TOKENS)
        link.fill(2, PAGE_TOKENS + 6)
        used, budget = arena_bytes("hg"), link.engine.kv_free
        assert used >= 43 * MIB
        link.lease.retire([0, 2])
        link.lease.shrink()
        # A huge page goes back only if all of it is unused, so at most two of the 40 MiB in the middle stay.
        assert 4 * MIB <= arena_bytes("hg") <= used - 36 * MIB
        assert link.engine.kv_free >= budget + 36 * MIB
        for seq_index in (0, 2):
            assert link.lease.length(seq_index, link.shadows[seq_index].tag) == PAGE_TOKENS + 6


def test_a_sequence_that_is_to_arrive_gets_its_memory_from_another_thread():
    with link_of(9, huge_pages="off") as link:
        link.lease.receive(3, 1, 8 * PAGE_TOKENS)
        before, total = arena_bytes("nh"), 8 * MIB

        def fault_in() -> None:
            at = 0
            while at < total:
                at += (n := link.lease.fault_in(3, 1, 0, 8, at))
                assert 0 < n <= MIB

        thread = threading.Thread(target=fault_in)
        thread.start()
        thread.join()
        assert arena_bytes("nh") >= before + total
        with pytest.raises(ValueError, match="no bytes are left"):
            link.lease.fault_in(3, 1, 0, 8, total)
        with pytest.raises(ValueError, match="has tag 1, not 2"):
            link.lease.fault_in(3, 2, 0, 8, 0)
        with pytest.raises(ValueError, match="has 8 blocks"):
            link.lease.fault_in(3, 1, 0, 9, 0)
        link.lease.free(3, 1)
        link.step(0, [(3, 60, True)])


def test_a_lease_that_lives_on_keeps_its_memory():
    with link_of(9, huge_pages="off") as link:
        append(link, 0, 8 * PAGE_TOKENS)
        link.lease.free(0, 1)
        used = arena_bytes("nh")
        time.sleep(0.5)  # several checks of an idle engine
        assert arena_bytes("nh") == used >= 8 * MIB
        append(link, 0, 8 * PAGE_TOKENS)
        assert arena_bytes("nh") == used


def test_all_of_the_memory_goes_back_when_no_sequence_stays():
    """With small OS pages every byte goes back, although layers end within OS pages."""
    g = Geometry(n_slots=1, max_rows=512, n_layers=5, n_q_heads=1, n_kv_heads=1, head_size=24)
    gc.collect()
    before = arena_bytes("nh")
    with link_of(33, g=g, threads=1, huge_pages="off") as link:
        append(link, 0, 33 * PAGE_TOKENS)
        assert arena_bytes("nh") - before >= 33 * 5 * 12288
        link.lease.retire([])
        link.lease.shrink()
        assert arena_bytes("nh") == before


def test_a_lease_that_ends_gives_everything_back():
    gc.collect()
    before = arena_bytes("hg")
    with link_of(32) as link:
        append(link, 0, 30 * PAGE_TOKENS)
        assert arena_bytes("hg") - before >= 30 * MIB
        link.close()
        assert arena_bytes("hg") == before


def test_the_engines_threads_fault_a_lease_in_and_calls_do_not_wait_for_it():
    """The threads that will read the cache touch it first. Calls are served meanwhile, and later cause no faults."""
    for _ in range(TRIES):
        with link_of(65, huge_pages="off", prefault=True) as link:
            others = faults(engine=False)
            link.table(0, [(7, 1, 0, 1, 0)])
            assert link.call(0, 0, 1, 1, 0, True).status == Status.OK
            served_meanwhile = not faulted_in(link)
            until(lambda link=link: faulted_in(link), "never faulted in")
            assert arena_bytes("nh") >= link.lease.prefault[1] == 65 * MIB
            assert faults(engine=False) - others < 1000 < 65 * MIB // OS_PAGE
            append(link, 0, 10 * PAGE_TOKENS)  # the engine's own tables and the region
            before = faults(engine=True)
            append(link, 1, 10 * PAGE_TOKENS)
            assert faults(engine=True) - before < 50
        if served_meanwhile:
            return
    pytest.fail("no call was served before the lease was faulted in")


def test_without_prefault_a_lease_costs_nothing_until_it_is_used():
    gc.collect()
    others = arena_bytes("nh")
    with link_of(65, huge_pages="off") as link:
        assert link.lease.prefault == (0, 0, 0)
        assert arena_bytes("nh") == others
        append(link, 0, 10 * PAGE_TOKENS)
        before = faults(engine=True)
        append(link, 1, 10 * PAGE_TOKENS)
        assert faults(engine=True) - before >= 10 * MIB // OS_PAGE


def test_a_lease_is_faulted_in_though_calls_never_cease():
    for _ in range(TRIES):
        with link_of(65, huge_pages="off", prefault=True) as link:
            link.fill(0, 10)
            n = 0
            while not faulted_in(link):
                link.step(n % 2, [(0, 1, True)])
                n += 1
                assert n < 5000
        if n > 1:
            return
    pytest.fail("no two steps were done before the lease was faulted in")


def test_a_fork_touches_no_page():
    """The control thread forks without copying. The engine copies a cut page in the step that appends to it."""
    with link_of(8, huge_pages="off") as link:
        link.fill(0, PAGE_TOKENS + 10)
        used = arena_bytes("nh")
        link.fork(0, 1, PAGE_TOKENS + 5)
        assert arena_bytes("nh") == used
        link.step(0, [(1, 1, True)])
        assert arena_bytes("nh") == used + MIB


@pytest.mark.parametrize("prefault", [False, True], ids=["lazy", "prefault"])
def test_the_cache_lies_in_hugetlb_pages_where_asked(prefault):
    page = hugetlb_bytes()
    with hugetlb_pages(6):
        engine = _native.REngine(2, 6 * page + 5, huge_pages="hugetlb", prefault=prefault)
        link = Link(engine, BIG, KV_FP32, 2 * page // MIB + 1)
        try:
            assert engine.kv_free == 3 * page
            until(lambda: faulted_in(link), "never faulted in")
            assert arena_bytes("ht") == (3 * page if prefault else 0)
            link.fill(0, 100)
            link.step(0, [(0, 30, True), (1, 1, True)])
            assert arena_bytes("ht") >= page
            with pytest.raises(MemoryError, match="are free"):
                Link(engine, BIG, KV_FP32, 3 * page // MIB + 1)
            link.close()
            assert engine.kv_free == 6 * page
        finally:
            link.close()
            engine.close()


def test_hugetlb_pages_that_are_not_there_are_an_error_that_says_how_many():
    total = int(NR_HUGEPAGES.read_text())
    with pytest.raises(RuntimeError, match=r"(\d+) huge pages of \d+ KiB are needed") as error:
        _native.REngine(1, 1 << 44, huge_pages="hugetlb")
    needed, left, wanted = re.fullmatch(
        r"(\d+) huge pages of \d+ KiB are needed but (\d+) are available: set vm.nr_hugepages to (\d+) or more",
        str(error.value),
    ).groups()
    assert int(needed) > 1000 and int(wanted) == total + int(needed) - int(left)


def test_unknown_huge_pages_are_refused():
    with pytest.raises(ValueError, match="huge_pages is 'large', not madvise, hugetlb or off"):
        _native.REngine(1, 1 << 20, huge_pages="large")


def test_memory_is_bound_to_a_numa_node():
    """An engine takes over the binding of the thread that makes it. The OS reports the binding."""
    libc, nodes = ctypes.CDLL(None, use_errno=True), os.listdir("/sys/devices/system/node")
    if "node0" not in nodes:
        pytest.skip("this kernel knows no NUMA")
    get_mempolicy = {"x86_64": 239, "aarch64": 236}.get(os.uname().machine)
    if get_mempolicy is None:
        pytest.skip("the number of get_mempolicy is not known here")
    said: list[object] = []

    def bind() -> None:
        try:
            _native.bind_memory(0)
            mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
            assert libc.syscall(get_mempolicy, ctypes.byref(mode), mask, 1024, None, 0) == 0
            said.extend((mode.value, list(mask)))
            with link_of(4) as link:
                tasks = [task for task, name in r_threads().items() if name == "fd-r1"]
                said.append("bind:0" in Path(f"/proc/{tasks[0]}/numa_maps").read_text())
                link.step(0, [(0, 5, True)])
            _native.bind_memory(999)
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    if isinstance(said[0], PermissionError):
        pytest.skip(f"set_mempolicy: {said[0]}")
    assert said[:3] == [2, [1] + [0] * 15, True]  # MPOL_BIND
    assert isinstance(said[3], OSError), said[3]


#: Prints how often the engine's threads allocate and lock: in the first calls of steps, then in all other calls.
COUNTED = """
import ctypes
from attention.rengine_peer import KV_FP16, Geometry, Link
from fastdecode.region.contract import ROW_ATTEND, Status
from fastdecode.kernels import _native

libc = ctypes.CDLL(None)
engine = _native.REngine(3, 1 << 28, spin_us=10_000_000)  # thread 0 locks when it wakes up, so it stays awake
link = Link(engine, Geometry(max_rows=256, n_layers=8, n_q_heads=8, n_kv_heads=4, head_size=64), KV_FP16, 100)
counts = {True: [0, 0], False: [0, 0]}

def step(table):
    link.table(0, table)
    rows, attending = sum(row[3] for row in table), sum(row[3] for row in table if row[4])
    for layer in range(8):
        before = libc.fd_count_allocations(), libc.fd_count_locks()
        assert link.call(0, layer, len(table), rows, attending, layer == 0).status == Status.OK
        counts[layer == 0][0] += libc.fd_count_allocations() - before[0]
        counts[layer == 0][1] += libc.fd_count_locks() - before[1]

for i in range(12):
    step([(0, 1, i * 250, 250, 0)])
for i in range(5):  # one that is cut among the threads, blocks of queries, one that only appends
    attend = [(0, 1, 3000 + i, 1, ROW_ATTEND), (1, 1, i * 20, 20, ROW_ATTEND), (2, 1, i, 1, ROW_ATTEND)]
    step([*attend, (3, 1, i * 80, 80, 0)])
print(*counts[True], *counts[False])
link.close()
"""


@pytest.mark.quick
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_calls_allocate_nothing_and_take_no_lock(tmp_path):
    """Counted in a process into which tests/c/count_calls.c is preloaded. A step's first call may do both: it plans."""
    library = tmp_path / "count_calls.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", ROOT / "tests/c/count_calls.c", "-o", library], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", COUNTED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    planning_allocations, planning_locks, *calling = map(int, run.stdout.split())
    assert planning_allocations > 0 and planning_locks >= 17  # the counters count
    assert calling == [0, 0]
