"""Trained sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1; GLM-5): the indexers of a transformers model.

An indexer scores the tokens that a row sees, and the row attends to the `topk` best of them. The scores need the index
keys of all tokens, which the R-nodes have. So our indexer only computes a row's index queries, their weights and its
index key. The attention module hands these to its attention function, in place of the tokens that transformers'
indexer selects.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: The function in an indexer's own module that applies RoPE to its queries and keys, by the indexer's class.
_ROPES = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}


class Index(NamedTuple):
    """What the rows of a step bring for the selection of the tokens that they attend to.

    The scores are those of transformers but for two factors above 0, which change no order: the index_head_dim ** -0.5
    of the products and the index_n_heads ** -0.5 of the weights.
    """

    q: torch.Tensor  # [1, index heads, rows, index size]
    k: torch.Tensor  # [1, 1, rows, index size]
    weights: torch.Tensor  # [1, rows, index heads]
    topk: int


def replace_indexer(module: Any) -> None:
    """Let the indexer of an attention module return an Index. A module without an indexer, or with one that
    `_ROPES` lacks, stays as it is."""
    indexer: Any = getattr(module, "indexer", None)
    rope = _ROPES.get(type(indexer).__name__)
    if rope is None:
        return
    apply_rope = getattr(importlib.import_module(type(indexer).__module__), rope)
    indexer.forward = functools.partial(_index, indexer, apply_rope)
    module.forward = functools.partial(_with_mask, module.forward)


def _index(
    module: Any,
    apply_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *_: Any,
    **__: Any,
) -> Index:
    size = module.qk_rope_head_dim
    q = module.wq_b(q_resid).unflatten(2, (module.n_heads, module.head_dim))
    k = module.k_norm(module.wk(hidden)).unsqueeze(2)
    q_rope, k_rope = apply_rope(q[..., :size], k[..., :size], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([rope, x[..., size:]], dim=3).transpose(1, 2) for rope, x in ((q_rope, q), (k_rope, k)))
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))
    return Index(q, k, weights, module.index_topk)


def _with_mask(forward: Callable[..., Any], *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Call an attention module that gives its indexer a part of the mask, which steps do not have."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if attention_mask is None else attention_mask
    return forward(*args, attention_mask=mask, **kwargs)
