"""StatePool: the states of all sequences, which stay in the S-Part's memory while their K and V are on R-nodes.

A step reads the state before each chunk from one slot, and writes the states after some of the chunk's tokens to the
same or other slots (Chunk.states_after). Chunks whose states are all one token apart, as those of decoding sequences
are, advance together; other chunks advance one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from fastdecode.spart.linears.huge_pages import empty
from fastdecode.spart.step.batch import Chunk
from fastdecode.spart.step.step_table import StepTable


class StateTensor(NamedTuple):
    """One tensor of a state. `dtype` None: the activation dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class StatePool:
    """The states of sequences in `n_slots` slots. `blocks` has the tensors of each block that keeps states,
    [slots, *shape]."""

    def __init__(self, blocks: Iterable[Sequence[StateTensor]], n_slots: int, device: torch.device, dtype: torch.dtype):
        """Raises ValueError without a slot."""
        if n_slots < 1:
            raise ValueError("the layers of the model keep states, so its S-Part needs state_slots")
        self.n_slots = n_slots
        self.blocks = [
            [_memory((n_slots, *one.shape), device, one.dtype or dtype) for one in tensors] for tensors in blocks
        ]
        self._lengths: list[int | None] = [None] * n_slots  # tokens that a slot's state has seen; None: not known

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the tensors of all blocks."""
        return tuple(tensor.data_ptr() for tensor in chain.from_iterable(self.blocks))

    def begin(self, chunk: Chunk) -> None:
        """Take the slots of a chunk for a step: the state of a sequence that begins is zero.

        Raises ValueError if the pool has no such slots, if their states are not after ascending numbers of the chunk's
        tokens, or if the first state is not that of the tokens before the chunk.
        """
        after = _states_after(chunk)
        for slot in (chunk.state, *(slot for _, slot in after)):
            if not 0 <= slot < self.n_slots:
                raise ValueError(f"a chunk has state slot {slot}, not one of the pool's {self.n_slots}")
        counts = [0, *(n for n, _ in after)]
        if counts[-1] != len(chunk.tokens) or any(a > b for a, b in pairwise(counts)):
            raise ValueError(f"a chunk of {len(chunk.tokens)} tokens has states after {counts[1:]} of them")
        if chunk.pos == 0:
            for tensor in chain.from_iterable(self.blocks):
                tensor[chunk.state] = 0
        elif self._lengths[chunk.state] != chunk.pos:
            known = self._lengths[chunk.state]
            raise ValueError(f"a sequence goes on at {chunk.pos}, its state is that of {known} tokens")
        for _, slot in after:
            self._lengths[slot] = None

    def end(self, chunk: Chunk) -> None:
        """Record that the states after a chunk's tokens are in their slots."""
        for n, slot in _states_after(chunk):
            self._lengths[slot] = chunk.pos + n

    def pretend(self, length: int, slot: int | None = None) -> None:
        """Let the state of a slot, or of all, pass for that of `length` tokens, as measurements need it."""
        for i in range(self.n_slots) if slot is None else (slot,):
            self._lengths[i] = length

    def clear(self) -> None:
        """Make all states zero."""
        for tensor in chain.from_iterable(self.blocks):
            tensor.zero_()


def _states_after(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    return chunk.states_after or ((len(chunk.tokens), chunk.state),)


def _memory(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values, on a CPU in huge pages: each state is read from memory in every step."""
    if device.type != "cpu":
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.from_numpy(empty(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


class Singles(NamedTuple):
    """Rows that take their sequences' states one token further: int64 [n] each, on the device."""

    rows: torch.Tensor
    sources: torch.Tensor  # the slots of the states before the rows
    targets: torch.Tensor  # the slots of the states after them


class Span(NamedTuple):
    """Some rows of one sequence, or none, and the slots of the states before and after them."""

    rows: slice
    source: int
    target: int

    @property
    def n(self) -> int:
        """The number of rows."""
        n: int = self.rows.stop - self.rows.start
        return n


class StateRows:
    """A step's rows in the pool.

    `singles` are the rows of all chunks that have a state after each of their tokens: first the first row of each
    chunk, then all second rows, and so on. `spans` are the rows of the other chunks. A row or span stands behind those
    whose state it goes on from.
    """

    singles: Singles

    def __init__(self, pool: StatePool, chunks: Sequence[Chunk], starts: Sequence[int], table: StepTable):
        """`starts`: the first row of each chunk. Raises ValueError; see StatePool.begin."""
        for chunk in chunks:
            pool.begin(chunk)
        self.pool = pool
        self.spans: list[Span] = []
        singles: list[list[Span]] = []
        for chunk, start in zip(chunks, starts, strict=False):
            after = _states_after(chunk)
            spans, source, first = [], chunk.state, start
            for n, target in after:
                spans.append(Span(slice(first, start + n), source, target))
                source, first = target, start + n
            if any(span.n != 1 for span in spans):
                self.spans += spans
                continue
            singles += [[] for _ in range(len(spans) - len(singles))]
            for at_once, span in zip(singles, spans, strict=False):
                at_once.append(span)
        self._sizes = [len(at_once) for at_once in singles]
        in_order = [span for at_once in singles for span in at_once]
        table.add("state rows", np.array([span.rows.start for span in in_order], np.int64))
        table.add("state sources", np.array([span.source for span in in_order], np.int64))
        table.add("state targets", np.array([span.target for span in in_order], np.int64))

    def on_device(self, uploaded: dict[str, torch.Tensor]) -> None:
        """Take `singles` from the step's table."""
        self.singles = Singles(*(uploaded[f"state {name}"] for name in ("rows", "sources", "targets")))

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """The addresses of `singles` and their number, and the address and number of `spans`, as fd_delta_span_t."""
        assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in self.singles)
        spans = [(span.rows.start, span.n, span.source, span.target) for span in self.spans]
        self._spans = torch.tensor(spans, dtype=torch.int64)
        rows, sources, targets = (tensor.data_ptr() for tensor in self.singles)
        return rows, sources, targets, len(self.singles.rows), self._spans.data_ptr(), len(spans)

    def rounds(self) -> Iterator[Singles]:
        """`singles` in parts, in each of which every sequence has at most one row."""
        for parts in zip(*(tensor.split(self._sizes) for tensor in self.singles), strict=True):
            yield Singles(*parts)
