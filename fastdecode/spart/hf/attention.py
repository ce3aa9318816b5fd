"""The attention function that transformers calls in every layer of a model that is split."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

#: Its name in transformers' AttentionInterface, which has no mask function of that name: no mask is ever made.
ATTENTION = "fastdecode"


class ForwardPass(Protocol):
    """A pass of a step's rows through the model (decoder.py)."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One layer: q [1, n_q_heads, rows, k_size], k and v alike -> O [1, rows, n_q_heads, v_size]."""


class _Running(threading.local):
    forward: ForwardPass | None = None


#: The pass whose greenlet runs in this thread.
running = _Running()


def register() -> None:
    """Make ATTENTION known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Scale, window and the like are the traced ones, so the arguments that repeat them are not read."""
    if running.forward is None:
        raise RuntimeError("this model's attention runs on R-nodes: it can be called through HFSPart only")
    return running.forward.attend(q, k, v), None
