"""The threads of an S-Part on a CPU: those of kernels/, which have a pool, and those of torch, which are OpenMP's.

After each operation OpenMP's threads spin for a millisecond or longer, so that the next one begins at once. Meanwhile
the pool's threads want the same CPUs: with prompts of 256 tokens on two cores, OpenMP's took a third of all CPU time.
So where kernels/ computes all products, torch computes the little that is left in one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastdecode.spart.served import ServedModel

_pool: int | None = None


def set_threads(threads: int, model: ServedModel | None = None) -> None:
    """Let `threads` threads compute; `model` is the one that they compute. Valid for kernels/ in all threads that call
    it, and for torch in the calling thread and in threads that begin later."""
    global _pool
    _pool = threads
    torch.set_num_threads(1 if model is not None and model.pooled else threads)


def pool_threads() -> int:
    """How many threads kernels/ may use: those of set_threads, or as many as torch uses."""
    return torch.get_num_threads() if _pool is None else _pool
