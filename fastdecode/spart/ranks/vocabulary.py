"""The embedding and the LM head of a rank that has the rows of a part of the vocabulary."""

from __future__ import annotations

import torch

from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.ranks.share import Share


class SharedEmbedding(Embedding):
    """Each rank looks up the tokens of its part; the sum over the ranks has all rows."""

    __slots__ = ("_part", "_rows", "_share")

    def __init__(self, part: Embedding, vocab_size: int, share: Share):
        self._part, self._rows, self._share = part, share.part(vocab_size), share

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        here = (ids >= self._rows.start) & (ids < self._rows.stop)
        rows = self._part((ids - self._rows.start).where(here, 0)).masked_fill_(~here[:, None], 0)
        return self._share.reduction.sum_(rows)

    @property
    def nbytes(self) -> int:
        return self._part.nbytes


class SharedHead(Linear):
    """Each rank writes the logits of its part into memory that all ranks share. There rank 0, which draws the tokens,
    has all logits until its next call. The other ranks get a tensor of the same shape, whose numbers mean nothing."""

    __slots__ = ("_columns", "_part", "_share", "_vocab_size")

    def __init__(self, part: Linear, vocab_size: int, share: Share):
        self._part, self._vocab_size, self._share = part, vocab_size, share
        self._columns = share.part(vocab_size)

    @property
    def pooled(self) -> bool:
        return self._part.pooled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        part = self._part(x)
        n = len(x) * self._vocab_size
        logits = self._share.logits[: n * part.itemsize].view(part.dtype).view(len(x), self._vocab_size)
        self._meet()  # rank 0 no longer reads earlier logits
        logits[:, self._columns] = part
        self._meet()
        return torch.empty_like(logits) if self._share.rank else logits

    def _meet(self) -> None:
        """Wait until all ranks are here."""
        self._share.reduction.sum_(torch.zeros(1))

    @property
    def nbytes(self) -> int:
        return self._part.nbytes
