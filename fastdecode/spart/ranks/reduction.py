"""Reduction: sums over the ranks of a tensor-parallel S-Part, through memory that they share (kernels/decoder)."""

from __future__ import annotations

import mmap
import os
import select
from multiprocessing.connection import Connection

import torch

from fastdecode.kernels import _native
from fastdecode.kernels._native import RankError
from fastdecode.spart.served import act_code
from fastdecode.spart.threads import pool_threads

__all__ = ["RankError", "Reduction", "create_segment", "of_rank_0"]

_LOOK_MS = 50


def create_segment(n_ranks: int) -> int:
    """A memfd for the sums of `n_ranks` ranks, which the caller closes. A rank inherits or receives the descriptor.

    Raises ValueError for too many ranks, OSError.
    """
    fd = os.memfd_create("fastdecode-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _native.RankReduction.segment_bytes(n_ranks))
    except BaseException:
        os.close(fd)
        raise
    return fd


class Reduction:
    """A rank's end of a segment. All ranks sum tensors of the same size and dtype in the same order.

    `native` is the C object, for calls that sum within C. One thread at a time sums.
    """

    def __init__(self, segment: int, rank: int, n_ranks: int, *, limit_s: float = 3.0):
        """Join a segment of create_segment as one of its ranks, once. The calling thread's NUMA node gets the rank's
        memory. The descriptor may be closed afterwards. A rank is lost if it has neither computed nor woken up for
        `limit_s` seconds while others wait for it, or loops (kernels/decoder/rank_watch.h).

        Raises ValueError for a segment of another number of ranks, OSError.
        """
        self.rank = rank
        self.native = _native.RankReduction(mmap.mmap(segment, 0), rank, n_ranks, limit_s)

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x, contiguous, fp32, bf16 or fp16 on a CPU, by the sum over all ranks; returns x.

        Numbers are added in fp32 in the order of the ranks, so that all ranks get the same bits. Other Python threads
        run meanwhile. Raises RankError, also in every later call, if a rank has ended, left, or does not go on.
        """
        assert x.is_contiguous() and x.is_cpu
        self.native.sum(x.data_ptr(), x.numel(), act_code(x.dtype), pool_threads())
        return x

    def receive(self, connection: Connection, rank: int) -> bytes:
        """Wait for a message of another rank, in the thread that sums. Raises RankError as `sum_` does; EOFError."""
        poll = select.poll()  # Connection.poll makes a selector each time
        poll.register(connection, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            self.native.look(rank)
        return connection.recv_bytes()

    @property
    def fault(self) -> str | None:
        """Why no sum will succeed any more, as a sentence that names the lost rank; None while sums do."""
        return self.native.fault()

    def leave(self) -> None:
        """Let all other ranks out of their sums with a RankError, because this rank ends. Any thread may call this."""
        self.native.leave()


def of_rank_0(tokens: torch.Tensor, reduction: Reduction | None) -> torch.Tensor:
    """The tokens of rank 0, int64 [n], at all ranks, of which it alone has the logits. Without a reduction there is no
    other rank. Raises RankError."""
    if reduction is None:
        return tokens
    return reduction.sum_(tokens.float() if reduction.rank == 0 else torch.zeros(len(tokens))).long()
