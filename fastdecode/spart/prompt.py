"""Attention of prompts, which the S-node computes; the R-node only appends their K and V.

A prompt that is prefilled in one chunk needs only its own rows. For a prompt of several chunks, the K and V of the
earlier chunks are staged here until the last chunk has passed all layers.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F

from fastdecode.spart.batch import Chunk
from fastdecode.spart.shape import AttentionShape


class PromptCache:
    """The staged K and V of unfinished prompts, by sequence."""

    def __init__(self, config: AttentionShape, device: torch.device, dtype: torch.dtype):
        self._shape = (config.n_layers, 2 * config.n_kv_heads * config.head_size)
        self._device, self._dtype = device, dtype
        self._prompts: dict[Hashable, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the staged K and V take."""
        return sum(prompt.kv.nbytes for prompt in self._prompts.values())

    def begin(self, key: Hashable, chunk: Chunk) -> Prompt | None:
        """Make room for a chunk's K and V; returns None if the chunk is the whole prompt, for which nothing is staged.

        Raises ValueError if the chunk does not follow the last one of its prompt.
        """
        if chunk.pos == 0:
            self.drop(key)
            if chunk.sample is not None:
                return None
        prompt = self._prompts.get(key)
        if prompt is None:
            if chunk.pos:
                raise ValueError(f"a prompt goes on at {chunk.pos}, but its first tokens are not staged: {key}")
            n_layers, width = self._shape
            prompt = self._prompts[key] = Prompt(
                torch.empty(n_layers, 0, width, device=self._device, dtype=self._dtype)
            )
        if prompt.length != chunk.pos:
            raise ValueError(f"a prompt goes on at {chunk.pos}, expected at {prompt.length}: {key}")
        prompt.reserve(chunk.pos + len(chunk.tokens))
        return prompt

    def end(self, work: PromptChunk) -> None:
        """Record that a chunk has passed all layers."""
        if work.chunk.sample is not None:
            self.drop(work.key)
        elif work.prompt is not None:
            work.prompt.length = work.chunk.pos + len(work.chunk.tokens)

    def drop(self, key: Hashable) -> None:
        """Free the staged K and V of a sequence, if there are any."""
        self._prompts.pop(key, None)


class Prompt:
    """Staged K and V of one prompt: `kv` is [layers, capacity, K and V of a row], of which `length` rows are filled."""

    def __init__(self, kv: torch.Tensor):
        self.kv = kv
        self.length = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` rows."""
        capacity = self.kv.shape[1]
        if length > capacity:
            grown = self.kv.new_empty(self.kv.shape[0], max(length, 2 * capacity), self.kv.shape[2])
            grown[:, : self.length] = self.kv[:, : self.length]
            self.kv = grown


class PromptChunk:
    """A prompt's chunk while it passes through the layers. Its rows in the step are `rows`."""

    def __init__(self, config: AttentionShape, key: Hashable, chunk: Chunk, rows: slice, prompt: Prompt | None):
        self.key, self.chunk, self.rows = key, chunk, rows
        self._heads = (config.n_q_heads, config.n_kv_heads, config.head_size)
        self._scale, self._windows = config.softmax_scale, config.windows
        self.prompt = prompt
        self._masks: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the chunk's rows: q [n, n_q_heads * d] and kv [n, 2 * n_kv_heads * d] -> out [n, n_q_heads *
        d]."""
        n_q, n_kv, size = self._heads
        n, pos = len(q), self.chunk.pos
        if self.prompt is not None:
            everything = self.prompt.kv[layer, : pos + n]
            everything[pos:] = kv
            kv = everything
        window = self._windows[layer]
        if not window or pos + n <= window:
            window = 0
        first = max(0, pos - window + 1) if window else 0  # the earliest position that a row attends to
        k, v = kv[first:].view(pos + n - first, 2, n_kv, size).permute(1, 2, 0, 3)[:, None]
        attended = F.scaled_dot_product_attention(
            q.view(n, n_q, size).transpose(0, 1)[None],
            k,
            v,
            attn_mask=self._mask(window, first, q) if pos or window else None,
            is_causal=not (pos or window),
            scale=self._scale,
            enable_gqa=n_q != n_kv,
        )
        out.view(n, n_q, size).copy_(attended[0].transpose(0, 1))

    def _mask(self, window: int, first: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask [n, positions from `first`] of the window size, made once a step.

        Row j attends to the positions (pos + j - window, pos + j], with window 0 to all up to pos + j.
        """
        mask = self._masks.get(window)
        if mask is None:
            n, pos = len(like), self.chunk.pos
            rows = torch.arange(pos, pos + n, device=like.device)[:, None]
            columns = torch.arange(first, pos + n, device=like.device)
            hidden = columns > rows
            if window:
                hidden |= columns <= rows - window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask
        return mask
