"""Token masks: the tokens that a row may draw at all. A token that is not allowed gets the logit -inf before anything
else, so no bias, penalty or filter brings it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class TokenMask(Protocol):
    """Says which tokens of one sequence may come next."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Clear the bits of tokens that may not come next; bit i % 32 of row[i // 32] is token i. May wait. May be
        called again for the same token."""
        ...


def mask_words(masks: Sequence[TokenMask], vocab_size: int) -> npt.NDArray[np.int32]:
    """The bits of several masks, [masks, words of a row]: bit i % 32 of word i // 32 says whether token i is allowed.
    Waits for them."""
    words = np.full((len(masks), -(-vocab_size // 32)), -1, np.int32)
    for row, mask in zip(words, masks, strict=True):
        mask.fill(row)
    return words


def mask_bits(masks: Sequence[TokenMask], vocab_size: int) -> npt.NDArray[np.uint8]:
    """The same bits by bytes, [masks, bytes of a row]: bit i % 8 of byte i // 8 says whether token i is allowed."""
    return mask_words(masks, vocab_size).view(np.uint8)  # the CPUs served are little-endian


def forbidden(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The result of `mask_bits`, on a device, as bool [masks, vocab_size]: True for a token that is not allowed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).logical_not_().flatten(1)[:, :vocab_size].to(torch.bool)
