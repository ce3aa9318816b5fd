"""The attention function that transformers calls in every layer of a model that is split."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from fastdecode.spart.hf.indexer import Index
from fastdecode.spart.hf.latent import latent_heads
from fastdecode.spart.lora.adapters import AdapterRows
from fastdecode.spart.states.pool import StateRows

#: The function's name in transformers' AttentionInterface. There is no mask function of this name, so no mask is made.
ATTENTION = "fastdecode"


class ForwardPass(Protocol):
    """One pass of a step's rows through the model; decoder.py implements it."""

    adapters: AdapterRows | None  # None: no row of the step uses an adapter
    states: StateRows | None  # None: the model's layers keep no states

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index | None) -> torch.Tensor:
        """Attention of one layer: q [1, n_q_heads, rows, k_size], k and v with KV heads -> O [1, rows, n_q_heads,
        v_size]. `index` is that of the layer's indexer, or of the last layer with one."""


class _Running(threading.local):
    forward: ForwardPass | None = None


#: The pass whose greenlet runs in this thread, in `running.forward`.
running = _Running()


def register() -> None:
    """Make ATTENTION known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, split_attention)


def split_attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    indices: Index | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Call the running pass. The arguments for scale, window and so on are not read, because the trace recorded
    them."""
    if running.forward is None:
        raise RuntimeError("this model's attention runs on R-nodes, so only HFSPart can call the model")
    latent = latent_heads(module)
    if latent is None:
        return running.forward.attend(q, k, v, indices), None
    return latent.outputs(running.forward.attend(latent.queries(q), k, v, indices)), None
