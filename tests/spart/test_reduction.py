"""Sums over the ranks of an S-Part: processes that share memory, against float64 and torch.distributed's gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks.rank_processes import RankProcesses, make_reductions

from fastdecode.kernels import _native
from fastdecode.spart.ranks.reduction import RankError, Reduction, create_segment
from fastdecode.spart.threads import set_threads

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
#: Of the sum of the addends' magnitudes: adding up in fp32, and rounding once to the dtype.
BUDGET = {torch.float32: 4e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
#: Rows of one number, of odd widths and of 4,096: sums that each rank takes whole, sums that the ranks share, a sum
#: larger than a slot, and no rows at all.
SHAPES = [(1, 1), (1, 63), (3, 1031), (0, 8), *((rows, 4096) for rows in (1, 2, 8, 33, 64)), (131, 4097)]
CASES = [(shape, dtype) for dtype in BUDGET for shape in SHAPES]


def addend(case: int, rank: int) -> torch.Tensor:
    shape, dtype = CASES[case]
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * case + rank)).to(dtype)


def sum_cases(reduction: Reduction, n: int, rendezvous: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sums of all cases over `n` ranks, and gloo's of the same addends in fp32."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gloo = torch.distributed
    gloo.init_process_group("gloo", init_method=rendezvous, rank=reduction.rank, world_size=n)
    sums = []
    set_threads(2)  # of which large sums take both
    for case in range(len(CASES)):
        x = addend(case, reduction.rank)
        theirs = x.float().clone()
        gloo.all_reduce(theirs)
        assert reduction.sum_(x) is x
        sums.append((x.float().numpy(), theirs.numpy()))
    gloo.destroy_process_group()
    return sums


@pytest.mark.parametrize("n", [2, 4])
def test_sums_are_those_of_float64_and_gloo_and_alike_on_all_ranks(n: int, tmp_path: Path) -> None:
    with RankProcesses(n, sum_cases, n, f"file://{tmp_path}/rendezvous") as ranks:
        answers = [ranks.result(rank) for rank in range(n)]
    for case, (_, dtype) in enumerate(CASES):
        addends = torch.stack([addend(case, rank).double() for rank in range(n)])
        budget = BUDGET[dtype] * addends.abs().sum(0) + 1e-7  # an fp16 subnormal's last bit is 6e-8
        ours, theirs = map(torch.from_numpy, answers[0][case])
        assert ((ours - addends.sum(0)).abs() <= budget).all()
        assert ((ours - theirs).abs() <= 2 * budget).all()
        for answer in answers[1:]:
            assert answer[case][0].tobytes() == answers[0][case][0].tobytes()


def sum_integers(reduction: Reduction, n: int, n_sums: int) -> int:
    """Sum integers over `n` ranks, of 1 to 4096 numbers, `n_sums` times. Returns how many sums were right."""
    right = 0
    for i in range(n_sums):
        x = torch.full((1 + 37 * i % 4096,), float(i % 1000 + reduction.rank))
        right += bool((reduction.sum_(x) == n * (i % 1000) + n * (n - 1) // 2).all())
    return right


@pytest.mark.parametrize("n", [2, 4])
def test_thousands_of_sums_follow_each_other(n: int) -> None:
    with RankProcesses(n, sum_integers, n, 5000) as ranks:
        assert [ranks.result(rank) for rank in range(n)] == [5000] * n


def sum_until_broken(reduction: Reduction) -> None:
    for _ in count():
        reduction.sum_(torch.ones(2, 64))


def lost(ranks: RankProcesses, rank: int, how: str) -> str:
    return f"rank {rank} (pid {ranks.processes[rank].pid}) {how}"


@pytest.mark.parametrize("n", [2, 4])
def test_a_killed_rank_lets_the_others_out(n: int) -> None:
    with RankProcesses(n, sum_until_broken) as ranks:
        ranks.signal(1, signal.SIGKILL)
        for rank in {*range(n)} - {1}:
            assert ranks.result(rank) == lost(ranks, 1, "has ended")


def test_a_stopped_rank_lets_the_others_out() -> None:
    with RankProcesses(3, sum_until_broken, limit_s=2.0) as ranks:
        ranks.signal(2, signal.SIGSTOP)
        why = lost(ranks, 2, "has not gone on for 2.0 s, while others wait for it")
        assert [ranks.result(rank) for rank in (0, 1)] == [why] * 2
        ranks.signal(2, signal.SIGCONT)
        assert ranks.result(2) == why


def loop_at_second_sum(reduction: Reduction) -> None:
    reduction.sum_(torch.ones(5))
    while reduction.rank == 1:
        pass
    reduction.sum_(torch.ones(5))


def test_a_rank_that_loops_lets_the_others_out() -> None:
    with RankProcesses(2, loop_at_second_sum, limit_s=0.5) as ranks:
        assert ranks.result(0) == lost(ranks, 1, "computes without end what other ranks have computed")


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def take_long(reduction: Reduction) -> float:
    """Be late for a sum by more than the limit: a rank computes, helpers compute for another, and another wakes up now
    and then, as it does while it waits for an R-node."""
    compute(0.3)
    if reduction.rank == 1:
        compute(2.5)
    elif reduction.rank == 2:
        helper = threading.Thread(target=compute, args=(2.5,))
        helper.start()
        helper.join()
    elif reduction.rank == 3:
        for _ in range(50):
            time.sleep(0.05)
    return reduction.sum_(torch.ones(1)).item()


def test_ranks_that_take_long_are_waited_for() -> None:
    with RankProcesses(4, take_long, limit_s=1.5) as ranks:
        assert [ranks.result(rank) for rank in range(4)] == [4.0] * 4


def be_crowded_out(_: str) -> None:
    """Wait while another process has the processor: beside it, a thread of SCHED_IDLE gets one turn a second."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        compute(3.0)
        other.kill()


def sleep_in_kernel(fifo: str) -> None:
    """Sleep in state D, as for a page from a disk, while a new process waits for the writer of its standard input."""
    os.mkfifo(fifo)
    with subprocess.Popen(["sh", "-c", f"sleep 3; : > {fifo}"]):
        actions = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]
        os.waitpid(os.posix_spawnp("true", ["true"], os.environ, file_actions=actions), 0)


def sum_after(reduction: Reduction, wait: Callable[[str], None], fifo: str) -> float:
    if reduction.rank == 1:
        wait(fifo)
    return reduction.sum_(torch.ones(1)).item()


@pytest.mark.parametrize("wait", [be_crowded_out, sleep_in_kernel])
def test_a_rank_that_waits_for_a_processor_or_a_disk_is_waited_for(wait: Callable[[str], None], tmp_path: Path) -> None:
    with RankProcesses(2, sum_after, wait, str(tmp_path / "fifo"), limit_s=1.0) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [2.0] * 2


def wait_for_rank_0(reduction: Reduction, ours: Connection, theirs: Connection) -> bytes:
    """Rank 0 computes for long outside a sum, and then sleeps without end."""
    reduction.sum_(torch.ones(1))
    if reduction.rank == 0:
        compute(2.0)
        ours.send_bytes(b"the next step")
        ours.recv_bytes()
    assert reduction.receive(theirs, 0) == b"the next step"
    return reduction.receive(theirs, 0)


def test_rank_0_may_compute_alone_but_not_hang() -> None:
    with RankProcesses(2, wait_for_rank_0, *multiprocessing.Pipe(), limit_s=0.5) as ranks:
        assert ranks.result(1) == lost(ranks, 0, "has not gone on for 0.5 s, while others wait for it")


def leave_second_sum(reduction: Reduction) -> None:
    x = torch.ones(5)
    reduction.sum_(x)
    if reduction.rank == 1:
        reduction.leave()
    reduction.sum_(x)


def test_a_rank_that_leaves_lets_the_others_out() -> None:
    with RankProcesses(3, leave_second_sum) as ranks:
        assert [ranks.result(rank) for rank in range(3)] == [lost(ranks, 1, "has left the reduction")] * 3


def sum_other_rows(reduction: Reduction) -> None:
    reduction.sum_(torch.ones(5 + (reduction.rank == 2)))


def test_sums_of_other_sizes_are_refused() -> None:
    with RankProcesses(4, sum_other_rows) as ranks:
        texts = {ranks.result(rank) for rank in range(4)}
        assert texts == {lost(ranks, 2, "sums other numbers than the ranks before it")}


@pytest.mark.parametrize("isa", _native.isa_supported())
def test_every_isa_adds_in_the_order_of_the_ranks(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    n, reductions = 3, make_reductions(3)
    with ThreadPoolExecutor(n) as pool:
        for dtype in BUDGET:
            parts = [(torch.randn(333) * 10**rank).to(dtype) for rank in range(n)]
            want = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
            sums = list(pool.map(Reduction.sum_, reductions, [part.clone() for part in parts]))
            assert all(torch.equal(x, want) for x in sums)


def test_a_segment_of_other_ranks_is_refused() -> None:
    segment = create_segment(2)
    with pytest.raises(ValueError, match="bytes"):
        Reduction(segment, 0, 3)
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        Reduction(segment, 2, 2)
    os.close(segment)
    with pytest.raises(ValueError, match="65 ranks"):
        create_segment(65)


def test_one_rank_has_its_own_numbers() -> None:
    (reduction,) = make_reductions(1)
    assert torch.equal(reduction.sum_(torch.arange(5.0)), torch.arange(5.0))
    reduction.leave()
    with pytest.raises(RankError, match=r"rank 0 \(pid \d+\) has left"):
        reduction.sum_(torch.ones(1))
