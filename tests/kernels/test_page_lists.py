"""PageLists: which pages sequences hold, against plain lists of the tokens that must be in them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastdecode.kernels._native import PageLists
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, ROW_TRIM
from fastdecode.region.geometry import Geometry, geometry_tuple

pytestmark = pytest.mark.quick

PAGES, SEQUENCES = 24, 8
GEOMETRY = geometry_tuple(Geometry(1, 512, 2, 4, 2, 16, "fp32"))


class Memory:
    """Sequences of numbered tokens, and an arena that holds each token at its page and place."""

    def __init__(self) -> None:
        self.lists = PageLists(GEOMETRY, KV_DTYPES.index("fp16"), PAGES, SEQUENCES)
        self.arena = np.zeros((PAGES, PAGE_TOKENS), np.int64)
        self.tokens: dict[tuple[int, int], list[int]] = {}  # by handle
        self.gone: dict[tuple[int, int], int] = {}  # the first blocks that a sequence has given back
        self._next = 1

    def step(self, wanted: list[tuple[tuple[int, int], int, int]]) -> bool:
        """Append rows to sequences, as (handle, tokens that stay, rows). False: there are too few pages."""
        entries = [(*handle, keep, n, ROW_ATTEND | ROW_TRIM, 0) for handle, keep, n in wanted]
        table = np.array(entries, np.uint32).view(np.uint8)
        try:
            copies = np.frombuffer(self.lists.append(table), np.uint32).reshape(-1, 2)
        except MemoryError:
            return False
        for source, target in copies:
            self.arena[target] = self.arena[source]
        pages = np.full((1, len(wanted), PAGES), -1, np.int32)
        self.lists.tables(table, pages, PAGES)
        for (handle, keep, n), row in zip(wanted, pages[0], strict=True):
            tokens = self.tokens.setdefault(handle, [])
            del tokens[keep:]
            for _ in range(n):
                self.arena[row[len(tokens) // PAGE_TOKENS], len(tokens) % PAGE_TOKENS] = self._next
                tokens.append(self._next)
                self._next += 1
        self.lists.end_copies(copies.tobytes())
        self.check()
        return True

    def check(self) -> None:
        """Every sequence's pages hold its tokens, and no other page is taken."""
        held: set[int] = set()
        for handle, tokens in self.tokens.items():
            entry = np.array([(*handle, len(tokens), 0, 0, 0)], np.uint32).view(np.uint8)
            pages = np.full((1, 1, PAGES), -1, np.int32)
            self.lists.tables(entry, pages, PAGES)
            gone = self.gone.get(handle, 0)
            used = pages[0, 0, gone : -(-len(tokens) // PAGE_TOKENS)]
            assert set(pages[0, 0, :gone].tolist()) <= {-1}
            assert self.arena[used].ravel()[: len(tokens) - gone * PAGE_TOKENS].tolist() == tokens[gone * PAGE_TOKENS :]
            held.update(used.tolist())
        assert self.lists.n_free == PAGES - len(held)
        assert self.lists.n_sequences == len(self.tokens)

    def floor(self, handle: tuple[int, int]) -> int:
        """The tokens whose pages a sequence has given back."""
        return self.gone.get(handle, 0) * PAGE_TOKENS

    def refill(self, handle: tuple[int, int], blocks: int, through: tuple[int, int]) -> None:
        """Bring back the last blocks that a sequence has given back, by way of the empty sequence `through`."""
        self.lists.receive(*through, blocks * PAGE_TOKENS)
        pages = np.full((1, 1, blocks), -1, np.int32)
        self.lists.tables(np.array([(*through, 0, 0, 0, 0)], np.uint32).view(np.uint8), pages, blocks)
        self.gone[handle] -= blocks
        first = self.gone[handle] * PAGE_TOKENS
        tokens = self.tokens[handle][first : first + blocks * PAGE_TOKENS]
        self.arena[pages[0, 0]] = np.array(tokens).reshape(blocks, PAGE_TOKENS)
        self.lists.restore_blocks(*through, *handle)


@pytest.mark.parametrize("seed", range(6))
def test_pages_hold_the_tokens_of_their_sequences(seed):
    """Steps, forks in the middle of pages, trims, first blocks that are given back and come again, and frees in any
    order, until pages run out and beyond."""
    chance, memory, tag, refused, refilled = random.Random(seed), Memory(), 0, 0, 0
    for _ in range(300):
        what, handles = (
            chance.choice(["step", "step", "step", "fork", "trim", "free", "drop", "refill"]),
            list(memory.tokens),
        )
        empty = sorted(set(range(SEQUENCES)) - {index for index, _ in handles})
        if what == "step":
            tag += 1
            some = chance.sample(handles, min(len(handles), 3)) + [(index, tag) for index in empty[:1]]
            have = {handle: len(memory.tokens.get(handle, ())) for handle in some}
            refused += not memory.step(
                [
                    (h, max(have[h] - chance.choice([0, 0, 3]), memory.floor(h)), chance.choice([1, 5, 130]))
                    for h in some
                ]
            )
        elif what == "fork" and handles and empty:
            tag += 1
            source, target = chance.choice(handles), (empty[0], tag)
            if memory.floor(source):
                continue
            n = chance.randint(1, len(memory.tokens[source]))
            memory.lists.fork(*source, *target, n)
            memory.tokens[target] = memory.tokens[source][:n]
        elif what == "trim" and handles:
            handle = chance.choice(handles)
            n = chance.randint(max(1, memory.floor(handle)), len(memory.tokens[handle]))
            memory.lists.trim(*handle, n)
            del memory.tokens[handle][n:]
        elif what == "free" and handles:
            handle = chance.choice(handles)
            memory.lists.free(*handle)
            del memory.tokens[handle]
            memory.gone.pop(handle, None)
        elif what == "drop" and handles:
            handle = chance.choice(handles)
            n = chance.randint(memory.gone.get(handle, 0), len(memory.tokens[handle]) // PAGE_TOKENS)
            memory.lists.drop_blocks(*handle, n)
            memory.gone[handle] = n
        elif what == "refill" and empty:
            tag += 1
            for handle in (h for h in handles if 0 < memory.gone.get(h, 0) <= memory.lists.n_free):
                memory.refill(handle, chance.randint(1, memory.gone[handle]), (empty[0], tag))
                refilled += 1
                break
        memory.check()
    assert refused and refilled


def test_wrong_handles_and_tables_are_refused_and_change_nothing():
    memory = Memory()
    assert memory.step([((0, 1), 0, 200)])
    for wrong in ((0, 2, 200, 1, 0, 0), (SEQUENCES, 1, 0, 1, 0, 0), (0, 1, 150, 1, 0, 0)):
        with pytest.raises(ValueError, match="sequence"):
            memory.lists.append(np.array([wrong], np.uint32).view(np.uint8))
    memory.lists.receive(1, 1, 2 * PAGE_TOKENS)
    memory.tokens[1, 1] = [0] * 2 * PAGE_TOKENS
    memory.lists.drop_blocks(1, 1, 1)
    memory.gone[1, 1] = 1
    for source in ((0, 1), (1, 1)):  # one with half a page, and the sequence itself
        with pytest.raises(ValueError, match="cannot fill the 1 blocks"):
            memory.lists.restore_blocks(*source, 1, 1)
    for call in (lambda: memory.lists.free(0, 9), lambda: memory.lists.trim(0, 1, 201)):
        with pytest.raises(ValueError, match="sequence 0"):
            call()
    with pytest.raises(ValueError, match="pages: 4 bytes given"):
        memory.lists.tables(np.zeros(1, ROW_DTYPE).view(np.uint8), np.zeros(1, np.int32), 2)
    memory.check()
