"""The shape of a layer's attention in a benchmark, and the random data that the R-engine and the peers share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Shape:
    """Decode attention of one layer: each sequence attends one new token to `context` cached tokens, itself
    included."""

    context: int
    group: int  # query heads for each KV head
    head_size: int
    kv_heads: int
    v_size: int = 0  # of a V head; 0: head_size
    v_in_k: bool = False  # V of a head is the first v_size elements of its K, as in latent attention
    # Trained sparse attention: heads of the indexer, their size, and the tokens that it selects; 0: attention to all
    index_heads: int = 0
    index_size: int = 0
    index_topk: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_size", self.v_size or self.head_size)

    @property
    def q_heads(self) -> int:
        return self.group * self.kv_heads

    def sequences(self, token_bytes: float, kv_bytes: int) -> int:
        """How many sequences make up at least `kv_bytes` of KV, if all KV heads of a token take `token_bytes`."""
        return max(1, -(-kv_bytes // int(self.context * token_bytes)))


@dataclass(frozen=True, slots=True)
class Data:
    """Normally distributed q [q_heads, head_size], k [context, kv_heads, head_size] and v [context, kv_heads, v_size],
    index queries [index_heads, index_size], their weights [index_heads] and index keys [context, index_size], fp16,
    equal for all sequences."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    index_q: np.ndarray
    index_weights: np.ndarray
    index_keys: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=1)  # the R-engine and its peers ask for the same shape, one after the other
    def of(cls, shape: Shape) -> Data:
        rng = np.random.default_rng(0)
        kv = rng.standard_normal((2, shape.context, shape.kv_heads, shape.head_size), np.float32).astype(np.float16)
        q = rng.standard_normal((shape.q_heads, shape.head_size), np.float32).astype(np.float16)
        index = [
            rng.standard_normal(size, np.float32).astype(np.float16)
            for size in ((shape.index_heads, shape.index_size), (shape.index_heads,), (shape.context, shape.index_size))
        ]
        return cls(q, kv[0], kv[0 if shape.v_in_k else 1, :, :, : shape.v_size], *index)
