"""Token masks: which tokens a row may draw at all. A token that is not allowed gets the logit -inf before anything
else, so no bias, penalty or filter brings it back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class TokenMask(Protocol):
    """Says which tokens of one sequence may come next."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Clear the bits of tokens that may not come next; bit i % 32 of row[i // 32] is token i. May wait."""
        ...


def masked(logits: torch.Tensor, masks: list[TokenMask | None]) -> torch.Tensor:
    """`logits` [rows, vocab_size] fp32 with -inf for the tokens that a row's mask forbids; None: a row without a mask.

    The result is `logits` itself if no row has a mask, else a copy. A row without any allowed token is all -inf.
    """
    rows = [i for i, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    vocab = logits.shape[1]
    words = np.full((len(rows), (vocab + 31) // 32), -1, np.int32)
    for row, i in zip(words, rows, strict=True):
        if (mask := masks[i]) is not None:
            mask.fill(row)
    packed = torch.from_numpy(words.view(np.uint8)).to(logits.device)[:, :, None]  # the CPUs served are little-endian
    bits = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=logits.device)
    forbidden = ((packed & bits) == 0).flatten(1)[:, :vocab]
    if len(rows) == len(logits):
        return logits.masked_fill(forbidden, -torch.inf)
    index = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))
